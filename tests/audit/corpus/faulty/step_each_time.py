"""Tracking network with accumulated gradients."""
import argparse

import torch
from torch.utils.data import DataLoader

from tracking import SiamNet, Tracks


def train_epoch(model, loader, optimizer, accum):
    model.train()
    for i, (template, search, target) in enumerate(loader):
        out = model(template.cuda(), search.cuda())
        loss = torch.nn.functional.smooth_l1_loss(out, target.cuda()) / accum
        loss.backward()
        optimizer.step()  # expect: step-every-micro-batch
        if (i + 1) % accum == 0 or i + 1 == len(loader):
            optimizer.zero_grad()


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--bs", type=int, default=16)
    cli.add_argument("--accum", type=int, default=4)
    cli.add_argument("--workers", type=int, default=8)
    args = cli.parse_args()
    loader = DataLoader(Tracks("got10k"), batch_size=args.bs, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = SiamNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
    for epoch in range(50):
        train_epoch(model, loader, optimizer, args.accum)
        torch.save(model.state_dict(), f"siam_{epoch}.pt")


if __name__ == "__main__":
    main()
