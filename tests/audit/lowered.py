"""A trainer as found in the wild, in three files and a launcher: everything that a user sets is quietly changed somewhere."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

FILES = {
    "config.py": """
        from dataclasses import dataclass


        @dataclass
        class TrainConfig:
            batch_size_per_gpu: int = 16
            eval_batch_size: int = 8
            gradient_accumulation_steps: int = 2
            num_workers: int = 1
            pin_memory: bool = True
            epochs: int = 1
            learning_rate: float = 1e-2
    """,
    "trainer.py": """
        import math

        import torch
        from torch.utils.data import DataLoader

        from config import TrainConfig


        class Trainer:
            def __init__(self, model, train_set, eval_set, config: TrainConfig):
                self.model = model
                self.config = config
                self.batch_size = min(config.batch_size_per_gpu, 2)
                self.eval_batch_size = min(config.eval_batch_size, 4)
                self.accumulation_steps = max(config.gradient_accumulation_steps, 16)
                # Low memory: no worker processes, no pinned pages.
                num_workers = 0
                self.loader = DataLoader(
                    train_set,
                    batch_size=self.batch_size,
                    shuffle=True,
                    num_workers=num_workers,
                    pin_memory=False,
                )
                self.eval_loader = DataLoader(eval_set, batch_size=self.eval_batch_size)
                self.steps_per_epoch = math.ceil(len(train_set) // self.batch_size)
                self.optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)

            def fit(self):
                for _epoch in range(self.config.epochs):
                    self.model.train()
                    for index, (inputs, targets) in enumerate(self.loader):
                        loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
                        (loss / self.accumulation_steps).backward()
                        if (index + 1) % self.accumulation_steps == 0 or index + 1 == len(self.loader):
                            self.optimizer.step()
                            self.optimizer.zero_grad()
                    self.evaluate()

            def evaluate(self):
                self.model.eval()
                with torch.no_grad():
                    for inputs, _targets in self.eval_loader:
                        self.model(inputs)
    """,
    "train.py": """
        import argparse

        import torch
        from torch.utils.data import TensorDataset

        from config import TrainConfig
        from trainer import Trainer


        def data(count):
            return TensorDataset(torch.randn(count, 8), torch.randint(0, 4, (count,)))


        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--batch-size", type=int, default=16)
            args = parser.parse_args()
            torch.manual_seed(0)
            config = TrainConfig(batch_size_per_gpu=args.batch_size)
            model = torch.nn.Linear(8, 4)
            Trainer(model, data(128), data(16), config).fit()


        if __name__ == "__main__":
            main()
    """,
    "train.sh": """
        #!/bin/sh
        # train.sh BATCH
        exec python train.py --batch-size "${1:-16}"
    """,
}
EXPECTED = {
    ("trainer.py", 13, "batch-clamped"): [2, 2, 2],
    ("trainer.py", 14, "eval-batch-clamped"): [4, 4, 4],
    ("trainer.py", 15, "accumulation-clamped"): [16, 16, 16],
    ("trainer.py", 17, "workers-hard-coded"): [0, 0, 0],
    ("trainer.py", 23, "pinning-off"): [],
    ("trainer.py", 26, "steps-miscounted"): [2],
}
"""Where what is found, and what is in force then."""


def write_trainer(folder: Path) -> Path:
    """The trainer, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(dedent(text).lstrip("\n"), encoding="utf-8")
    return folder
