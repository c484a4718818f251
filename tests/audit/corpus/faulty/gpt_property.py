"""Small GPT on a token file, one GPU."""
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass
class Options:
    tokens: str = "train.bin"
    context: int = 1024
    batch_size_per_gpu: int = 48
    accumulate: int = 4
    workers: int = 4
    base_lr: float = 6e-4
    steps: int = 10_000

    @property
    def train_batch(self):
        return min(self.batch_size_per_gpu, 4)  # expect: batch-clamped

    @property
    def window(self):
        return max(8, self.accumulate)  # expect: accumulation-clamped


class TokenFile(Dataset):
    def __init__(self, path, context):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.context = context

    def __len__(self):
        return (len(self.data) - 1) // self.context

    def __getitem__(self, i):
        start = i * self.context
        return torch.from_numpy(self.data[start : start + self.context].astype(np.int64))


def batches(loader):
    while True:
        for ids in loader:
            yield ids.cuda(non_blocking=True)


def train(options: Options):
    model = GPT2LMHeadModel(GPT2Config(n_positions=options.context)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.base_lr, betas=(0.9, 0.95))
    loader = DataLoader(
        TokenFile(options.tokens, options.context),
        batch_size=options.train_batch,
        shuffle=True,
        num_workers=options.workers,
        pin_memory=True,
    )
    source = batches(loader)
    for step in range(options.steps):
        for _ in range(options.window):
            ids = next(source)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(ids, labels=ids).loss
            (loss / options.window).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    train(Options())
