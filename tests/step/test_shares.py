"""Ranks that differ in memory or speed: each gets as much as it can do in the time of the others, and the global batch stays what it is."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.step.batch import BatchPlan, Slices
from brim.step.budget import Budget, ShapeCost
from brim.step.slicing import IntArray
from tests.conftest import SHARED
from tests.step.test_batch import BUDGETS, cost_of, ids_of, lengths_of_data, plain
from tests.step.test_rounds import seconds_of, worlds

FACTORS = (1.0, 2.0, 4.0)


def seconds_of_shares(plan: BatchPlan, budgets: Sequence[Budget], slices: Slices) -> list[float]:
    return [sum(seconds_of(plan, budget, ids) for ids in rank) for budget, rank in zip(budgets, slices, strict=True)]


@settings(deadline=None, max_examples=40)
@given(worlds(together=False), st.integers(0, 2000))
def test_every_sequence_runs_once_within_its_rank_s_limit_unless_it_fits_no_rank(
    world: tuple[BatchPlan, list[Budget]], step: int
) -> None:
    plan, budgets = world
    slices = plan.slices(step, budgets)
    assert sorted(ids_of(slices)) == sorted(plan.global_batch(step).tolist())
    for budget, rank in zip(budgets, slices, strict=True):
        costs = [cost_of(plan, budget, ids) for ids in rank]
        assert costs == sorted(costs, reverse=True)
        for ids, cost in zip(rank, costs, strict=True):
            if cost > budget.limit:
                assert len(ids) == 1
                assert all(budget is budgets[0] for budget in budgets) or all(
                    cost_of(plan, other, ids) > other.limit for other in budgets
                )


@settings(deadline=None, max_examples=40)
@given(
    lengths_of_data(),
    st.integers(1, 300),
    st.lists(st.tuples(st.sampled_from(FACTORS), st.sampled_from([0.3, 1.0, 2.0])), min_size=2, max_size=6),
    BUDGETS,
)
def test_nobody_is_idle_longer_than_one_micro_batch(
    lengths: IntArray, effective_batch: int, ranks: list[tuple[float, float]], budget: Budget
) -> None:
    longest = lengths.reshape(len(lengths), -1).max(axis=0).tolist()
    room = max(budget.limit, budget.cost_of(1, *longest))  # each sequence fits everywhere
    budgets = [budget.with_limit(room * memory).at_speed(speed) for memory, speed in ranks]
    plan = BatchPlan(lengths, effective_batch=effective_batch, ranks=len(ranks))
    slices = plan.slices(0, budgets)
    shares = seconds_of_shares(plan, budgets, slices)
    last = shares.index(max(shares))
    for budget, seconds in zip(budgets, shares, strict=True):
        # One of those that the last rank runs, as long as it takes there or here.
        one = max(seconds_of(plan, each, ids) for each in (budgets[last], budget) for ids in slices[last])
        assert shares[last] - seconds <= one * (1 + 1e-9)


@settings(deadline=None, max_examples=15)
@given(worlds(together=False), st.integers(0, 3))
def test_every_rank_finds_the_same_shares_by_itself_and_an_epoch_is_its_steps(
    world: tuple[BatchPlan, list[Budget]], epoch: int
) -> None:
    plan, budgets = world
    first = epoch * plan.steps_per_epoch
    steps = range(first, first + min(3, plan.steps_per_epoch))
    whole = plan.epoch(epoch, budgets)
    assert [plain(next(whole)) for _step in steps] == [plain(plan.slices(step, list(budgets))) for step in steps]


@settings(deadline=None, max_examples=40)
@given(worlds(together=False), st.integers(0, 2000), st.floats(0.1, 1))
def test_a_rank_that_has_learned_a_lower_limit_cuts_its_own_share_finer(
    world: tuple[BatchPlan, list[Budget]], step: int, left: float
) -> None:
    plan, budgets = world
    for budget, rank in zip(budgets, plan.slices(step, budgets), strict=True):
        if rank:
            ids = np.concatenate(rank)
            finer = plan.cut(ids, budget.with_limit(left * budget.limit))
            assert sorted(np.concatenate(finer).tolist()) == sorted(ids.tolist())
            assert all(len(one) == 1 or cost_of(plan, budget, one) <= left * budget.limit for one in finer)
            if len(plan.longest) == 1:  # with targets, equal lengths are cut in the order in which they come
                again = sum(seconds_of(plan, budget, one) for one in plan.cut(ids, budget))
                assert again == pytest.approx(sum(seconds_of(plan, budget, one) for one in rank))


def test_ranks_with_one_budget_get_what_they_always_got() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 500), 8, 2048).astype(np.int64)
    plan = BatchPlan(lengths, effective_batch=61, ranks=3)
    one = Budget.tokens(4096)
    assert [plain(each) for each in plan.epoch(0, one)] == [plain(each) for each in plan.epoch(0, [Budget.tokens(4096)] * 3)]
    assert plain(plan.slices(2, one)) == plain(plan.slices(2, [one, Budget.tokens(4096), one.at_speed(1.0)]))


KINDS = {
    "tokens": Budget.tokens(2048),
    "bytes": Budget(
        ShapeCost(fixed=1e9, per_token=2e6, per_squared_length=200.0),
        6e9,
        ShapeCost(fixed=0.01, per_token=1 / 6000, per_squared_length=1e-8),
    ),
}


@pytest.fixture(scope="module")
def real_lengths() -> IntArray:
    """About four letters to a token."""
    path = SHARED / "data" / "sft" / "alpaca_en_1k.json"
    if not path.exists():
        pytest.skip(f"{path} is not here: real lengths are read from it")
    rows = json.loads(path.read_text(encoding="utf-8"))
    return np.array([1 + sum(len(row.get(name, "")) for name in ("instruction", "input", "output")) // 4 for row in rows])


@pytest.mark.parametrize("differ_in", ["memory", "speed", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_1_2_and_4_finish_real_instructions_within_15_percent_of_each_other(
    real_lengths: IntArray, kind: str, differ_in: str
) -> None:
    budgets = [
        KINDS[kind]
        .with_limit(KINDS[kind].limit * (1 if differ_in == "speed" else factor))
        .at_speed(1 if differ_in == "memory" else factor)
        for factor in FACTORS
    ]
    plan = BatchPlan(real_lengths, effective_batch=64, ranks=3, drop_last=True)
    shares = [seconds_of_shares(plan, budgets, slices) for slices in plan.epoch(0, budgets)]
    late = [1 - min(each) / max(each) for each in shares]
    assert max(late) < 0.15
    assert np.mean(late) < 0.05
    if differ_in != "memory":
        first = [sum(map(len, rank)) for rank in plan.slices(0, budgets)]
        assert first[2] > 1.5 * first[1] > 2 * first[0]
