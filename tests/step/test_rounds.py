"""Slices chosen together: all ranks run equally many micro-batches, those of one round last about equally long, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import UsageError
from brim.step.batch import BatchPlan, Slices
from brim.step.budget import Budget, ShapeCost
from brim.step.rounds import cut_together
from brim.step.slicing import IntArray
from tests.step.test_batch import BUDGETS, cost_of, ids_of, plain, plans

MODEL = Budget(
    ShapeCost(fixed=1e9, per_token=2e6, per_squared_length=200.0, per_target=2e6),
    24e9,
    ShapeCost(fixed=0.01, per_token=1 / 6000, per_squared_length=1e-8, per_target=1 / 6000),
)


@st.composite
def worlds(draw: st.DrawFn, *, together: bool = True) -> tuple[BatchPlan, list[Budget]]:
    """A plan, and each rank's budget: all alike, or others in memory, speed and kind."""
    plan = BatchPlan(**draw(plans()), together=together)
    first = draw(BUDGETS)
    if draw(st.booleans()):
        return plan, [first] * plan.ranks
    factors = st.sampled_from([0.25, 0.5, 1.0, 2.0])
    budgets = [draw(st.sampled_from([first, draw(BUDGETS)])) for _rank in range(plan.ranks)]
    return plan, [each.with_limit(each.limit * draw(factors)).at_speed(draw(factors)) for each in budgets]


def seconds_of(plan: BatchPlan, budget: Budget, ids: IntArray) -> float:
    return cost_of(plan, Budget(budget.seconds, 1.0, budget.seconds), ids) if len(ids) else 0.0


def seconds_of_rounds(plan: BatchPlan, budgets: Sequence[Budget], slices: Slices) -> list[float]:
    """How long each round lasts: until its slowest rank is done."""
    most = max(map(len, slices))
    padded = [[*rank, *[np.zeros(0, np.int64)] * (most - len(rank))] for rank in slices]
    return [max(map(seconds_of, [plan] * plan.ranks, budgets, one)) for one in zip(*padded, strict=True)]


@settings(deadline=None, max_examples=40)
@given(worlds(), st.integers(0, 2000))
def test_every_sequence_runs_once_and_all_ranks_run_equally_many_rounds_the_costliest_first(
    world: tuple[BatchPlan, list[Budget]], step: int
) -> None:
    plan, budgets = world
    slices = plan.slices(step, budgets)
    assert sorted(ids_of(slices)) == sorted(plan.global_batch(step).tolist())
    if plan.ranks > 1:
        assert len({len(rank) for rank in slices}) == 1
        lasting = seconds_of_rounds(plan, budgets, slices)
        assert lasting == sorted(lasting, reverse=True)
        for rank in slices:
            assert all(len(earlier) or not len(later) for earlier, later in pairwise(rank)), "empty ones come last"


@settings(deadline=None, max_examples=40)
@given(worlds(), st.integers(0, 2000))
def test_no_micro_batch_is_over_its_own_rank_s_limit_unless_a_sequence_fits_no_rank(
    world: tuple[BatchPlan, list[Budget]], step: int
) -> None:
    plan, budgets = world
    for budget, rank in zip(budgets, plan.slices(step, budgets), strict=True):
        for ids in rank:
            if len(ids) and cost_of(plan, budget, ids) > budget.limit:
                assert len(ids) == 1
                assert all(cost_of(plan, other, ids) > other.limit for other in budgets)


@settings(deadline=None, max_examples=40)
@given(plans(), BUDGETS)
def test_with_one_budget_a_rank_is_idle_only_where_every_other_runs_one_sequence(of: dict[str, Any], budget: Budget) -> None:
    plan = BatchPlan(**of, together=True)
    for slices in plan.epoch(0, budget):
        for one in zip(*slices, strict=True) if plan.ranks > 1 else ():
            assert min(map(len, one)) > 0 or max(map(len, one)) == 1


@settings(deadline=None, max_examples=15)
@given(worlds(), st.integers(0, 3))
def test_every_rank_finds_the_same_rounds_by_itself_and_an_epoch_is_its_steps(
    world: tuple[BatchPlan, list[Budget]], epoch: int
) -> None:
    plan, budgets = world
    first = epoch * plan.steps_per_epoch
    steps = range(first, first + min(3, plan.steps_per_epoch))
    whole = plan.epoch(epoch, budgets)
    assert [plain(next(whole)) for _step in steps] == [plain(plan.slices(step, list(budgets))) for step in steps]


def real_like(n: int, *, has_targets: bool = False) -> IntArray:
    shape = (n, 2) if has_targets else (n,)
    return np.clip(np.random.default_rng(0).lognormal(5.55, 0.85, shape), 8, 2048).astype(np.int64)


