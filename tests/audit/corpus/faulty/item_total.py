"""STL-10 baseline.

Forty epochs of SGD on the labelled part.
Prints the mean loss of each epoch.
"""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def run_epoch(model, loader, optimizer):
    total, hits = 0.0, 0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)  # expect: item-every-step
    return total / len(loader.dataset), hits


if __name__ == "__main__":
    data = datasets.STL10("stl10", split="train", download=True, transform=transforms.ToTensor())
    dl = DataLoader(data, batch_size=100, shuffle=True, num_workers=4, pin_memory=True)
    net = models.resnet18(num_classes=10).cuda()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for e in range(40):
        print(e, run_epoch(net, dl, sgd)[0])
