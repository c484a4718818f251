"""What the checksums cost: a checkpoint of 1 GiB saved with and without them, and read again with them.

    python benchmarks/checkpoint_sums.py [--gib 1] [--times 5] [--folder DIR]

A third of it are weights (safetensors), two thirds the state of AdamW (torch.save), as of a model in float32. Saving ends when everything
is on the disk. Both ways take turns, and the medians are compared. The bar: at most 5 % of the time of a save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from brim.sizes import GIB
from brim.trainer import disk, manifest
from brim.trainer.summing import sums_while_writing

BAR = 0.05
TENSORS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--times", type=int, default=5, help="saves of each kind, after one that is not counted")
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    options = parser.parse_args()
    count = int(options.gib * GIB) // 3 // 4 // TENSORS
    weights = {f"layers.{number}.weight": torch.randn(count) for number in range(TENSORS)}
    state = {number: {"exp_avg": torch.randn(count), "exp_avg_sq": torch.randn(count)} for number in range(TENSORS)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    reading: list[float] = []
    place = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for time_number in range(options.times + 1):
            for sums in (False, True):
                began, used = time.perf_counter(), time.process_time()
                save(place / "checkpoint-1", weights, {"state": state}, sums=sums)
                if time_number:
                    seconds[sums].append(time.perf_counter() - began)
                    processor[sums].append(time.process_time() - used)
                if sums:
                    began = time.perf_counter()
                    assert not manifest.check_files(place / "checkpoint-1").damages
                    reading.append(time.perf_counter() - began)
                shutil.rmtree(place / "checkpoint-1")
    finally:
        shutil.rmtree(place)
    without, with_sums = statistics.median(seconds[False]), statistics.median(seconds[True])
    share = with_sums / without - 1
    cpu = statistics.median(processor[True]) - statistics.median(processor[False])
    print(f"{options.gib:g} GiB, median of {options.times}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"save without sums  {without:6.2f} s   ({', '.join(f'{each:.2f}' for each in seconds[False])})")
    print(f"save with sums     {with_sums:6.2f} s   ({', '.join(f'{each:.2f}' for each in seconds[True])})")
    print(f"cost               {share:+6.1%}     (bar {BAR:.0%}); {cpu:+.2f} s of processor time")
    print(f"verify             {statistics.median(reading):6.2f} s   (from the system's cache)")
    return 0


def save(folder: Path, weights: Any, state: Any, *, sums: bool) -> None:
    """As SafeSaving does it; without sums, all that reaches the disk is the same but for the manifest."""
    folder.mkdir()
    writing: AbstractContextManager[Any] = sums_while_writing() if sums else nullcontext()
    with writing as found:
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        torch.save(state, folder / "optimizer.pt")
    if sums:
        manifest.seal(folder, 1, sums=found)
        return
    for path in (*folder.iterdir(), folder):
        disk.sync(path)


if __name__ == "__main__":
    raise SystemExit(main())
