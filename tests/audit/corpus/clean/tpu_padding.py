"""XLA compiles one program per shape, so every batch has the same length."""
import argparse

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=128)
    p.add_argument("--max_length", type=int, default=128)
    p.add_argument("--lr", type=float, default=5e-5)
    args = p.parse_args()
    device = xm.xla_device()
    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
    data = load_dataset("glue", "sst2", split="train")
    data = data.map(
        lambda r: tokenizer(r["sentence"], padding="max_length", truncation=True, max_length=args.max_length),
        batched=True,
    ).with_format("torch", columns=["input_ids", "attention_mask", "label"])
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=4)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model.train()
    for epoch in range(3):
        for step, batch in enumerate(pl.MpDeviceLoader(loader, device)):
            optimizer.zero_grad()
            loss = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"]).loss
            loss.backward()
            xm.optimizer_step(optimizer)
            if step % 200 == 0:
                xm.master_print(epoch, step, loss.item())
    xm.save(model.state_dict(), "sst2.pt")


if __name__ == "__main__":
    torch_xla.launch(lambda index: main())
