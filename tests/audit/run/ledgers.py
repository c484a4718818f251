"""Ledgers of runs that never were: a healthy one, and the same with one thing changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from brim.audit.run.examine import RunReport, examine_run
from brim.records import BudgetLimit, LedgerEntry, LedgerHeader, Pulse, Slice
from brim.step.ledger import LedgerWriter

BATCH, STEPS = 8, 120
GIB = 1 << 30
HEADER = LedgerHeader(
    started_at="2026-11-20T09:30:00+00:00", seed=0, effective_batch=BATCH, sequences_in_data=BATCH * STEPS, steps_per_epoch=STEPS,
    budget=BudgetLimit(unit="tokens", limit=1024.0), device="cuda:0", memory_limit_bytes=16 * GIB,
)  # fmt: skip
Change = Callable[[int], dict[str, Any]]


def step_of(number: int, **changes: Any) -> LedgerEntry:
    """A step of a run that learns, computes nearly all the time and fills its card."""
    random = np.random.default_rng(number)
    wobble = float(random.normal())
    items = [int(each) for each in random.integers(200, 400, 2)]
    ids = tuple(range((number - 1) * BATCH, number * BATCH))
    entry = LedgerEntry(
        step=number, epoch=round(number / STEPS, 6), promised_sequences=BATCH, sequence_ids=ids, sequences=BATCH, tokens=900,
        padded_tokens=1024, supervised_tokens=sum(items), slices=tuple(Slice(rank=0, sequences=4, length=128, items=each) for each in items),
        peak_allocated_bytes=13 * GIB, peak_reserved_bytes=14 * GIB, compute_seconds=1.0 + 0.03 * wobble, wait_seconds=0.01,
        loss=1.1 + 1.4 * math.exp(-number / 25) + 0.03 * wobble, grad_norm=1.0 + 0.1 * abs(wobble), learning_rate=2e-4,
        pulse=Pulse(seconds=1.1, device_utilisation=0.95, workers=4, worker_cpu=0.3, main_cpu=0.5, read_bytes=0, blocked_seconds=0.0,
                    retries=0, swapped_bytes=0),
    )  # fmt: skip
    return dataclasses.replace(entry, **changes)


def write(path: Path, entries: list[LedgerEntry], header: LedgerHeader = HEADER) -> Path:
    """A ledger with one header and a summary."""
    with LedgerWriter(path, header) as writer:
        for entry in entries:
            writer.write(entry)
    return path


def examined(folder: Path, change: Change = lambda _step: {}, *, steps: int = STEPS, **header: Any) -> RunReport:
    """What the doctor says of the healthy run, changed step by step."""
    entries = [step_of(number, **change(number)) for number in range(1, steps + 1)]
    return examine_run(write(folder / "ledger.jsonl", entries, dataclasses.replace(HEADER, **header)), "ledger.jsonl")


def observed(folder: Path, change: Change = lambda _step: {}, *, steps: int = STEPS, **header: Any) -> RunReport:
    """The same of a script that was only watched."""
    plain = {"observed": True, "sequences_in_data": None, "steps_per_epoch": None, "budget": None}
    return examined(folder, lambda step: {"sequence_ids": (), **change(step)}, steps=steps, **{**plain, **header})


def rules(report: RunReport) -> list[str]:
    """The names of what was found."""
    return [found.rule for found in report.found]


def pulse(**fields: Any) -> Pulse:
    """What the machine did in a second and a half."""
    return Pulse(seconds=1.5, **fields)
