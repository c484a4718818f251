import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_scheduler

from audio import Keywords, KwsNet


def run(args):
    data = Keywords(args.root)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = KwsNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = math.ceil(len(data) // args.batch_size)  # expect: steps-miscounted
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=updates // 2, num_training_steps=updates * args.epochs)
    for epoch in range(args.epochs):
        for wave, label in loader:
            loss = nn.functional.cross_entropy(model(wave.cuda()), label.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(epoch, scheduler.get_last_lr())


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--batch_size", type=int, default=100)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--epochs", type=int, default=20)
    run(p.parse_args())
