"""Data sets that take their time, note who read them, or break: importable, so that workers of any start method can have them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from brim.machine.records import Host
from brim.prober.loader import tune_loader
from brim.records import LoaderSettings
from brim.sizes import GIB, MIB


def fake_host(cores: float = 8.0, available_bytes: int = 16 * GIB, shm_bytes: int | None = 8 * GIB) -> Host:
    """A host that allows much, so that one limit at a time can be seen."""
    return Host(
        memory_bytes=64 * GIB,
        available_bytes=available_bytes,
        cores=cores,
        affinity_cores=max(1, int(cores)),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_bytes,
    )


class Slow(Dataset[Any]):
    """Every item takes `item_seconds` of waiting, as for a disk."""

    def __init__(self, item_seconds: float, count: int = 1000) -> None:
        self.item_seconds, self.count = item_seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Any:
        if not 0 <= place < self.count:
            raise IndexError(place)
        if self.item_seconds:
            time.sleep(self.item_seconds)
        return torch.full((16,), place)


class Busy(Slow):
    """Every item takes its time of a core."""

    def __getitem__(self, place: int) -> torch.Tensor:
        until = time.thread_time() + self.item_seconds
        while time.thread_time() < until:
            pass
        return torch.full((16,), place)


class Noted(Slow):
    """Leaves a file for each worker that ever lived, with how many were alive when it was born, and holds memory in it."""

    def __init__(self, folder: Path, item_seconds: float, held_bytes: int = 0) -> None:
        super().__init__(item_seconds)
        self.folder, self.held_bytes, self.held = folder, held_bytes, b""

    def __getitem__(self, place: int) -> Any:
        if get_worker_info() is not None and not (self.folder / str(os.getpid())).exists():
            self.held = bytes(bytearray(os.urandom(4096)) * (self.held_bytes // 4096))
            alive = sum(is_alive(int(path.name)) for path in self.folder.iterdir())
            (self.folder / str(os.getpid())).write_text(str(alive + 1))
        return super().__getitem__(place)


class Random(Slow):
    """Draws from every generator there is, as augmentation does."""

    def __getitem__(self, place: int) -> Any:
        return super().__getitem__(place) + random.random() + float(np.random.rand()) + torch.rand(1)


class Broken(Slow):
    """Item 7 cannot be read."""

    def __getitem__(self, place: int) -> Any:
        if place == 7:
            raise ValueError("no picture\nat all")
        return super().__getitem__(place)


class BrokenInWorkers(Slow):
    """Works in the training process only; with `signal_number`, workers die of it."""

    def __init__(self, item_seconds: float, signal_number: int | None = None, first_workers: int = 0) -> None:
        super().__init__(item_seconds)
        self.signal_number, self.first_workers = signal_number, first_workers

    def __getitem__(self, place: int) -> Any:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > self.first_workers:
            if self.signal_number is not None:
                os.kill(os.getpid(), self.signal_number)
            raise ValueError("this handle\ncannot be shared")
        return super().__getitem__(place)


BUS_ERROR = int(signal.SIGBUS)


class Stream(IterableDataset[torch.Tensor]):
    """Seven items, each after a while."""

    def __init__(self, item_seconds: float, num_shards: int | None = None) -> None:
        self.item_seconds = item_seconds
        if num_shards is not None:
            self.num_shards = num_shards

    def __iter__(self) -> Iterator[torch.Tensor]:
        for place in range(7):
            time.sleep(self.item_seconds)
            yield torch.full((16,), place)


class Wide(Slow):
    """Items of 8 MiB."""

    def __getitem__(self, place: int) -> Any:
        return {"pixels": torch.zeros(8 * MIB, dtype=torch.uint8), "label": super().__getitem__(place)}


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def tune_noted(folder: Path, held_bytes: int, host_memory: int) -> LoaderSettings:
    """For a child process: items that note who made them."""
    return tune_loader(
        Noted(folder, 0.02, held_bytes), batch_size=8, step_seconds=0.05, host_memory=host_memory, host=fake_host()
    )
