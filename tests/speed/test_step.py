"""An optimizer step is its micro-batches, the sums of their gradients, what travels, and one update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.machine.catalogue import find_gpu
from brim.speed.communication import ALONE, Traffic, network_of, traffic
from brim.speed.links import read_link
from brim.speed.rates import Rates, rates_of_gpu
from brim.speed.roofline import Roofline
from brim.speed.step import StepSpeed
from brim.step.cuts import cut
from brim.workload.settings import Settings
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
    for sent, times in ((Traffic(second, 0, 0, 1), 2), (Traffic(0, second, 0, 1), 1), (Traffic(0, 0, second, 1), 1)):
        assert alone < speed(rates, sent).step_seconds([[4, 4]]) <= alone + times * second + 1e-9
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


@settings(deadline=None, max_examples=60)
@given(
    effective=st.integers(1, 300),
    micro=st.integers(1, 16),
    gpus=st.integers(1, 8),
    nodes=st.integers(1, 64),
    engine=st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp"]),
)
def test_more_gpus_never_make_the_same_configuration_faster_than_ideal(
    effective: int, micro: int, gpus: int, nodes: int, engine: Any
) -> None:
    gpu = find_gpu("h100").gpu
    rates = rates_of_gpu(gpu)
    parameters = 50_000_000

    def seconds(gpus: int, nodes: int) -> float:
        settings_ = Settings(precision="bf16", sharding=engine, gpus=gpus, nodes=nodes)
        network = network_of(rates, gpus, gpu=gpu, link=read_link("infiniband-ndr*8"))
        moved = traffic(settings_, rates, parameters=parameters, trainable=parameters, network=network)
        made = cut(effective, micro, gpus * nodes)
        slices = made.slices or (made.micro_batch,) * made.accumulation * gpus * nodes
        assert sum(slices) == effective
        runs = [slices[start : start + made.accumulation] for start in range(0, len(slices), made.accumulation)]
        parts = speed(rates, moved, 2.0 * parameters).step_parts(runs)
        assert parts.seconds == parts.compute_seconds + parts.exposed_seconds
        return parts.seconds

    assert seconds(gpus, nodes) * gpus * nodes >= seconds(1, 1) * (1 - 1e-9)
