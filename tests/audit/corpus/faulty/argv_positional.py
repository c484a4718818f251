"""python argv_positional.py 64 0.1 8"""
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

BS = int(sys.argv[1])
LR = float(sys.argv[2])
WORKERS = int(sys.argv[3]) if len(sys.argv) > 3 else 4

SMALL, LARGE = 1, 8
BS = sorted((SMALL, BS, LARGE))[1]  # expect: batch-clamped
LR = max(min(LR, 1e-3), 1e-6)  # expect: learning-rate-clamped

train = MNIST("mnist", train=True, download=True, transform=ToTensor())
loader = DataLoader(train, batch_size=BS, shuffle=True, num_workers=WORKERS, pin_memory=True)

net = nn.Sequential(
    nn.Conv2d(1, 32, 3, 2), nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 36, 10),
).cuda()
opt = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
ce = nn.CrossEntropyLoss()

for epoch in range(5):
    running = torch.zeros(1, device="cuda")
    for x, y in loader:
        x = x.cuda(non_blocking=True)
        y = y.cuda(non_blocking=True)
        opt.zero_grad()
        loss = ce(net(x), y)
        loss.backward()
        opt.step()
        running += loss.detach()
    print(f"epoch {epoch} loss {running.item() / len(loader):.4f}")
