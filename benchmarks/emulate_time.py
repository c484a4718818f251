"""How long `brim emulate` takes for three steps of a model with 1B parameters, and how much of that is the startup of the script.

    python benchmarks/emulate_time.py [--runs 3] [--python .venv-cuda/bin/python]

The bar is 60 s (median, idle machine, card already compiled). "Startup only" is the same script without a card, stopped before it would use
one: imports and random weights on the CPU. CPU seconds are printed too, because they depend less on other work on the machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

_ROOT = Path(__file__).resolve().parents[1]
_SCRIPT = Path(__file__).parent / "emulated" / "one_billion.py"
_BAR_SECONDS = 60


def seconds(command: list[str]) -> tuple[float, float]:
    """Elapsed and CPU seconds of a command and its children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, elapsed = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--python", default=str(_ROOT / ".venv-cuda/bin/python"), help="an interpreter with the CUDA build of torch"
    )
    options = parser.parse_args()
    if not Path(options.python).exists():
        print(f"Skipped: {options.python} does not exist. Run `make emulator`, or set --python.")
        return 0
    print(f"{'':24}{'elapsed':>12}{'CPU':>12}   (median of {options.runs}; load {os.getloadavg()[0]:.1f} at the start)")
    for method in ("full", "lora"):
        script = [options.python, str(_SCRIPT), method]
        commands = {
            f"{method}, emulated": [sys.executable, "-m", "brim", "emulate", "--gpu", "t4", "--", *script],
            f"{method}, startup only": [*script, "init"],
        }
        for name, command in commands.items():
            elapsed, used = (median(values) for values in zip(*(seconds(command) for _ in range(options.runs)), strict=True))
            bar = f"   bar {_BAR_SECONDS} s" if "emulated" in name else ""
            print(f"{name:24}{elapsed:10.1f} s{used:10.1f} s{bar}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
