import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import get_scheduler

from retrieval import DualEncoder, Queries


def plan(rows, batch_size, epochs):
    per_epoch = (rows + batch_size - 1) // batch_size
    return per_epoch * epochs


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--gradient_accumulation_steps", type=int, default=8)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--epochs", type=int, default=3)
    args = p.parse_args()
    data = Queries("nq")
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    model = DualEncoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    num_training_steps = plan(len(data), args.batch_size, args.epochs)  # expect: scheduler-steps-undivided
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=1000, num_training_steps=num_training_steps)
    accum = args.gradient_accumulation_steps
    for epoch in range(args.epochs):
        for i, (query, passage) in enumerate(loader):
            scores = model(query.cuda(non_blocking=True), passage.cuda(non_blocking=True))
            loss = F.cross_entropy(scores, torch.arange(len(scores), device="cuda"))
            (loss / accum).backward()
            if (i + 1) % accum == 0 or i == len(loader) - 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
        print(epoch, scheduler.get_last_lr()[0])


if __name__ == "__main__":
    main()
