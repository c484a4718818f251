import argparse

import torch
from torch.utils.data import DataLoader

from ctdata import Volumes
from vnet import VNet


def dice_loss(p, t):
    p = p.softmax(1)[:, 1]
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1e-5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    loader = DataLoader(Volumes("liver"), batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = VNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for epoch in range(300):
        optimizer.zero_grad()
        for i, (volume, label) in enumerate(loader):
            pred = model(volume.cuda(non_blocking=True))
            loss = dice_loss(pred, label.cuda(non_blocking=True))
            loss.backward()  # expect: loss-undivided
            if (i + 1) % args.accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        if epoch % 10 == 0:
            torch.save(model.state_dict(), f"vnet-{epoch}.pt")


if __name__ == "__main__":
    main()
