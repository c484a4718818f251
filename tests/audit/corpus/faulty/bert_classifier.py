import argparse

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

ap = argparse.ArgumentParser("bert")
ap.add_argument("-b", "--bs", dest="bs", type=int, default=32)
ap.add_argument("--max-len", type=int, default=256)
ap.add_argument("--lr", type=float, default=5e-5)
ap.add_argument("--workers", type=int, default=4)
opt = ap.parse_args()

tok = AutoTokenizer.from_pretrained("bert-base-uncased")
raw = load_dataset("glue", "sst2")
limit = opt.max_len if opt.max_len <= 128 else 128  # expect: length-clamped


def encode(rows):
    return tok(rows["sentence"], truncation=True, max_length=limit)


enc = raw.map(encode, batched=True, remove_columns=["sentence", "idx"])
enc = enc.rename_column("label", "labels")
n = opt.bs if opt.bs < 4 else 4  # expect: batch-clamped
loader = DataLoader(enc["train"], batch_size=n, shuffle=True, collate_fn=DataCollatorWithPadding(tok), num_workers=opt.workers)

device = torch.device("cuda")
net = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2).to(device)
optim = torch.optim.AdamW(net.parameters(), lr=opt.lr)

net.train()
for epoch in range(3):
    for i, batch in enumerate(loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = net(**batch).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        if i % 100 == 0:
            print(epoch, i, loss.item())
net.save_pretrained("sst2-bert")
