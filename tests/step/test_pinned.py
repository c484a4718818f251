"""A micro-batch that was asked for: used as given, split where it must be, and never lowered."""

from __future__ import annotations

import numpy as np

from brim.step.batch import BatchPlan
from brim.step.budget import Budget
from brim.step.micro import MicroBatch
from brim.step.oom import Guard


def test_it_is_used_as_given_whatever_padding_costs() -> None:
    lengths = np.array([500, 3, 3, 3, 3, 3, 3, 3, 200, 2, 2, 2])
    plan = BatchPlan(lengths, effective_batch=12, seed=0)
    assert [len(part) for part in plan.slices(0, Budget.pinned(4))[0]] == [4, 4, 4]


def test_where_the_batch_does_not_divide_there_are_as_few_micro_batches_as_can_be() -> None:
    plan = BatchPlan(np.arange(1, 13), effective_batch=12, seed=0)
    sizes = [len(part) for part in plan.slices(0, Budget.pinned(5))[0]]
    assert len(sizes) == 3
    assert sum(sizes) == 12
    assert max(sizes) <= 5


def test_running_out_of_memory_does_not_lower_it() -> None:
    guard = Guard(Budget.pinned(4))
    guard.learn(MicroBatch(np.arange(4), np.full(4, 9), {}))
    assert guard.limit == 4
    other = Guard(Budget.sequences(4))
    other.learn(MicroBatch(np.arange(4), np.full(4, 9), {}))
    assert other.limit < 4
