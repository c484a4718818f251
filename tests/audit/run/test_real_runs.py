"""The doctor reads what brim itself wrote: a run that is well, and one whose data comes too slowly."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.audit.run.examine import RunReport, examine_run
from brim.machine import pulse
from brim.step import book
from brim.step.budget import Budget
from brim.step.loop import Steps
from tests.step import toys
from tests.step.faults import sequences, swiftly, tiny

STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    with swiftly():
        yield


class Slow(Sequence[Any]):
    """Each sequence takes its time, without any work."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: Any) -> Any:
        time.sleep(0.02)
        return self.data[place]


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, data: Any) -> RunReport:
    """A run of 30 steps of 4 sequences, in micro-batches of 2 at most."""
    monkeypatch.setattr(book, "PULSE_SECONDS", 0.0)
    # What others do with the disk is counted for the whole machine, and is not for this test to judge.
    monkeypatch.setattr(pulse, "_stalled_seconds", lambda: 0.0)
    monkeypatch.setattr(pulse, "_disk_waits_are_counted", lambda: False)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = Steps(
        data, model, optimizer, effective_batch=4, budget=Budget.sequences(2), collate=toys.collate, counting="next-token",
        lengths=[len(one["input_ids"]) for one in sequences(4 * STEPS)], ledger=folder, noise_scale=True,
    )  # fmt: skip
    for step in loop:
        step.run()
    return examine_run(folder, "ledger.jsonl")


def test_a_run_that_is_well_keeps_its_promise_and_tells_its_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = trained(tmp_path, monkeypatch, sequences(4 * STEPS))
    assert report.steps == STEPS
    # How fast this machine was is not for this test to judge.
    assert {found.rule for found in report.found} <= {"run-slowing", "run-data-bound"}
    assert report.tokens_per_second is not None
    assert report.limit_bytes is not None
    assert report.noise is not None
    assert report.noise.noise > 0
    assert "noise scale" in report.notes[-1]


def test_a_run_whose_data_comes_slowly_without_workers_is_told_to_use_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = trained(tmp_path, monkeypatch, Slow(sequences(4 * STEPS)))
    [found] = [found for found in report.found if found.rule == "run-data-bound"]
    assert "The training process loads by itself, between steps: give the loader num_workers=" in found.message
