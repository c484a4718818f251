"""Accelerate with accumulation, the documented way."""
import argparse
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms
from transformers import get_scheduler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--train_batch_size", type=int, default=32)
    p.add_argument("--eval_batch_size", type=int, default=64)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--num_workers", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    args = parse()
    set_seed(args.seed)
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision="bf16")
    pre = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    train = datasets.Food101("food", split="train", transform=pre, download=True)
    test = datasets.Food101("food", split="test", transform=pre, download=True)
    train_dl = DataLoader(train, batch_size=args.train_batch_size, shuffle=True, num_workers=args.num_workers)
    test_dl = DataLoader(test, batch_size=args.eval_batch_size, num_workers=args.num_workers)
    model = models.convnext_tiny(num_classes=101)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_dl, test_dl = accelerator.prepare(model, optimizer, train_dl, test_dl)
    updates = math.ceil(len(train_dl) / args.gradient_accumulation_steps) * args.epochs
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=100, num_training_steps=updates)
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_dl:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = torch.zeros((), device=accelerator.device)
        for x, y in test_dl:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right += (guess == y).sum()
        accelerator.print(epoch, right.item() / len(test))
    accelerator.save_model(model, "convnext")


if __name__ == "__main__":
    main()
