"""A target batch is met exactly, whatever the micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from brim.errors import UsageError
from brim.step.accumulation import calculate_gradient_accumulation


def test_fifty_in_slices_of_at_most_eight() -> None:
    found = calculate_gradient_accumulation(50, 8)
    assert found == {
        "batch_size": 5,
        "accumulation_steps": 10,
        "effective_batch_size": 50,
        "batch_size_difference": 0,
        "slices": [8, 7, 7, 7, 7, 7, 7],
    }


def test_a_target_below_the_micro_batch_is_one_slice() -> None:
    found = calculate_gradient_accumulation(8, 32)
    assert found["batch_size"] * found["accumulation_steps"] == found["effective_batch_size"] == 8
    assert found["slices"] == [8]


def test_equal_slices_are_listed_too() -> None:
    assert calculate_gradient_accumulation(64, 16)["slices"] == [16, 16, 16, 16]


def test_the_names_of_the_arguments_are_the_public_ones() -> None:
    assert calculate_gradient_accumulation(target_batch_size=32, actual_batch_size=4)["accumulation_steps"] == 8


@given(st.integers(1, 4096), st.integers(1, 600))
def test_any_target_is_met_with_the_fewest_slices(target: int, actual: int) -> None:
    found = calculate_gradient_accumulation(target, actual)
    assert found["effective_batch_size"] == sum(found["slices"]) == target
    assert found["batch_size_difference"] == 0
    assert len(found["slices"]) == -(-target // actual)
    assert 1 <= min(found["slices"]) <= max(found["slices"]) <= actual
    assert max(found["slices"]) - min(found["slices"]) <= 1


@given(st.integers(1, 4096), st.integers(1, 600))
def test_a_plain_loop_takes_equal_micro_batches(target: int, actual: int) -> None:
    found = calculate_gradient_accumulation(target, actual)
    assert found["batch_size"] * found["accumulation_steps"] == target
    assert found["batch_size"] == max(size for size in range(1, actual + 1) if target % size == 0)


def test_a_plain_loop_over_a_loader_steps_at_exactly_the_target() -> None:
    from torch.utils.data import DataLoader

    found = calculate_gradient_accumulation(50, 8)
    steps: list[int] = []
    held = 0
    for number, batch in enumerate(DataLoader(range(200), batch_size=found["batch_size"]), 1):  # type: ignore[arg-type]
        held += len(batch)
        if number % found["accumulation_steps"] == 0:
            steps.append(held)
            held = 0
    assert steps == [50, 50, 50, 50]


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "8", None, float("nan")])
def test_what_is_no_batch_size_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(UsageError, match="target_batch_size"):
        calculate_gradient_accumulation(bad, 8)
    with pytest.raises(UsageError, match="actual_batch_size") as caught:
        calculate_gradient_accumulation(8, bad)
    assert caught.value.hint
