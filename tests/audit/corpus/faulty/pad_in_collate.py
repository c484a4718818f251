import json

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer


class Questions(Dataset):
    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            self.items = [json.loads(line) for line in f]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]["question"], self.items[i]["answer"]


class Collator:
    def __init__(self, tokenizer, max_len):
        self.tokenizer = tokenizer
        self.max_len = max_len

    def __call__(self, batch):
        questions, answers = zip(*batch)
        # 统一长度
        enc = self.tokenizer(
            list(questions),
            padding="max_length",  # expect: padding-to-maximum
            truncation=True,
            max_length=self.max_len,
            return_tensors="pt",
        )
        target = self.tokenizer(list(answers), padding=True, truncation=True, max_length=64, return_tensors="pt").input_ids
        enc["labels"] = target.masked_fill(target == self.tokenizer.pad_token_id, -100)
        return enc


def main():
    tokenizer = AutoTokenizer.from_pretrained("google/mt5-small")
    model = AutoModelForSeq2SeqLM.from_pretrained("google/mt5-small").cuda()
    loader = DataLoader(Questions("qa.jsonl"), batch_size=16, shuffle=True, collate_fn=Collator(tokenizer, 1024), num_workers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for epoch in range(5):
        for batch in loader:
            loss = model(**batch.to("cuda")).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(f"mt5-{epoch}")


if __name__ == "__main__":
    main()
