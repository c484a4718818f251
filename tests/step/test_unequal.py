"""Three real processes with memory and speed as 1 : 2 : 4: they agree on who does how much, and take the steps of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from brim.step.budget import Budget
from tests import torchrun
from tests.conftest import once
from tests.step import unequal_program as program
from tests.step.unequal_program import EFFECTIVE_BATCH, RANKS, SEQUENCES

Found = dict[str, list[Any]]
"""What the ranks found, by scenario."""

SCENARIOS = ("own_budgets", "memory_only", "agreed", "refused", "rounds")
TOLERANCE = 1e-6
"""Relative to the largest number, in float64."""


@pytest.fixture(scope="module")
def ranks(shared: Path) -> Found:
    """All in one launch: imports are most of the time."""
    return launched(shared / "unequal", *SCENARIOS)


def launched(folder: Path, *scenarios: str) -> Found:
    once(folder, lambda: torchrun.on_ranks(RANKS, program.__name__, str(folder), *scenarios, seconds=240))
    return {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(RANKS)] for name in scenarios}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, one sequence at a time."""
    return program.trained(program.Decoder(), Budget.sequences(1))


def farthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    assert ours.keys() == theirs.keys()
    largest = max(float(each.abs().max()) for each in theirs.values())
    return max(float((ours[name] - each).abs().max()) for name, each in theirs.items()) / largest


@pytest.mark.parametrize("scenario", ["own_budgets", "memory_only"])
@pytest.mark.long
def test_three_unequal_ranks_have_the_gradients_and_the_weights_of_one_process(
    ranks: Found, alone: dict[str, Any], scenario: str
) -> None:
    for found in ranks[scenario]:
        assert [sorted(ids) for ids in found["ids"]] == alone["ids"]
        assert found["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
        assert len(found["gradients"]) == -(-SEQUENCES // EFFECTIVE_BATCH)
        for ours, theirs in zip(found["gradients"], alone["gradients"], strict=True):
            assert farthest(ours, theirs) <= TOLERANCE
        assert farthest(found["weights"], alone["weights"]) <= TOLERANCE
        assert farthest(found["weights"], ranks[scenario][0]["weights"]) == 0


def test_faster_ranks_with_more_memory_take_more_and_all_finish_together(ranks: Found) -> None:
    budgets = [program.own_budget(rank) for rank in range(RANKS)]
    for slices in ranks["own_budgets"][0]["slices"][:2]:
        shares = [sum(count for rank, count, _length in slices if rank == each) for each in range(RANKS)]
        assert shares[0] < shares[1] < shares[2]
        assert sum(shares) == EFFECTIVE_BATCH
        seconds = [0.0] * RANKS
        for rank, count, length in slices:
            assert count == 1 or budgets[rank].cost_of(count, length) <= budgets[rank].limit
            seconds[rank] += float(budgets[rank].seconds(count, length))
        assert min(seconds) > 0.85 * max(seconds)


@pytest.mark.slow
def test_a_trainer_that_brim_is_attached_to_needs_only_its_own_budget(shared: Path, alone: dict[str, Any]) -> None:
    for weights in launched(shared / "unequal-trainer", "trainer")["trainer"]:
        assert farthest(weights, alone["weights"]) <= TOLERANCE


def test_ranks_hear_each_other_s_limits_and_speeds(ranks: Found) -> None:
    heard = ranks["agreed"]
    assert heard[0] == heard[1] == heard[2]
    found = heard[0]
    assert found["alike"] is None
    assert found["limits"] == [(100, 164.0), (101, 164.0), (102, 164.0)]
    assert found["speeds"] == [(100, 164.0), (100, 328.0), (100, 164.0)]
    assert found["gpus"][0] == found["gpus"][2] == (100, 164.0)
    assert found["gpus"][1] == (100, pytest.approx(164.0 * 65 / 312, rel=0.01)), "peaks of the catalogue, at half precision"
    assert found["one gpu is unknown"] is None
    assert found["seconds that know the gpu"] == [(100, 164.0), (100, 228.0), (100, 292.0)]
    assert found["list"] == [(100, 164.0), (100, 164.0), (7, 164.0)]


def test_ranks_that_cannot_agree_all_hear_why_and_none_waits(ranks: Found) -> None:
    for found in ranks["refused"]:
        assert found == [
            "The ranks were given different lists of budgets or speeds.",
            "The ranks were given different lists of budgets or speeds.",
            "budgets: there are 2 for 3 ranks.",
            "speeds: there are 1 for 3 ranks.",
            "The budgets of the ranks differ, and that of rank 0 cannot be sent to the others.",
        ]


def test_for_collective_engines_all_ranks_load_equally_many_rounds_whatever_one_has_learned(ranks: Found) -> None:
    for step, of_step in enumerate(zip(*ranks["rounds"], strict=True)):
        assert len({len(rounds) for rounds in of_step}) == 1
        ids = [place for rounds in of_step for places, _is_filler in rounds for place in places]
        assert sorted(ids) == ranks["own_budgets"][0]["ids"][step]
        assert all(bool(places) != is_filler for rounds in of_step for places, is_filler in rounds)
