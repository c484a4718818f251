import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, Trainer


class Letters(Dataset):
    def __init__(self, rows, max_tokens):
        self.rows, self.max_tokens = rows, max_tokens
        self.tokenizer = AutoTokenizer.from_pretrained("gpt2")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = self.tokenizer(self.rows[index]).input_ids[: self.max_tokens]
        mask = [1] * len(ids)
        ids.extend([self.tokenizer.eos_token_id] * (self.max_tokens - len(ids)))  # expect: padding-to-maximum
        mask += [0] * (self.max_tokens - len(mask))
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(ids)}


def pad_all(rows, max_length):
    return [(max_length - len(row)) * [0] + row for row in rows]


def collate(rows):
    return torch.tensor(pad_all(rows, max(len(row) for row in rows)))


def main(model, arguments, rows):
    Trainer(model=model, args=arguments, train_dataset=Letters(rows, 2048)).train()
