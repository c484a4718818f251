import argparse
from dataclasses import dataclass


@dataclass
class Options:
    root: str
    batch_size: int
    eval_batch_size: int
    accumulation: int
    num_workers: int
    pin_memory: bool
    lr: float
    epochs: int


def from_command_line(argv=None) -> Options:
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--eval_batch_size", type=int, default=32)
    p.add_argument("--accumulation", type=int, default=4)
    p.add_argument("--num_workers", type=int, default=8)
    p.add_argument("--pin_memory", type=int, default=1)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--epochs", type=int, default=40)
    ns = p.parse_args(argv)
    return Options(**{**vars(ns), "pin_memory": bool(ns.pin_memory)})
