import torch
from datasets import load_dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorWithPadding

from encoder import TruncatedEncoder

NAME = "Qwen/Qwen2.5-0.5B"
BATCH_SIZE = 32


def main():
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    rows = load_dataset("rotten_tomatoes", split="train")
    rows = rows.map(lambda r: tokenizer(r["text"], truncation=True), remove_columns=["text"])
    loader = DataLoader(rows, batch_size=BATCH_SIZE, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer), num_workers=2)
    encoder = TruncatedEncoder(NAME, depth=6).cuda()
    head = nn.Linear(encoder.width, 2).cuda()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-5)
    for epoch in range(3):
        for batch in loader:
            batch = {k: v.cuda() for k, v in batch.items()}
            logits = head(encoder(batch["input_ids"], batch["attention_mask"]))
            loss = nn.functional.cross_entropy(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
