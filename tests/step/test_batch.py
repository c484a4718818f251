"""The plan of a run's steps: every sequence once an epoch, exact counts, slices within the budget, the same on every rank and after a resume."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import UsageError
from brim.step.batch import BatchPlan, Slices
from brim.step.budget import Budget, ShapeCost
from brim.step.slicing import IntArray, even_shares, order_of

BUDGETS = st.one_of(
    st.integers(1, 4000).map(Budget.tokens),
    st.integers(1, 64).map(Budget.sequences),
    st.builds(
        lambda limit, square: Budget(
            ShapeCost(fixed=1e6, per_token=1e5, per_squared_length=square, per_target=2e5, per_token_and_target=50.0),
            limit,
            ShapeCost(fixed=0.01, per_token=1e-4, per_squared_length=1e-7, per_target=1e-4),
        ),
        st.floats(1e3, 1e9),
        st.floats(0, 1e3),
    ),
)
WORLDS = st.integers(1, 16)
TARGETS = st.one_of(st.integers(1, 24), st.integers(1, 512))


@st.composite
def lengths_of_data(draw: st.DrawFn) -> IntArray:
    """Ragged lengths of up to 700 sequences, half of the time with targets beside them."""
    n = draw(st.integers(1, 700))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (n, 2) if draw(st.booleans()) else (n,)
    longest = draw(st.sampled_from([1, 8, 300, 2048]))
    return np.clip(random.lognormal(4, 1, shape), 0, longest).astype(np.int64)


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """What a plan is made of."""
    lengths = draw(lengths_of_data())
    effective_batch = draw(TARGETS)
    drop_last = draw(st.booleans()) and effective_batch <= len(lengths)
    seed = draw(st.integers(0, 2**40))
    return {"lengths": lengths, "effective_batch": effective_batch, "seed": seed, "drop_last": drop_last, "ranks": draw(WORLDS)}


def plain(slices: Slices) -> list[list[list[int]]]:
    return [[one.tolist() for one in rank] for rank in slices]


def ids_of(slices: Slices) -> list[int]:
    return [index for rank in slices for one in rank for index in one.tolist()]


def cost_of(plan: BatchPlan, budget: Budget, ids: IntArray) -> float:
    longest = plan.lengths_of(ids).reshape(len(ids), -1).max(axis=0)
    return budget.cost_of(len(ids), *longest.tolist())


@settings(deadline=None)
@given(plans(), BUDGETS)
def test_an_epoch_takes_every_sequence_once_in_batches_of_exactly_the_promised_size(of: dict[str, Any], budget: Budget) -> None:
    plan = BatchPlan(**of)
    n, size = len(of["lengths"]), of["effective_batch"]
    sizes = [size] * (n // size) + ([n % size] if n % size and not of["drop_last"] else [])
    steps = [ids_of(slices) for slices in plan.epoch(0, budget)]
    assert [len(ids) for ids in steps] == sizes
    assert len(steps) == plan.steps_per_epoch
    seen = [index for ids in steps for index in ids]
    assert len(set(seen)) == len(seen)
    assert set(seen) == set(order_of(n, of["seed"], 0)[: sum(sizes)].tolist())


@settings(deadline=None)
@given(plans(), BUDGETS)
def test_every_slice_is_within_the_budget_or_of_size_one_and_shares_are_even(of: dict[str, Any], budget: Budget) -> None:
    plan = BatchPlan(**of)
    for slices in plan.epoch(0, budget):
        shares = [sum(len(one) for one in rank) for rank in slices]
        assert shares == even_shares(sum(shares), of["ranks"])
        for rank in slices:
            costs = [cost_of(plan, budget, one) for one in rank]
            assert all(len(one) == 1 or cost <= budget.limit for one, cost in zip(rank, costs, strict=True))
            assert all(earlier >= later for earlier, later in pairwise(costs))


@settings(deadline=None)
@given(plans(), BUDGETS, st.integers(0, 10**6))
def test_every_rank_finds_the_same_plan_by_itself_at_any_step(of: dict[str, Any], budget: Budget, step: int) -> None:
    here, there = BatchPlan(**of), BatchPlan(**{**of, "lengths": of["lengths"].tolist()})
    assert here.fingerprint() == there.fingerprint()
    here.slices(step + 1, budget)
    assert plain(here.slices(step, budget)) == plain(there.slices(step, budget))


@settings(deadline=None)
@given(plans(), WORLDS, BUDGETS, BUDGETS, st.integers(0, 2000))
def test_ranks_and_budget_divide_a_global_batch_and_never_change_it(
    of: dict[str, Any], ranks: int, budget: Budget, other_budget: Budget, step: int
) -> None:
    plan, other = BatchPlan(**of), BatchPlan(**{**of, "ranks": ranks})
    assert plan.fingerprint() == other.fingerprint()
    promised = plan.global_batch(step).tolist()
    assert other.global_batch(step).tolist() == promised
    assert sorted(ids_of(plan.slices(step, budget))) == sorted(ids_of(other.slices(step, other_budget))) == sorted(promised)


@settings(deadline=None)
@given(plans(), BUDGETS, st.integers(0, 3))
def test_an_epoch_sliced_at_once_is_its_steps_one_by_one(of: dict[str, Any], budget: Budget, epoch: int) -> None:
    plan = BatchPlan(**of)
    first = epoch * plan.steps_per_epoch
    one_by_one = [plain(plan.slices(first + step, budget)) for step in range(plan.steps_per_epoch)]
    assert [plain(slices) for slices in plan.epoch(epoch, budget)] == one_by_one


@settings(deadline=None)
@given(plans(), WORLDS, st.floats(0, 1), st.integers(1, 3))
def test_a_run_that_is_resumed_at_any_step_takes_exactly_the_rest(
    of: dict[str, Any], ranks: int, share: float, epochs: int
) -> None:
    plan = BatchPlan(**of)
    steps = epochs * plan.steps_per_epoch
    continued = [plan.global_batch(step).tolist() for step in range(steps)]
    stopped = int(share * steps)
    resumed = BatchPlan(**{**of, "ranks": ranks})
    assert [resumed.global_batch(step).tolist() for step in range(stopped, steps)] == continued[stopped:]
    assert [plan.epoch_of(step) for step in range(steps)] == [
        (epoch, index) for epoch in range(epochs) for index in range(plan.steps_per_epoch)
    ]


def test_an_epoch_of_many_blocks_is_whole() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 50_001), 8, 2048).astype(np.int32)
    plan = BatchPlan(lengths, effective_batch=250, ranks=8)
    steps = list(plan.epoch(1, Budget.tokens(8192)))
    assert len(steps) == plan.steps_per_epoch == 201
    assert sorted(index for slices in steps for index in ids_of(slices)) == list(range(50_001))
    assert plain(steps[77]) == plain(plan.slices(201 + 77, Budget.tokens(8192)))
    assert [len(rank) for rank in steps[-1]] == [1, 0, 0, 0, 0, 0, 0, 0]


def test_an_epoch_that_is_under_way_is_not_disturbed_by_another() -> None:
    plan = BatchPlan(range(1, 101), effective_batch=10)
    budget = Budget.sequences(4)
    under_way = plan.epoch(0, budget)
    first = next(under_way)
    plan.global_batch(5 * plan.steps_per_epoch)
    assert sorted(ids_of(first) + [index for slices in under_way for index in ids_of(slices)]) == list(range(100))


def test_the_plan_is_the_same_everywhere_and_for_ever() -> None:
    # Written down once: if these change, runs cannot be resumed.
    plan = BatchPlan([5, 9, 2, 7, 7, 1, 3, 8, 4, 6], effective_batch=4, seed=42, ranks=2)
    assert [plan.global_batch(step).tolist() for step in range(4)] == [[4, 8, 1, 9], [3, 6, 0, 7], [2, 5], [1, 2, 8, 5]]
    assert plain(plan.slices(0, Budget.tokens(18))) == [[[1, 8]], [[4, 9]]]
    assert plan.fingerprint() == "b324b8b498171d93"


def test_a_plan_keeps_its_own_lengths() -> None:
    lengths = np.array([5, 9, 2], np.int32)
    plan = BatchPlan(lengths, effective_batch=2)
    before = plan.fingerprint()
    lengths[:] = 1
    assert plan.fingerprint() == before
    assert plan.lengths_of([1, 2]).tolist() == [9, 2]
    assert BatchPlan([[5, 1], [9, 2]], effective_batch=2).lengths_of([1]).tolist() == [[9, 2]]


CHANGES: tuple[dict[str, Any], ...] = (
    {"lengths": [5, 9, 2, 8]},
    {"lengths": [5, 9, 2, 7, 1]},
    {"lengths": [[5, 9], [2, 7]]},
    {"effective_batch": 3},
    {"seed": 1},
    {"drop_last": True},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_fingerprint_tells_whatever_would_change_a_global_batch(change: dict[str, Any]) -> None:
    of: dict[str, Any] = {"lengths": [5, 9, 2, 7], "effective_batch": 2}
    assert BatchPlan(**{**of, **change}).fingerprint() != BatchPlan(**of).fingerprint()


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"lengths": []}, "no sequences"),
    ({"lengths": np.zeros((0, 2), np.int64)}, "no sequences"),
    ({"lengths": [3, -1]}, "cannot have -1 tokens"),
    ({"lengths": [3, 2**31]}, "cannot have 2147483648 tokens"),
    ({"lengths": [3.5]}, "whole numbers"),
    ({"lengths": [[1, 2, 3]]}, "shape \\[1, 3\\]"),
    ({"lengths": 7}, "whole numbers"),
    ({"effective_batch": 0}, "effective_batch must be at least 1"),
    ({"ranks": 0}, "ranks must be at least 1"),
    ({"seed": -1}, "seed must be at least 0, and is -1"),
    ({"seed": 1.5}, "seed is 1.5, and must be a whole number"),
    ({"effective_batch": 16.0}, "effective_batch is 16.0, and must be a whole number"),
    ({"effective_batch": "64"}, "effective_batch is '64', and must be a whole number"),
    ({"effective_batch": True}, "effective_batch is True, and must be a whole number"),
    ({"ranks": 2.0}, "ranks is 2.0, and must be a whole number"),
    ({"effective_batch": 8, "drop_last": True}, "drop_last leaves nothing"),
)


@pytest.mark.parametrize(("change", "told"), WRONG, ids=[told for _change, told in WRONG])
def test_what_cannot_be_planned_is_said(change: dict[str, Any], told: str) -> None:
    of: dict[str, Any] = {"lengths": [5, 9, 2, 7], "effective_batch": 2}
    with pytest.raises(UsageError, match=told):
        BatchPlan(**{**of, **change})
