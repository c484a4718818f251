"""ResNet on CIFAR-10, settings from a YAML file."""
import sys

import numpy as np
import torch
import torch.nn as nn
import yaml
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

with open(sys.argv[1] if len(sys.argv) > 1 else "cifar.yaml") as f:
    cfg = yaml.safe_load(f)

train_cfg = cfg["train"]
opt_cfg = cfg["optimizer"]


def get_data():
    normalise = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261))
    augment = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.ToTensor(), normalise])
    plain = transforms.Compose([transforms.ToTensor(), normalise])
    return (
        datasets.CIFAR10("data", train=True, download=True, transform=augment),
        datasets.CIFAR10("data", train=False, download=True, transform=plain),
    )


def get_loaders():
    train, test = get_data()
    bs = int(np.clip(train_cfg["batch_size"], 1, 16))  # expect: batch-clamped
    nw = int(np.clip(train_cfg["num_workers"], 0, 1))  # expect: workers-clamped
    a = DataLoader(train, batch_size=bs, shuffle=True, num_workers=nw, pin_memory=True)
    b = DataLoader(test, batch_size=train_cfg["eval_batch_size"], num_workers=nw, pin_memory=True)
    return a, b


def run():
    train_loader, test_loader = get_loaders()
    net = models.resnet18(num_classes=10).cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=opt_cfg["lr"], momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=train_cfg["epochs"])
    for epoch in range(train_cfg["epochs"]):
        net.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            loss.backward()
            optimizer.step()
        scheduler.step()
        net.eval()
        right = 0
        with torch.no_grad():
            for x, y in test_loader:
                right += (net(x.cuda()).argmax(1) == y.cuda()).sum()
        print("epoch", epoch, "acc", (right / len(test_loader.dataset)).item())


if __name__ == "__main__":
    run()
