"""Stops with advice when the batch does not fit."""
import argparse
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from video import ActionNet, Clips


def train(args):
    loader = DataLoader(Clips("kinetics"), batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = ActionNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        for clip, action in loader:
            loss = F.cross_entropy(model(clip.cuda(non_blocking=True)), action.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        torch.cuda.empty_cache()
        torch.save(model.state_dict(), "action.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--epochs", type=int, default=30)
    a = p.parse_args()
    try:
        train(a)
    except torch.cuda.OutOfMemoryError:
        half = max(1, a.batch_size // 2)
        sys.exit(f"out of memory at --batch_size {a.batch_size}; try --batch_size {half}")
