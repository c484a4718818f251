"""What planning costs: the start of a run of one and of ten million sequences at a late step, single steps, and a whole epoch.

    python benchmarks/slicing_cost.py

Effective batch 256, 8 ranks, one core; lengths are lognormal with a mean of about 360 tokens, 2,048 at most. An epoch gives all ranks'
micro-batches of every step, under a budget of padded tokens, and under one of bytes whose attention is quadratic. Each row runs in a fresh
process, bound to one core. Exit 1 if a bar is missed: an epoch of one million in 3 s, of ten million in 30 s; start at any step in 2 s;
24 bytes a sequence, which is how far the process's peak rises from before the lengths are loaded to the end, so the caller's own lengths
(4 bytes) are in it. Then single steps of ranks that differ (memory and speed as 1 : 2 : 4), of ranks that are cut together, and of both:
the CPU time of one, 10 ms at most for 256 sequences on 8 ranks; and how long the first rank works while the last one does, or all ranks
on average while rounds last. Bars of seconds are about CPU time, which a busy machine disturbs least. Linux only: it reads /proc.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brim.step.batch import BatchPlan
from brim.step.budget import Budget, ShapeCost

Lengths = npt.NDArray[np.int32]

EFFECTIVE_BATCH = 256
RANKS = 8
SIZES = (1_000_000, 10_000_000)
BUDGETS = {
    "tokens": Budget.tokens(16_384),
    # About a 1B model on a card with 24 GB, math attention: bytes and seconds both grow with the square of the length.
    "bytes": Budget(
        ShapeCost(fixed=1e9, per_token=2e6, per_squared_length=200.0),
        24e9,
        ShapeCost(fixed=0.01, per_token=1 / 6000, per_squared_length=1e-8),
    ),
}
BARS = {
    ("start", 1_000_000): 2.0,
    ("start", 10_000_000): 2.0,
    ("epoch", 1_000_000): 3.0,
    ("epoch", 10_000_000): 30.0,
}
BAR_BYTES = 24.0
STEPS_TIMED = 200
STEPS_SHARED = 20
BAR_SHARED_SECONDS = 0.010
FACTORS = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Row:
    what: str
    sequences: int
    wall_seconds: float
    cpu_seconds: float
    bytes_a_sequence: float
    note: str

    @property
    def bar_seconds(self) -> float | None:
        return BARS.get((self.what.split(",")[0], self.sequences))

    @property
    def is_kept(self) -> bool:
        is_fast = self.bar_seconds is None or self.cpu_seconds <= self.bar_seconds
        return is_fast and self.bytes_a_sequence <= BAR_BYTES

    def line(self) -> str:
        bars = f"{BAR_BYTES:g} bytes" if self.bar_seconds is None else f"{self.bar_seconds:g} s, {BAR_BYTES:g} bytes"
        return (
            f"{self.what:<18} {self.sequences:>11,} {self.wall_seconds:8.2f} {self.cpu_seconds:8.2f} {self.bytes_a_sequence:9.1f}"
            f"  bar {bars}: {'kept' if self.is_kept else 'MISSED'}; {self.note}"
        )


def draw_lengths(n: int) -> Lengths:
    return np.clip(np.random.default_rng(0).lognormal(5.55, 0.85, n), 8, 2048).astype(np.int32)


def peak_bytes() -> int:
    """The most memory that this process has had in RAM."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def planned(lengths: Lengths) -> BatchPlan:
    return BatchPlan(lengths, effective_batch=EFFECTIVE_BATCH, ranks=RANKS)


def start(lengths: Lengths, budget: Budget) -> str:
    """From nothing to the slices of a step late in the third epoch."""
    plan = planned(lengths)
    plan.slices(3 * plan.steps_per_epoch - 2, budget)
    return f"fingerprint {plan.fingerprint()}"


def steps(lengths: Lengths, budget: Budget) -> str:
    plan = planned(lengths)
    plan.slices(0, budget)
    began = time.process_time()
    for step in range(STEPS_TIMED):
        plan.slices(step, budget)
    return f"{(time.process_time() - began) / STEPS_TIMED * 1000:.2f} ms of CPU a step, when started"


def epoch(lengths: Lengths, budget: Budget) -> str:
    micro_batches = sum(len(rank) for slices in planned(lengths).epoch(0, budget) for rank in slices)
    return f"{len(lengths) / micro_batches:.2f} sequences a micro-batch"


