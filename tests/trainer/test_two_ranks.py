"""Two real processes with unequal numbers of micro-batches take the steps of one, and never wait without an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import torchrun
from tests.trainer import ddp_program as program
from tests.trainer.small import ids_of, lines, near

SCENARIOS = ("plain", "supervised", "failing")
Both = dict[str, list[Any]]


def on_two_ranks(folder: Path) -> Both:
    """What the two ranks found, by scenario. All in one pair of processes: imports are most of the time."""
    torchrun.on_two_ranks(program.__name__, str(folder), *SCENARIOS, seconds=600)
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
        for name in SCENARIOS
    }


@pytest.mark.timeout(900)
@pytest.mark.long
def test_two_ranks_take_the_steps_of_one_and_neither_waits_for_the_other_without_end(tmp_path: Path) -> None:
    both = on_two_ranks(tmp_path)
    check_trainer(both["plain"], tmp_path / "plain", tmp_path / "alone")
    check_metrics(both["supervised"], tmp_path / "supervised", tmp_path / "alone-too")
    check_failure(both["failing"])


def counts(folder: Path) -> list[tuple[int, int]]:
    """Micro-batches of each rank in each step."""
    ranks = [[part["rank"] for part in line["slices"]] for line in lines(folder)]
    return [(found.count(0), found.count(1)) for found in ranks]


def check_trainer(both: list[Any], folder: Path, alone: Path) -> None:
    assert (4, 3) in counts(folder)
    wanted = program.plain(alone)
    for found in both:
        assert len(found["loss"]) == 6
        for name in ("loss", "grad_norm", "weights", "tokens"):
            assert found[name] == near(wanted[name])
    assert both[0]["eval_loss"] == both[1]["eval_loss"]
    assert ids_of(folder) == ids_of(alone)


def check_metrics(both: list[Any], folder: Path, alone: Path) -> None:
    """TRL's, which it would gather in every micro-batch."""
    assert (4, 3) in counts(folder)
    wanted = program.supervised(alone)
    for found in both:
        for name, values in wanted.items():
            assert len(values) == 4
            assert found[name] == near(values, 2e-5)


def check_failure(both: list[Any]) -> None:
    """One rank could not read its data; the other was told."""
    assert {answer["kind"] for answer in both} == {"ValueError", "RunError"}
    assert all("cannot be read" in answer["message"] for answer in both)
    assert [answer["steps"] for answer in both] == [1, 1]
