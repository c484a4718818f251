import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from tsdata import Forecaster, Windows


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bs", type=int, default=64)
    p.add_argument("--max_bs", type=int, default=1024, help="upper limit while the batch grows")
    p.add_argument("--eval_bs", type=int, default=512)
    p.add_argument("--grow_every", type=int, default=10)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--min_lr", type=float, default=1e-6)
    args = p.parse_args()
    train, valid = Windows("train"), Windows("valid")
    valid_dl = DataLoader(valid, batch_size=min(args.eval_bs, args.max_bs), num_workers=args.workers)
    model = Forecaster().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=max(args.lr, args.min_lr))
    for epoch in range(50):
        bs = min(args.bs * 2 ** (epoch // args.grow_every), args.max_bs)
        loader = DataLoader(train, batch_size=bs, shuffle=True, num_workers=args.workers, pin_memory=True)
        model.train()
        for x, y in loader:
            loss = nn.functional.l1_loss(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            error = torch.stack([nn.functional.l1_loss(model(x.cuda()), y.cuda()) for x, y in valid_dl]).mean()
        print(epoch, bs, error.item())


if __name__ == "__main__":
    main()
