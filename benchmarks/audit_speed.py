"""How long the source audit takes: 50,000 lines of installed packages, and of nothing but training scripts.

    python benchmarks/audit_speed.py [--lines 50000]

Bar: 10 s on an idle machine. The training scripts are the hard case, for every file of them has loops, loaders and settings to follow.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import brim

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("accelerate", "trl", "peft", "transformers")
CORPUS = Path(__file__).parents[1] / "tests" / "audit" / "corpus"
BAR_SECONDS = 10.0


def installed() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((Path(sysconfig.get_paths()["purelib"]) / package).rglob("*.py"))


def scripts() -> Iterator[Path]:
    while True:
        yield from sorted(CORPUS.rglob("*.py"))


def gather(sources: Iterator[Path], lines: int, folder: Path) -> int:
    """Copy files until there are enough lines, a hundred to a folder."""
    count = 0
    for index, path in enumerate(sources):
        text = path.read_text(encoding="utf-8", errors="replace")
        home = folder / f"part{index // 100:04}"
        home.mkdir(exist_ok=True)
        (home / f"{index:05}_{path.name}").write_text(text, encoding="utf-8")
        count += text.count("\n")
        if count >= lines:
            return count
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    wanted = parser.parse_args().lines
    worst = 0.0
    for name, sources in (("installed packages", installed()), ("training scripts", scripts())):
        with tempfile.TemporaryDirectory() as folder:
            count = gather(sources, wanted, Path(folder))
            began, cpu = time.perf_counter(), time.process_time()
            diagnosis = brim.doctor(folder, predict=False)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        worst = max(worst, seconds)
        print(
            f"{name}: {count} lines, {diagnosis.files} files, {len(diagnosis.findings)} findings: {seconds:.1f} s ({cpu:.1f} s of CPU)"
        )
    print(f"bar {BAR_SECONDS:.0f} s: {'kept' if worst <= BAR_SECONDS else 'missed'}")
    return 0 if worst <= BAR_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
