"""How long `brim --help` takes: the median of ten starts, beside a bare interpreter and peers, interleaved in one run.

    python benchmarks/startup.py

The promise is under 0.2 s on two modest cores. Timings are noisy, so what counts is the median and the distance to bare Python.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
COMMANDS = {
    "bare python": [sys.executable, "-c", "pass"],
    "brim --help": [str(BIN / "brim"), "--help"],
    "brim gpus t4": [str(BIN / "brim"), "gpus", "t4"],
    "brim models tinyllama": [str(BIN / "brim"), "models", "tinyllama"],
    "hf --help": [str(BIN / "hf"), "--help"],
    "accelerate --help": [str(BIN / "accelerate"), "--help"],
}
ROUNDS = 10


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    return time.perf_counter() - began


def main() -> None:
    commands = {name: command for name, command in COMMANDS.items() if shutil.which(command[0])}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values():
        seconds(command)  # once for the disk cache
    for _round in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:<24} {median:6.3f} s  (least {min(times[name]):.3f}, most {max(times[name]):.3f})")
    print(json.dumps({"median_seconds": {name: round(median, 4) for name, median in medians.items()}}))


if __name__ == "__main__":
    main()
