"""What the constants make of a data sheet: every card of the catalogue, and cards that are not in it."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import brim
from brim.machine.catalogue import generic_gpu
from brim.speed import constants
from brim.speed.rates import Rates, rates_of_cpu, rates_of_gpu

if TYPE_CHECKING:
    from brim.machine.records import GPU

EVERY_CARD = pytest.mark.parametrize("gpu", brim.gpus(), ids=lambda gpu: gpu.name)


def rates_of(name: str) -> Rates:
    return rates_of_gpu(brim.find_gpu(name).gpu)


def figures(rates: Rates) -> list[float]:
    bandwidths = [rate for _size, rate in rates.bandwidth]
    return [*rates.flops.values(), *bandwidths, rates.host_bytes_per_second, rates.peer_bytes_per_second, rates.attention_share]


@EVERY_CARD
def test_every_rate_is_positive_and_finite(gpu: GPU) -> None:
    rates = rates_of_gpu(gpu)
    assert all(isfinite(figure) and figure > 0 for figure in figures(rates))
    assert rates.overlaps
    assert rates.source == "constants"


@EVERY_CARD
def test_no_card_is_faster_than_its_data_sheet(gpu: GPU) -> None:
    rates = rates_of_gpu(gpu)
    halves = [gpu.dense_flops.get(name, 0.0) for name in ("fp32", "fp16", "bf16")]
    assert rates.flops["half"] < max(halves)
    assert rates.flops["fp32"] < gpu.dense_flops["fp32"]
    assert gpu.bandwidth_bytes_per_second is not None
    assert rates.bandwidth[0][1] < gpu.bandwidth_bytes_per_second


@EVERY_CARD
def test_half_precision_is_never_slower_than_float32_and_faster_on_tensor_cores(gpu: GPU) -> None:
    flops = rates_of_gpu(gpu).flops
    assert flops["half"] >= flops["fp32"]
    assert flops["int8"] >= flops["fp32"]
    if gpu.tensor_cores:
        assert flops["half"] > 1.3 * flops["fp32"]


@EVERY_CARD
def test_a_lower_power_limit_never_makes_a_card_faster(gpu: GPU) -> None:
    if not gpu.watts:
        return
    limits = [gpu.watts * percent / 100 for percent in range(10, 101, 5)]
    flops = [rates_of_gpu(replace(gpu, watts=limit)).flops["half"] for limit in limits]
    assert flops == sorted(flops)
    assert flops[-1] == rates_of_gpu(gpu).flops["half"]


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("t4", "l4"), ("t4", "v100"), ("l4", "a10"), ("v100", "a100"), ("rtx-3060", "rtx-3080"), ("rtx-3090", "rtx-4090"),
        ("rtx-4090", "rtx-5090"), ("rtx-4090", "l40s"), ("l4", "l40s"), ("a100-pcie-80gb", "a100-80gb"), ("a100", "h100"),
        ("h100-pcie", "h100"), ("h20", "h100"), ("h100", "b200"),
    ],
)  # fmt: skip
def test_cards_are_in_their_order(slower: str, faster: str) -> None:
    assert rates_of(slower).flops["half"] < rates_of(faster).flops["half"]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("t4", 24, 43), ("v100", 85, 110), ("rtx-a6000", 120, 124), ("l40s", 264, 270), ("a100-80gb", 258, 272), ("h100", 758, 795),
        ("b200", 1627, 1745), ("a100-pcie-80gb", 240, 257), ("rtx-3090", 71, 77), ("rtx-4090", 158, 174), ("rtx-5090", 200, 243),
        ("h20", 141, 148), ("mi300x", 700, 1000),
    ],
)  # fmt: skip
def test_the_best_product_is_near_what_was_published(name: str, low: float, high: float) -> None:
    best = rates_of(name).flops["half"] / constants.MATMUL_SHARE / 1e12
    assert low <= round(best, 1) <= high


def test_a_t4_does_not_sustain_its_peak() -> None:
    t4 = brim.find_gpu("t4").gpu
    assert rates_of_gpu(t4).flops["half"] < 0.6 * t4.dense_flops["fp16"]


@settings(deadline=None)
@given(gib=st.integers(1, 512))
def test_a_card_of_which_only_the_memory_is_known_counts_as_a_middling_one(gib: int) -> None:
    unknown = rates_of_gpu(generic_gpu(gib << 30))
    assert all(isfinite(figure) and figure > 0 for figure in figures(unknown))
    slow, fast = rates_of("t4").flops, rates_of("a100").flops
    assert slow["half"] < unknown.flops["half"] < fast["half"]
    assert unknown.host_bytes_per_second == constants.DEFAULT_HOST_LINK_BYTES_PER_SECOND


def test_a_chip_that_came_later_is_taken_as_the_newest_that_is_known() -> None:
    b200 = brim.find_gpu("b200").gpu
    assert rates_of_gpu(replace(b200, compute_capability="11.0")).flops == rates_of_gpu(b200).flops


def test_cards_without_a_link_of_their_own_meet_over_the_host() -> None:
    alone, linked = rates_of("rtx-4090"), rates_of("a100")
    assert alone.peer_bytes_per_second == alone.host_bytes_per_second
    assert linked.peer_bytes_per_second > linked.host_bytes_per_second


@settings(deadline=None)
@given(cores=st.floats(1, 256), sizes=st.lists(st.floats(0, 1e12), min_size=1, max_size=8))
def test_bandwidth_is_known_at_every_size(cores: float, sizes: list[float]) -> None:
    rates = rates_of_cpu(cores)
    found = rates.bandwidth_of(np.array(sizes))
    slowest, fastest = (choose(rate for _size, rate in rates.bandwidth) for choose in (min, max))
    assert ((found >= 0.999 * slowest) & (found <= 1.001 * fastest)).all()
