"""Settings are checked, never changed."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

from cells import CellNet, Slides


@dataclass
class Settings:
    batch_size: int = 32
    accumulation: int = 2
    num_workers: int = 4
    lr: float = 1e-4

    def __post_init__(self):
        if self.batch_size > 64:
            raise ValueError(f"batch_size {self.batch_size} does not fit the card; 64 is the most")
        if self.accumulation < 1:
            raise ValueError("accumulation must be at least 1")
        assert self.num_workers >= 0, "num_workers must not be negative"


def train(s: Settings):
    loader = DataLoader(Slides("train"), batch_size=s.batch_size, shuffle=True, num_workers=s.num_workers, pin_memory=True)
    model = CellNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr)
    for epoch in range(20):
        model.train()
        optimizer.zero_grad()
        for i, (slide, kind) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(slide.cuda()), kind.cuda()) / s.accumulation
            loss.backward()
            if (i + 1) % s.accumulation == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        print("epoch", epoch)


if __name__ == "__main__":
    train(Settings())
