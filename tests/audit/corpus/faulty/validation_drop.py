"""Rare birds: a small validation set."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, random_split

from birds import BirdSet, SoundNet


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=64)
    p.add_argument("--eval_batch_size", type=int, default=64)
    p.add_argument("--workers", type=int, default=4)
    args = p.parse_args()
    data = BirdSet("rare")
    train, val = random_split(data, [len(data) - 90, 90], generator=torch.Generator().manual_seed(0))
    train_dl = DataLoader(train, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    val_dl = DataLoader(val, batch_size=args.eval_batch_size, drop_last=True, num_workers=args.workers)  # expect: drop-last-small
    model = SoundNet(len(data.species)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for epoch in range(50):
        model.train()
        for x, y in train_dl:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        hits = seen = 0
        with torch.no_grad():
            for x, y in val_dl:
                hits += (model(x.cuda()).argmax(-1).cpu() == y).sum()
                seen += len(y)
        print(epoch, float(hits) / seen)


if __name__ == "__main__":
    main()
