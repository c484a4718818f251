"""Accumulate sums of token losses, divide once by the number of tokens."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from instructions import Instructions, collate


def windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    p.add_argument("--batch_size", type=int, default=4)
    p.add_argument("--accumulate", type=int, default=8)
    p.add_argument("--workers", type=int, default=2)
    args = p.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda()
    loader = DataLoader(Instructions(tokenizer), batch_size=args.batch_size, shuffle=True, collate_fn=collate, num_workers=args.workers, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for epoch in range(2):
        for window in windows(loader, args.accumulate):
            tokens = sum((b["labels"][:, 1:] != -100).sum() for b in window).cuda()
            for batch in window:
                batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
                labels = batch.pop("labels")
                logits = model(**batch).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
                (loss / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.save_pretrained(f"epoch-{epoch}")


if __name__ == "__main__":
    main()
