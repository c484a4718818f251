"""What a step takes follows from what its trace computes: more work is never less time, and the work is that of the textbook."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.machine.catalogue import find_gpu
from brim.memory.family import Family, trace_family
from brim.memory.setup import Setup, Target
from brim.memory.work import PHASES
from brim.speed.rates import Rates, rates_of_cpu, rates_of_gpu
from brim.speed.roofline import Roofline

LENGTH = 256
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 211,
    "num_hidden_layers": 6, "intermediate_size": 192, "tie_word_embeddings": False,
}  # fmt: skip
FORWARD, BACKWARD, OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "optimizer"))
DEVICES = {"cpu": rates_of_cpu(2), "t4": rates_of_gpu(find_gpu("t4").gpu), "h100": rates_of_gpu(find_gpu("h100-sxm").gpu)}
EVERYWHERE = pytest.mark.parametrize("rates", DEVICES.values(), ids=DEVICES.keys())


@cache
def family(**changes: Any) -> Family:
    setup = Setup(**{"config": LLAMA, "task": "causal-lm", "micro_batch": 2, "length": LENGTH, "accumulation": 2, **changes})
    return trace_family(setup, Target("cuda", (8, 0)))


def flops(found: Family, phase: int, batch: float = 4, length: float = LENGTH) -> float:
    work = found.work
    return float((work.flops_at(batch, length) * work.times)[work.phases == phase].sum())


def test_forward_of_a_llama_is_two_operations_per_parameter_and_token() -> None:
    embeddings = LLAMA["vocab_size"] * LLAMA["hidden_size"]  # type: ignore[operator]
    products = family().facts.total_parameters - embeddings
    attention = 4 * LENGTH * 64 * 6  # two products over all pairs of tokens, of every layer
    found = flops(family(), FORWARD) / (4 * LENGTH)
    assert 2 * products < found < 1.02 * (2 * products + attention)


def test_backward_of_full_training_is_about_twice_forward() -> None:
    assert 1.9 < flops(family(), BACKWARD) / flops(family(), FORWARD) < 2.3


def test_lora_needs_no_gradients_of_the_frozen_weights() -> None:
    lora = family(method="lora", lora_rank=2)
    assert flops(lora, BACKWARD) < 0.75 * flops(family(), BACKWARD)
    assert flops(lora, FORWARD) > flops(family(), FORWARD)


def test_checkpointing_computes_forward_once_more() -> None:
    checkpointed = family(checkpointing="full")
    assert flops(checkpointed, FORWARD) == flops(family(), FORWARD)
    again = flops(checkpointed, BACKWARD) - flops(family(), BACKWARD)
    assert 0.7 < again / flops(family(), FORWARD) <= 1.0


@EVERYWHERE
def test_checkpointing_costs_time(rates: Rates) -> None:
    plain, checkpointed = (Roofline(family(checkpointing=word).work, rates) for word in ("none", "full"))
    for batch in (1, 4, 64):
        assert checkpointed.micro_batch_seconds(batch, LENGTH) > plain.micro_batch_seconds(batch, LENGTH)


@EVERYWHERE
@settings(deadline=None, max_examples=40)
@given(batch=st.integers(1, 512), length=st.integers(16, 8192), more=st.integers(1, 64))
def test_more_sequences_and_longer_ones_never_take_less_time(rates: Rates, batch: int, length: int, more: int) -> None:
    roofline = Roofline(family().work, rates)
    seconds = roofline.micro_batch_seconds(batch, length)
    assert 0 < seconds <= roofline.micro_batch_seconds(batch + more, length)
    assert seconds <= roofline.micro_batch_seconds(batch, length + more)


@EVERYWHERE
@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 256),
    faster=st.floats(1.0, 10.0),
    what=st.sampled_from(("flops", "bandwidth", "kernel_seconds", "launch_seconds", "attention_share", "new_pages")),
)
def test_a_faster_device_is_never_slower(rates: Rates, batch: int, faster: float, what: str) -> None:
    changed: dict[str, Any] = {
        "flops": {name: rate * faster for name, rate in rates.flops.items()},
        "bandwidth": tuple((size, rate * faster) for size, rate in rates.bandwidth),
        "kernel_seconds": rates.kernel_seconds / faster,
        "launch_seconds": rates.launch_seconds / faster,
        "attention_share": rates.attention_share * faster,
        "new_pages": rates.new_pages and (rates.new_pages[0], rates.new_pages[1] * faster),
    }
    better = replace(rates, **{what: changed[what]})
    work = family().work
    # Rounding may differ by the last digit.
    assert Roofline(work, better).micro_batch_seconds(batch, LENGTH) <= Roofline(work, rates).micro_batch_seconds(
        batch, LENGTH
    ) * (1 + 1e-12)


@EVERYWHERE
def test_the_optimizer_takes_the_same_time_whatever_the_batch(rates: Rates) -> None:
    roofline = Roofline(family().work, rates)
    assert roofline.optimizer_seconds() > 0
    for batch in (1, 100):
        assert roofline.phase_seconds(batch, LENGTH)[OPTIMIZER] == pytest.approx(roofline.optimizer_seconds())


def test_large_results_on_the_cpu_pay_for_new_pages_and_results_in_place_do_not() -> None:
    rates = DEVICES["cpu"]
    kept = replace(rates, new_pages=None)
    work = family().work
    small, large = 1, 1024
    assert Roofline(work, rates).micro_batch_seconds(small, LENGTH) == Roofline(work, kept).micro_batch_seconds(small, LENGTH)
    more = Roofline(work, rates).call_seconds(large, LENGTH) - Roofline(work, kept).call_seconds(large, LENGTH)
    in_place = np.array([operator.endswith("_") for operator in work.operators])
    assert more.max() > 0
    assert not more[in_place].any()


def test_a_gpu_has_no_new_pages() -> None:
    assert DEVICES["t4"].new_pages is None


def test_the_bandwidth_between_two_sizes_lies_between_theirs() -> None:
    rates = DEVICES["cpu"]
    knots, values = zip(*rates.bandwidth, strict=True)
    assert rates.bandwidth_of(np.array(knots, dtype=float)) == pytest.approx(values)
    between = rates.bandwidth_of(np.sqrt(np.array(knots[:-1], dtype=float) * np.array(knots[1:], dtype=float)))
    assert (between <= np.maximum(values[:-1], values[1:])).all()
    assert (between >= np.minimum(values[:-1], values[1:])).all()
    assert rates.bandwidth_of(np.array([1.0, 1e15])) == pytest.approx([values[0], values[-1]])
