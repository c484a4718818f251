"""Options that fall back to others only when they were not given."""
import argparse
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from birds import BirdSet, SoundNet


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int)
    p.add_argument("--eval_batch_size", type=int)
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--num_workers", type=int, default=4)
    p.add_argument("--lr", type=float)
    args = p.parse_args()
    if args.batch_size is None:
        args.batch_size = 32
    args.eval_batch_size = args.eval_batch_size or args.batch_size
    args.lr = 1e-3 if args.lr is None else args.lr
    args.accumulate = max(1, args.accumulate)
    return args


def main():
    args = parse()
    # workers cannot be forked on Windows
    workers = 0 if sys.platform == "win32" else args.num_workers
    train, test = BirdSet("train"), BirdSet("test")
    train_dl = DataLoader(train, batch_size=args.batch_size, shuffle=True, num_workers=workers, pin_memory=torch.cuda.is_available())
    test_dl = DataLoader(test, batch_size=args.eval_batch_size, num_workers=workers)
    model = SoundNet(len(train.species)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(20):
        model.train()
        for i, (x, y) in enumerate(train_dl, 1):
            loss = F.cross_entropy(model(x.cuda()), y.cuda()) / args.accumulate
            loss.backward()
            if i % args.accumulate == 0 or i == len(train_dl):
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            hits = sum((model(x.cuda()).argmax(-1).cpu() == y).sum() for x, y in test_dl)
        print(epoch, float(hits) / len(test))


if __name__ == "__main__":
    main()
