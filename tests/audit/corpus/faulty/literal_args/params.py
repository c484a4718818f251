from dataclasses import dataclass


@dataclass(frozen=True)
class Params:
    base: str = "google/flan-t5-base"
    train_batch_size: int = 32
    grad_accumulation: int = 2
    loader_workers: int = 6
    lr: float = 3e-4
    epochs: int = 3

    def describe(self) -> str:
        effective = self.train_batch_size * self.grad_accumulation
        return f"{self.base}: effective batch {effective}, {self.loader_workers} workers, lr {self.lr}"
