"""What failed once is not run again, where it would fail again; and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from brim.step.budget import Budget
from brim.step.micro import MicroBatch
from brim.step.oom import Failure
from brim.step.together import TooLargeError
from brim.trainer.lessons import Lessons, learn, told

BUDGET = Budget.tokens(1000)


def card(**changed: Any) -> Any:
    sharding, limit = changed.pop("sharding", "fsdp"), changed.pop("limit", 100)
    return SimpleNamespace(
        settings=SimpleNamespace(sharding=sharding), limit_of=lambda _rank: limit, **{"world_size": 2, **changed}
    )


def failed(count: int, length: int) -> TooLargeError:
    micro = MicroBatch(np.arange(count), np.full(count, length), None)
    return TooLargeError(micro, Failure("backward", "cpu", None), rank=1)


def test_slices_fall_below_what_failed_and_further_each_time(tmp_path: Path) -> None:
    limits = []
    for count in (8, 7, 6):
        assert learn(tmp_path, failed(count, 100), card())
        limits.append(Lessons.of(tmp_path).taught(BUDGET, card()).limit)
    assert limits == pytest.approx([0.9 * 800, 0.7 * 700, 0.5 * 600])


@pytest.mark.parametrize("other", [{"sharding": "zero3"}, {"world_size": 3}, {"limit": 200}])
def test_another_engine_more_ranks_or_more_memory_are_another_matter(tmp_path: Path, other: dict[str, Any]) -> None:
    learn(tmp_path, failed(8, 100), card())
    assert Lessons.of(tmp_path).taught(BUDGET, card(**other)) is BUDGET
    assert Lessons.of(tmp_path).taught(BUDGET, card(limit=50)).limit < BUDGET.limit


def test_one_sequence_alone_is_tried_once_more_and_teaches_no_limit(tmp_path: Path) -> None:
    assert learn(tmp_path, failed(1, 100), card())
    assert "once" in told(Lessons.of(tmp_path).lessons[0])
    assert Lessons.of(tmp_path).taught(BUDGET, card()) is BUDGET
    assert not learn(tmp_path, failed(1, 100), card())


def test_a_pinned_slice_stays_as_it_was_asked_for(tmp_path: Path) -> None:
    learn(tmp_path, failed(8, 100), card())
    pinned = Budget.pinned(8)
    assert Lessons.of(tmp_path).taught(pinned, card()) is pinned
