"""Instruction tuning with prompt masking, hand-written loop."""
import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from instructions import Instructions


def collate(rows):
    ids = pad_sequence([torch.tensor(r["input_ids"]) for r in rows], batch_first=True, padding_value=0)
    labels = pad_sequence([torch.tensor(r["labels"]) for r in rows], batch_first=True, padding_value=-100)
    mask = pad_sequence([torch.ones(len(r["input_ids"]), dtype=torch.long) for r in rows], batch_first=True)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    p.add_argument("--batch_size", type=int, default=4)
    p.add_argument("--gradient_accumulation_steps", type=int, default=8)
    p.add_argument("--num_workers", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-5)
    args = p.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda()
    loader = DataLoader(Instructions(tokenizer), batch_size=args.batch_size, shuffle=True, collate_fn=collate, num_workers=args.num_workers, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(2):
        for i, batch in enumerate(loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss / args.gradient_accumulation_steps  # expect: mean-of-means
            loss.backward()
            if (i + 1) % args.gradient_accumulation_steps == 0 or i + 1 == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        model.save_pretrained(f"epoch-{epoch}")


if __name__ == "__main__":
    main()