@pytest.mark.parametrize("has_targets", [False, True], ids=["one length", "with targets"])
@pytest.mark.parametrize("budget", [Budget.tokens(4096), Budget.sequences(4), MODEL], ids=["tokens", "sequences", "bytes"])
def test_rounds_chosen_together_last_no_longer_than_slices_that_ranks_chose_alone(budget: Budget, *, has_targets: bool) -> None:
    lengths = real_like(1024, has_targets=has_targets)
    for effective_batch, ranks in ((64, 2), (64, 8), (250, 6)):
        plans_ = {how: BatchPlan(lengths, effective_batch=effective_batch, ranks=ranks, together=how) for how in (True, False)}
        lasts = {
            how: sum(sum(seconds_of_rounds(plan, [budget] * ranks, slices)) for slices in plan.epoch(0, budget))
            for how, plan in plans_.items()
        }
        assert lasts[True] < lasts[False]


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0)], ids=["equal speeds", "unequal speeds"])
def test_ranks_with_unequal_memory_and_speed_wait_little_for_each_other(speeds: tuple[float, ...]) -> None:
    plan = BatchPlan(real_like(1024), effective_batch=128, ranks=3, together=True)
    budgets = [Budget.tokens(limit).at_speed(speed) for limit, speed in zip((2048, 4096, 8192), speeds, strict=True)]
    lasting = busy = 0.0
    for slices in plan.epoch(0, budgets):
        lasting += sum(seconds_of_rounds(plan, budgets, slices))
        busy += sum(seconds_of(plan, budget, ids) for budget, rank in zip(budgets, slices, strict=True) for ids in rank) / 3
    assert busy > 0.9 * lasting


def test_few_sequences_on_two_ranks_come_near_the_best_of_all_ways() -> None:
    random = np.random.default_rng(1)
    ratios = []
    for _batch in range(30):
        lengths = random.integers(1, 41, random.integers(1, 5))
        budgets = [Budget.tokens(int(random.integers(least, 200)), fixed_tokens=20) for least in (40, 1)]
        budgets[1] = budgets[1].at_speed(float(random.choice([0.5, 1.0, 3.0])))
        ratios.append(lasting(lengths, budgets, cut_together([lengths], budgets)) / best_of_all(lengths, budgets))
    assert np.mean(ratios) < 1.05
    assert max(ratios) < 1.5


def lasting(lengths: IntArray, budgets: Sequence[Budget], slices: Slices) -> float:
    plan = BatchPlan(lengths, effective_batch=len(lengths), ranks=len(budgets))
    return sum(seconds_of_rounds(plan, budgets, slices))


def best_of_all(lengths: IntArray, budgets: Sequence[Budget]) -> float:
    """Every sequence into every round of every rank, where the limits allow it."""
    n, ranks = len(lengths), len(budgets)
    best = np.inf
    for rounds in range(1, min(n, 3) + 1):
        for places in product(range(rounds * ranks), repeat=n):
            total = [0.0] * rounds
            for place in set(places):
                inside = [length for length, where in zip(lengths.tolist(), places, strict=True) if where == place]
                budget = budgets[place % ranks]
                fits_none = all(each.cost_of(1, max(inside)) > each.limit for each in budgets)
                if budget.cost_of(len(inside), max(inside)) > budget.limit and not (len(inside) == 1 and fits_none):
                    break
                total[place // ranks] = max(total[place // ranks], float(budget.seconds(len(inside), max(inside))))
            else:
                best = min(best, sum(total))
    return best


def test_a_budget_for_each_rank_or_one_for_all() -> None:
    plan = BatchPlan(range(1, 41), effective_batch=10, ranks=3, together=True)
    with pytest.raises(UsageError, match="2 budgets for 3 ranks"):
        plan.slices(0, [Budget.tokens(64)] * 2)
    assert plain(plan.slices(1, Budget.tokens(64))) == plain(plan.slices(1, [Budget.tokens(64) for _rank in range(3)]))


def test_a_speed_is_a_number_above_0_and_multiplies() -> None:
    budget = Budget.tokens(64)
    assert float(budget.at_speed(0.5).seconds(2, 10)) == 2 * float(budget.seconds(2, 10))
    assert budget.at_speed(0.5).at_speed(2) == budget.at_speed(1) == budget
    assert budget.at_speed(2).with_limit(8).cost_of(1, 8) == 8
    for wrong in (0, -1.0, float("nan"), float("inf"), "fast", True):
        with pytest.raises(UsageError, match="A speed is"):
            budget.at_speed(wrong)  # type: ignore[arg-type]
