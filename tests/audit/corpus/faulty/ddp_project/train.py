import argparse

import torch
import torch.distributed as dist

from data import build
from dist_utils import init, wrap
from minigpt import MiniGPT


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", default="train.bin")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--epochs", type=int, default=2)
    args = p.parse_args()
    rank = init()
    loader = build(args.tokens, args.length, args.batch, args.workers)
    model = wrap(MiniGPT(layers=12, width=768), rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    for epoch in range(args.epochs):  # expect: set-epoch-missing
        for i, ids in enumerate(loader):
            ids = ids.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(ids[:, :-1], ids[:, 1:])
            (loss / args.accum).backward()  # expect: sync-every-micro-batch
            if (i + 1) % args.accum == 0 or i + 1 == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if i % 200 == 0 and rank == 0:
                print(epoch, i, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
