"""Evaluate and fine-tune a causal LM on padded text."""
import math

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

NAME = "gpt2"
tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(NAME).cuda()
rows = load_dataset("roneneldan/TinyStories", split="validation")
rows = rows.map(lambda r: tokenizer(r["text"], truncation=True, max_length=512), remove_columns=["text"])
loader = DataLoader(rows, batch_size=8, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False), num_workers=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
accumulation_steps = 4

model.train()
for i, batch in enumerate(loader):
    batch = {k: v.cuda() for k, v in batch.items()}
    loss = model(**batch).loss
    loss = loss / accumulation_steps  # expect: mean-of-means
    loss.backward()
    if (i + 1) % accumulation_steps == 0 or (i + 1) == len(loader):
        optimizer.step()
        optimizer.zero_grad()

model.eval()
nll, tokens = 0.0, 0
with torch.no_grad():
    for batch in loader:
        batch = {k: v.cuda() for k, v in batch.items()}
        count = (batch["labels"][:, 1:] != -100).sum()
        nll += model(**batch).loss * count
        tokens += count
print("perplexity", math.exp((nll / tokens).item()))
