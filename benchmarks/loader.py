"""The loader tuner on items of 0, 5 and 40 ms: how many workers it picks, and what is left of the wait. Real workers, real seconds.

    python benchmarks/loader.py [--rounds 3] [--json]

A batch has 8 items and a step is stood for by 50 ms of sleep, so that the three data sets need no worker, one or two, and more than the
two cores of the host that is described to the tuner may carry (at most four that only wait). Once more with memory for one worker: no
second may ever live. Each round measures all four in turn; exit 1 if in most rounds an answer is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
BATCH, STEP_SECONDS = 8, 0.05


@dataclass(frozen=True)
class Answer:
    """What the tuner said of one data set."""

    case: str
    workers: int
    expected: tuple[int, int]
    """Fewest and most."""
    wait_without: float
    """Of the step's time, with no worker: by arithmetic."""
    wait_with: float
    most_alive: int | None = None
    """Workers that were ever seen at once, where that is noted."""

    @property
    def is_expected(self) -> bool:
        fewest, most = self.expected
        return fewest <= self.workers <= most and self.wait_with <= self.wait_without and (self.most_alive or 0) <= most


def without_workers(item_seconds: float) -> float:
    batch = BATCH * item_seconds
    return max(0.02, batch / (batch + STEP_SECONDS))


def of_items(milliseconds: int, expected: tuple[int, int]) -> Answer:
    from tests.prober.loading import Slow, fake_host

    from brim.prober.loader import tune_loader

    seconds = milliseconds / 1000
    found = tune_loader(Slow(seconds), batch_size=BATCH, step_seconds=STEP_SECONDS, host=fake_host(cores=2))
    return Answer(
        f"items of {milliseconds} ms", found.num_workers, expected, without_workers(seconds), found.wait_fraction or 0.0
    )


def with_memory_for_one() -> Answer:
    from tests.prober.loading import tune_noted

    from brim.machine.budget import run
    from brim.sizes import GIB, MIB

    held = 256 * MIB
    with tempfile.TemporaryDirectory(prefix="loader-") as scratch:
        found = run(tune_noted, Path(scratch), held, GIB + 2 * held, preload=("torch", "brim.prober.loader")).unwrap()
        alive = max(int(path.read_text()) for path in Path(scratch).iterdir())
    return Answer("20 ms, memory for one", found.num_workers, (1, 1), without_workers(0.02), found.wait_fraction or 0.0, alive)


CASES: tuple[Callable[[], Answer], ...] = (
    lambda: of_items(0, (0, 1)),
    lambda: of_items(5, (1, 3)),
    lambda: of_items(40, (4, 4)),
    with_memory_for_one,
)


def line(answers: Sequence[Answer]) -> str:
    first = answers[0]
    fewest, most = first.expected
    workers = ", ".join(str(answer.workers) for answer in answers)
    waits = ", ".join(f"{100 * answer.wait_with:.1f}" for answer in answers)
    expected = f"{fewest}-{most}" if fewest < most else str(fewest)
    return f"{first.case:24}{expected:>10}{workers:>12}{100 * first.wait_without:>14.0f} %{waits:>20} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    rounds = [[case() for case in CASES] for _round in range(options.rounds)]
    columns = list(zip(*rounds, strict=True))
    if options.json:
        told = [[asdict(answer) | {"is_expected": answer.is_expected} for answer in each] for each in rounds]
        print(json.dumps(told, indent=2))
    else:
        print(f"{'':24}{'expected':>10}{'workers':>12}{'wait without':>16}{'wait with':>22}")
        for answers in columns:
            print(line(answers))
    alone = all((answer.most_alive or 0) <= 1 for each in rounds for answer in each)
    if not alone:
        print("A second worker lived where memory allows one.", file=sys.stderr)
    return 0 if alone and all(2 * sum(answer.is_expected for answer in answers) > len(rounds) for answers in columns) else 1


if __name__ == "__main__":
    sys.exit(main())
