"""Effective batch split exactly, or refuse."""
import argparse
import math

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from leafset import LeafNet, Leaves


def accumulation(target, micro):
    if target % micro:
        raise SystemExit(f"--target {target} is not a multiple of --micro {micro}")
    return target // micro


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--target", type=int, default=256)
    p.add_argument("--micro", type=int, default=32)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    n = accumulation(args.target, args.micro)
    loader = DataLoader(Leaves("train"), batch_size=args.micro, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = LeafNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = math.ceil(len(loader) / n) * args.epochs
    scheduler = get_cosine_schedule_with_warmup(optimizer, max(1, updates // 20), updates)
    for epoch in range(args.epochs):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)) / n
            loss.backward()
            if (i + 1) % n == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
        print(epoch, scheduler.get_last_lr())


if __name__ == "__main__":
    main()
