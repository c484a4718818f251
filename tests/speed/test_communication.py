"""What ranks send each other grows with the group and with what the engine shards; a rank alone sends nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.machine.catalogue import find_gpu
from brim.speed.communication import ALONE, Traffic, link_bytes_per_second, traffic
from brim.speed.rates import rates_of_gpu
from brim.workload.settings import Settings

RATES = rates_of_gpu(find_gpu("rtx-3090").gpu)
PARAMETERS = 1_000_000_000
ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)


def sent(trainable: int = PARAMETERS, **changes: Any) -> Traffic:
    return traffic(Settings(**{"precision": "bf16", **changes}), RATES, parameters=PARAMETERS, trainable=trainable)


def total(found: Traffic, micro_batches: int = 1) -> float:
    return micro_batches * found.micro_batch_seconds + found.step_seconds + found.exposed_seconds


@pytest.mark.parametrize("engine", ["none", *ENGINES])
def test_a_rank_alone_sends_nothing(engine: str) -> None:
    assert sent(sharding=engine) == ALONE
    assert total(ALONE) == 0


@EVERY_ENGINE
@settings(deadline=None, max_examples=40)
@given(gpus=st.integers(2, 16))
def test_more_ranks_never_send_in_less_time(engine: str, gpus: int) -> None:
    fewer, more = sent(sharding=engine, gpus=gpus), sent(sharding=engine, gpus=gpus + 1)
    assert 0 < total(fewer) < total(more)
    assert fewer.micro_batch_seconds <= more.micro_batch_seconds
    assert fewer.step_seconds <= more.step_seconds
    assert fewer.exposed_seconds <= more.exposed_seconds


@EVERY_ENGINE
def test_each_rank_of_an_engine_updates_its_part(engine: str) -> None:
    assert sent(sharding=engine, gpus=4).optimizer_share == (1.0 if engine == "ddp" else 0.25)


def test_weights_that_are_gathered_cost_every_micro_batch() -> None:
    ddp, zero1, zero2, zero3, fsdp = (sent(sharding=engine, gpus=4) for engine in ENGINES)
    assert ddp.micro_batch_seconds == zero1.micro_batch_seconds == 0
    assert 0 < zero2.micro_batch_seconds < zero3.micro_batch_seconds
    assert zero3 == fsdp
    assert total(ddp, 8) < total(zero2, 8) < total(zero3, 8)


def test_what_is_frozen_has_no_gradients_to_send() -> None:
    for engine in ENGINES:
        assert total(sent(sharding=engine, gpus=4, trainable=1_000_000)) < total(sent(sharding=engine, gpus=4))


def test_float32_gradients_are_twice_as_many_bytes() -> None:
    half, plain = (sent(sharding="ddp", gpus=8, precision=precision) for precision in ("bf16", "fp32"))
    assert plain.step_seconds == pytest.approx(2 * half.step_seconds, rel=0.01)
    assert sent(sharding="ddp", gpus=8, precision="amp-bf16") == plain


@pytest.mark.parametrize("gpus", [1, 4])
def test_offload_moves_the_update_to_the_host_and_costs_time(gpus: int) -> None:
    near = sent(sharding="zero3", gpus=gpus)
    optimizer = sent(sharding="zero3", gpus=gpus, offload="optimizer")
    weights = sent(sharding="zero3", gpus=gpus, offload="parameters")
    assert optimizer.optimizer_share == weights.optimizer_share == 0.0
    assert optimizer.exposed_seconds > near.exposed_seconds
    assert weights.micro_batch_seconds > optimizer.micro_batch_seconds
    assert total(weights) > total(optimizer) > total(near)


def test_a_ring_over_nodes_is_as_fast_as_its_slowest_link() -> None:
    inside, across = (link_bytes_per_second(Settings(gpus=4, nodes=nodes), RATES) for nodes in (1, 2))
    assert inside == RATES.peer_bytes_per_second
    assert across <= inside