WORK = {"start": start, f"{STEPS_TIMED} steps": steps, "epoch": epoch}


def child(what: str, path: str, budget: str) -> int:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    # What numpy and the code itself need once is no part of the plan.
    epoch(draw_lengths(50_000), BUDGETS[budget])
    before_bytes = peak_bytes()
    lengths = np.load(path)
    wall, cpu = time.perf_counter(), time.process_time()
    note = WORK[what](lengths, BUDGETS[budget])
    spent = time.perf_counter() - wall, time.process_time() - cpu
    row = Row(f"{what}, {budget}", len(lengths), *spent, (peak_bytes() - before_bytes) / len(lengths), note)
    print(json.dumps(asdict(row)))
    return 0


def in_child(what: str, path: Path, budget: str) -> Row:
    found = subprocess.run([sys.executable, __file__, what, str(path), budget], check=True, capture_output=True, text=True)
    row = Row(**json.loads(found.stdout))
    print(row.line(), flush=True)
    return row


def seconds_of(plan: BatchPlan, budget: Budget, ids: npt.NDArray[np.int64]) -> float:
    return float(budget.seconds(len(ids), int(plan.lengths_of(ids).max()))) if len(ids) else 0.0


def shared_step(size: int, ranks: int, budget: Budget, *, is_unequal: bool, together: bool) -> tuple[float, float]:
    """CPU seconds of one step; of the time of the rank that is done last, or of all rounds, the part in which the others work too."""
    factors = [FACTORS[rank % len(FACTORS)] if is_unequal else 1.0 for rank in range(ranks)]
    budgets = [budget.with_limit(budget.limit * factor / max(FACTORS)).at_speed(factor) for factor in factors]
    plan = BatchPlan(draw_lengths(STEPS_SHARED * size), effective_batch=size, ranks=ranks, together=together)
    plan.slices(0, budgets)
    began = time.process_time()
    steps = [plan.slices(step, budgets) for step in range(STEPS_SHARED)]
    spent = (time.process_time() - began) / STEPS_SHARED
    worked = []
    for slices in steps:
        seconds = [[seconds_of(plan, own, ids) for ids in rank] for own, rank in zip(budgets, slices, strict=True)]
        if together:
            worked.append(sum(map(sum, seconds)) / ranks / sum(map(max, zip(*seconds, strict=True))))
        else:
            worked.append(min(map(sum, seconds)) / max(map(sum, seconds)))
    return spent, float(np.mean(worked))


def shared() -> list[dict[str, object]]:
    print(f"\n{'one step':<28} {'sequences':>9} {'ranks':>5} {'CPU ms':>7} {'at work':>8}")
    rows: list[dict[str, object]] = []
    for name, budget in BUDGETS.items():
        for how, is_unequal, together in (("unequal", True, False), ("together", False, True), ("unequal, together", True, True)):
            for size, ranks in ((64, 2), (64, 8), (256, 8), (1024, 8)):
                spent, worked = shared_step(size, ranks, budget, is_unequal=is_unequal, together=together)
                kept = (size, ranks) != (256, RANKS) or spent <= BAR_SHARED_SECONDS
                told = "" if kept else f"  MISSED: {BAR_SHARED_SECONDS * 1000:g} ms"
                print(f"{how + ', ' + name:<28} {size:>9} {ranks:>5} {spent * 1000:7.2f} {worked:8.1%}{told}", flush=True)
                of = {"what": how, "budget": name, "sequences": size, "ranks": ranks}
                rows.append({**of, "cpu_seconds": spent, "at_work": worked, "kept": kept})
    return rows


def main() -> int:
    print(f"{'what':<18} {'sequences':>11} {'wall s':>8} {'CPU s':>8} {'B / seq.':>9}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in SIZES:
            path = Path(folder) / f"{n}.npy"
            np.save(path, draw_lengths(n))
            rows += [in_child(what, path, budget) for what in WORK for budget in BUDGETS]
    steps_shared = shared()
    passed = all(row.is_kept for row in rows) and all(row["kept"] for row in steps_shared)
    print(f"the bars are {'kept' if passed else 'MISSED'}")
    print(json.dumps({"passed": passed, "rows": [asdict(row) for row in rows], "shared": steps_shared}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(child(*sys.argv[1:]) if len(sys.argv) > 1 else main())
