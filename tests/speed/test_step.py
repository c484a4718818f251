"""An optimizer step is its micro-batches, the sums of their gradients, what travels, and one update."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from brim.speed.communication import ALONE, Traffic
from brim.speed.rates import Rates
from brim.speed.roofline import Roofline
from brim.speed.step import StepSpeed
from tests.speed.test_roofline import DEVICES, EVERYWHERE, LENGTH, family

GRADIENT_BYTES = 1e6


def speed(rates: Rates, traffic: Traffic = ALONE, gradient_bytes: float = GRADIENT_BYTES) -> StepSpeed:
    return StepSpeed(Roofline(family().work, rates), traffic, gradient_bytes, LENGTH)


@EVERYWHERE
def test_one_micro_batch_and_an_update_make_a_step(rates: Rates) -> None:
    step = speed(rates)
    parts = step.roofline.micro_batch_seconds(2, LENGTH) + step.roofline.optimizer_seconds()
    assert step.step_seconds([[2]]) == pytest.approx(parts)


@EVERYWHERE
@settings(deadline=None, max_examples=40)
@given(count=st.integers(2, 50))
def test_every_micro_batch_but_the_first_adds_its_gradients(rates: Rates, count: int) -> None:
    adding, free = (speed(rates, gradient_bytes=size).step_seconds([[4] * count]) for size in (GRADIENT_BYTES, 1e-6))
    moved = 3 * GRADIENT_BYTES
    slowest, fastest = (pick(rate for _size, rate in rates.bandwidth) for pick in (min, max))
    assert (count - 1) * moved / fastest * 0.99 <= adding - free <= (count - 1) * moved / slowest * 1.01
    assert speed(rates, gradient_bytes=GRADIENT_BYTES).step_seconds([[4]]) == speed(rates, gradient_bytes=0.0).step_seconds([[4]])


@EVERYWHERE
@settings(deadline=None, max_examples=40)
@given(slices=st.lists(st.integers(1, 16), min_size=1, max_size=8), other=st.lists(st.integers(1, 16), min_size=1, max_size=8))
def test_the_slowest_rank_is_waited_for(rates: Rates, slices: list[int], other: list[int]) -> None:
    step = speed(rates, gradient_bytes=0.001)
    both = step.step_seconds([slices, other])
    assert both == pytest.approx(max(step.step_seconds([slices]), step.step_seconds([other])))


@EVERYWHERE
def test_a_mean_over_batches_of_the_longest_length_is_the_step(rates: Rates) -> None:
    step = speed(rates)
    batches = [[[(4, float(LENGTH)), (3, float(LENGTH))]]] * 3
    assert step.mean_step_seconds(batches) == pytest.approx(step.step_seconds([[4, 3]]))


@EVERYWHERE
def test_shorter_sequences_take_less_time(rates: Rates) -> None:
    step = speed(rates)
    seconds = [step.mean_step_seconds([[[(16, LENGTH * share)]]]) for share in (0.3, 0.6, 1.0)]
    # Where the host's launches decide, all take the same, but for rounding.
    assert 0 < seconds[0] <= seconds[1] * (1 + 1e-9) <= seconds[2] * (1 + 2e-9)


@EVERYWHERE
def test_what_travels_costs_time_but_partly_hides(rates: Rates) -> None:
    alone = speed(rates).step_seconds([[4, 4]])
    second = 1.0
    for traffic, times in ((Traffic(second, 0, 0, 1), 2), (Traffic(0, second, 0, 1), 1), (Traffic(0, 0, second, 1), 1)):
        assert alone < speed(rates, traffic).step_seconds([[4, 4]]) <= alone + times * second + 1e-9
    assert speed(rates, Traffic(0, 0, second, 1)).step_seconds([[4, 4]]) == pytest.approx(alone + second)


@EVERYWHERE
def test_a_share_of_the_update_takes_that_share_of_its_time(rates: Rates) -> None:
    step = speed(rates)
    saved = step.step_seconds([[4]]) - speed(rates, Traffic(0, 0, 0, 0.25)).step_seconds([[4]])
    assert saved == pytest.approx(0.75 * step.roofline.optimizer_seconds())


def test_the_scale_scales_everything() -> None:
    rates = DEVICES["cpu"]
    slower = speed(replace(rates, scale=3.0)).step_seconds([[4, 2]])
    assert slower == pytest.approx(3 * speed(rates).step_seconds([[4, 2]]))
