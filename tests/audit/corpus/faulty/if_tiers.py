"""Choose sizes from the size of the card, then train."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from depth import DepthNet, Nyu


def choose(args):
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    bs, eval_bs = args.batch_size, args.eval_batch_size
    if total < 12:
        bs = 2  # expect: batch-clamped
        eval_bs = min(eval_bs, 4)  # expect: eval-batch-clamped
    elif total < 25:
        bs = bs if bs < 8 else 8  # expect: batch-clamped
    return bs, eval_bs


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--eval_batch_size", type=int, default=32)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-4)
    args = p.parse_args()
    bs, eval_bs = choose(args)
    train = DataLoader(Nyu("train"), batch_size=bs, shuffle=True, num_workers=args.workers, pin_memory=True)
    test = DataLoader(Nyu("test"), batch_size=eval_bs, num_workers=args.workers, pin_memory=True)
    net = DepthNet().cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    for epoch in range(25):
        net.train()
        for image, depth in train:
            loss = F.l1_loss(net(image.cuda(non_blocking=True)), depth.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            errors = torch.stack([F.l1_loss(net(i.cuda()), d.cuda()) for i, d in test])
        print(epoch, errors.mean().item())


if __name__ == "__main__":
    main()
