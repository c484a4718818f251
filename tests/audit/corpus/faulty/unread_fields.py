from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


@dataclass
class Args:
    data: str = "cifar"
    batch_size: int = 128
    gradient_accumulation_steps: int = 4  # expect: setting-unused
    num_workers: int = 8  # expect: setting-unused
    lr: float = 0.1
    epochs: int = 100


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 100),
    )


def train(args: Args):
    data = datasets.CIFAR100(args.data, download=True, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    net = small_net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    train(Args())
