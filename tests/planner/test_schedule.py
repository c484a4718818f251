"""The recipe follows the effective batch, as advice, with its source."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter

from brim.errors import UsageError
from brim.planner.schedule import ADAM_LIKE, SGD, follow_up, format_setting, learning_rate_factor
from brim.records import Advice
from brim.workload.words import Optimizer

OPTIMIZERS = get_args(Optimizer)
BATCHES = st.integers(1, 1 << 20)


def _by_setting(**given_: Any) -> dict[str, Advice]:
    return {advice.setting: advice for advice in follow_up(**given_)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_unchanged_batch_needs_no_advice(optimizer: Any) -> None:
    assert follow_up(from_batch=64, to_batch=64, optimizer=optimizer, learning_rate=5e-5, warmup_steps=100) == ()


def test_adam_follows_by_the_square_root_the_half_life_and_tokens() -> None:
    found = _by_setting(from_batch=64, to_batch=256, optimizer="adamw", learning_rate=5e-5, warmup_steps=100)
    assert found["learning_rate"].then == pytest.approx(1e-4)
    assert found["adam_beta2"].then == pytest.approx(0.999**4)
    assert found["warmup_steps"].then == 25
    assert "2205.10287" in found["learning_rate"].source
    assert "2507.07101" in found["adam_beta2"].source


def test_sgd_follows_by_the_ratio_and_has_no_beta2() -> None:
    found = _by_setting(from_batch=64, to_batch=256, optimizer="sgd-momentum", learning_rate=0.1, warmup_steps=10)
    assert found["learning_rate"].then == pytest.approx(0.4)
    assert "1706.02677" in found["learning_rate"].source
    assert set(found) == {"learning_rate", "warmup_steps"}


@pytest.mark.parametrize("optimizer", ["adafactor", "lion"])
def test_sign_like_optimizers_follow_by_the_square_root_without_beta2(optimizer: Any) -> None:
    found = _by_setting(from_batch=16, to_batch=64, optimizer=optimizer, learning_rate=1e-3)
    assert set(found) == {"learning_rate"}
    assert found["learning_rate"].then == pytest.approx(2e-3)
    assert "2405.14578" in found["learning_rate"].source


def test_the_published_pair_of_beta2_comes_out() -> None:
    found = _by_setting(from_batch=16, to_batch=1, optimizer="adamw", beta2=0.95)
    assert round(found["adam_beta2"].then, 3) == 0.997


def test_without_a_learning_rate_the_advice_is_a_factor() -> None:
    found = _by_setting(from_batch=32, to_batch=64, optimizer="adamw")
    assert "learning_rate" not in found
    assert found["learning_rate_factor"].now == 1.0
    assert found["learning_rate_factor"].then == pytest.approx(math.sqrt(2))


def test_only_a_growing_batch_is_warned_of_the_critical_one() -> None:
    larger = _by_setting(from_batch=32, to_batch=64, optimizer="adamw", learning_rate=5e-5)["learning_rate"]
    smaller = _by_setting(from_batch=64, to_batch=32, optimizer="adamw", learning_rate=5e-5)["learning_rate"]
    assert "critical batch" in larger.reason
    assert "2405.14578" in larger.reason
    assert "critical batch" not in smaller.reason


def test_warm_up_keeps_its_tokens_and_says_how_many() -> None:
    found = _by_setting(from_batch=64, to_batch=96, optimizer="adamw", warmup_steps=100, tokens_per_sequence=512)
    assert found["warmup_steps"].then == 67
    assert "3,276,800" in found["warmup_steps"].reason


def test_warm_up_that_was_there_does_not_vanish_and_none_does_not_appear() -> None:
    assert _by_setting(from_batch=1, to_batch=1024, optimizer="sgd", warmup_steps=3)["warmup_steps"].then == 1
    assert "warmup_steps" not in _by_setting(from_batch=1, to_batch=1024, optimizer="sgd", warmup_steps=0)


def test_beta2_is_not_lowered_below_the_first_moments_and_it_says_so() -> None:
    found = _by_setting(from_batch=1, to_batch=1024, optimizer="adamw", beta2=0.999)["adam_beta2"]
    assert found.then == 0.9
    assert "0.9" in found.reason
    assert "adam_beta2" not in _by_setting(from_batch=1, to_batch=4, optimizer="adamw", beta2=0.8)


@given(BATCHES, BATCHES, st.sampled_from(OPTIMIZERS), st.floats(1e-8, 10), st.floats(1e-6, 1 - 1e-9), st.integers(0, 10**6))
def test_advice_is_always_possible_and_can_be_written_down(
    before: int, after: int, optimizer: Any, rate: float, beta2: float, steps: int
) -> None:
    found = follow_up(from_batch=before, to_batch=after, optimizer=optimizer, learning_rate=rate, beta2=beta2, warmup_steps=steps)
    for advice in found:
        assert advice.now != advice.then
        assert advice.reason
        assert advice.source
        assert "{" not in advice.reason
        assert math.isfinite(advice.then)
        assert advice.then > 0
        assert advice.setting != "adam_beta2" or (optimizer in ADAM_LIKE and advice.then < 1)
        assert advice.setting == "warmup_steps" or (advice.then > advice.now) == (
            (after > before) == (advice.setting == "learning_rate")
        )
        TypeAdapter(Advice).validate_python(advice)


@given(BATCHES, BATCHES, BATCHES, st.sampled_from(OPTIMIZERS))
def test_two_changes_are_one_change(first: int, second: int, third: int, optimizer: Any) -> None:
    there = learning_rate_factor(first, second, optimizer) * learning_rate_factor(second, third, optimizer)
    assert there == pytest.approx(learning_rate_factor(first, third, optimizer))
    assert learning_rate_factor(first, first * 4, optimizer) == pytest.approx(4 if optimizer in SGD else 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5e-5, "5e-5"),
        (5e-5 * math.sqrt(2), "7.07e-5"),
        (0.999, "0.999"),
        (0.996006, "0.996006"),
        (250.0, "250"),
        (1e-3, "0.001"),
        (0.0, "0"),
    ],
)
def test_settings_are_printed_as_people_write_them(value: float, text: str) -> None:
    assert format_setting(value) == text


@pytest.mark.parametrize(
    "bad",
    [
        {"from_batch": 0},
        {"to_batch": -1},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"beta2": 1.0},
        {"warmup_steps": -1},
    ],
)
def test_impossible_recipes_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        follow_up(**{"from_batch": 8, "to_batch": 16, "optimizer": "adamw", **bad})
    assert caught.value.hint
