"""A small honest run, as its ledger would hold it: what the tests of the ledger and of its checker begin from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from brim.records import BudgetLimit, Ledger, LedgerEntry, LedgerHeader, LedgerSummary, Slice
from brim.step.batch import BatchPlan
from brim.step.ledger import LedgerWriter

N, BATCH = 22, 4
LENGTHS = np.arange(1, N + 1)
PLAN = BatchPlan(LENGTHS, effective_batch=BATCH, seed=3)
HEADER = LedgerHeader(
    started_at="2026-11-20T09:30:00+00:00", seed=3, effective_batch=BATCH, sequences_in_data=N, steps_per_epoch=6,
    budget=BudgetLimit(unit="tokens", limit=64.0), device="cpu", data_fingerprint="ab12", versions={"torch": "2.13.0"},
    configuration={"learning_rate": 1e-3, "precision": "fp32", "steps": 30, "drop": False, "warmup": None},
)  # fmt: skip


def step_of(number: int, **changes: Any) -> LedgerEntry:
    """Step `number` (from 1) of the plan, as an honest run of two ranks would write it."""
    ids = tuple(PLAN.global_batch(number - 1).tolist())
    half = (len(ids) + 1) // 2
    parts = [part for part in (ids[:half], ids[half:]) if part]
    slices = tuple(
        Slice(rank=rank, sequences=len(part), length=int(LENGTHS[list(part)].max())) for rank, part in enumerate(parts)
    )
    entry = LedgerEntry(
        step=number, epoch=number / 6, promised_sequences=len(ids), sequence_ids=ids, sequences=len(ids),
        tokens=int(LENGTHS[list(ids)].sum()), padded_tokens=sum(one.sequences * (one.length or 0) for one in slices), supervised_tokens=7,
        slices=slices, compute_seconds=0.1, wait_seconds=0.01, loss=1 / number, peak_allocated_bytes=100 + number,
    )  # fmt: skip
    return dataclasses.replace(entry, **changes)


def promised(number: int) -> Any:
    return PLAN.global_batch(number - 1)


def written(path: Path, numbers: range, header: LedgerHeader = HEADER) -> Path:
    with LedgerWriter(path, header) as writer:
        for number in numbers:
            writer.write(step_of(number))
    return path


def in_memory(
    *entries: LedgerEntry, headers: tuple[LedgerHeader, ...] = (HEADER,), summary: LedgerSummary | None = None
) -> Ledger:
    return Ledger(headers, entries, summary)
