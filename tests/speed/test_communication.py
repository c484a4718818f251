"""What ranks send each other grows with the group and with what the engine shards; a rank alone sends nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.machine.catalogue import find_gpu
from brim.speed.communication import ALONE, NOTHING, Group, Traffic, network_of, traffic
from brim.speed.links import Link, Network, read_link
from brim.speed.rates import rates_of_gpu
from brim.workload.settings import Settings

RATES = rates_of_gpu(find_gpu("rtx-3090").gpu)
PARAMETERS = 1_000_000_000
ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)


def sent(trainable: int = PARAMETERS, *, over: dict[str, Any] | None = None, **changes: Any) -> Traffic:
    """`over` are the network, the depth and the width of the model."""
    return traffic(
        Settings(**{"precision": "bf16", **changes}), RATES, parameters=PARAMETERS, trainable=trainable, **(over or {})
    )


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
    # They move the same; only DeepSpeed, without overlap_comm, cannot hide it.
    assert zero3.overlap == 0 < fsdp.overlap
    assert replace(zero3, overlap=fsdp.overlap) == fsdp
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


def group(gpus: int, nodes: int, inside: float = 100e9, between: float = 10e9) -> Group:
    links = Link("nvlink", inside, 3e-6, 28e-6), Link("100Gbit", between, 10e-6, 50e-6)
    return Group(gpus, nodes, Network(*links))


SIZES = st.floats(1e3, 1e12)
COUNTS = st.integers(1, 16)
NODES = st.integers(1, 512)
MOVES = pytest.mark.parametrize("move", [Group.around, Group.summed])


@MOVES
@settings(deadline=None, max_examples=60)
@given(gpus=COUNTS, nodes=NODES, size=SIZES, more=st.floats(1.01, 100))
def test_seconds_grow_with_bytes_and_fall_with_bandwidth(move: Any, gpus: int, nodes: int, size: float, more: float) -> None:
    if gpus * nodes == 1:
        assert move(group(1, 1), size) == NOTHING
        return
    least = move(group(gpus, nodes), size)
    assert move(group(gpus, nodes), more * size).seconds > least.seconds
    wider = move(group(gpus, nodes, inside=more * 100e9, between=more * 10e9), size)
    assert wider.seconds < least.seconds
    assert wider.busy.inside <= least.busy.inside
    assert wider.busy.between <= least.busy.between


@MOVES
@settings(deadline=None, max_examples=60)
@given(gpus=COUNTS, nodes=NODES, size=SIZES)
def test_latency_grows_with_ranks(move: Any, gpus: int, nodes: int, size: float) -> None:
    here = move(group(gpus, nodes), size).seconds
    assert move(group(gpus, nodes + 1), size).seconds >= here
    assert move(group(gpus + 1, nodes), size).seconds >= here
    assert move(group(gpus, nodes), size, 5).seconds >= here


@settings(deadline=None, max_examples=60)
@given(gpus=st.integers(2, 16), nodes=st.integers(2, 512), size=SIZES)
def test_links_work_side_by_side_and_each_is_accounted_for(gpus: int, nodes: int, size: float) -> None:
    moved = group(gpus, nodes).summed(size)
    assert max(moved.busy.inside, moved.busy.between) <= moved.seconds
    assert moved.seconds <= moved.busy.inside + moved.busy.between + 10e-6


def test_a_node_sends_as_much_whatever_the_number_of_its_gpus() -> None:
    size = 1e10
    few, many = (group(gpus, 4).around(size).busy.between for gpus in (1, 8))
    assert few == pytest.approx(many) == pytest.approx(0.75 * size / 10e9, rel=1e-3)


def test_many_nodes_sum_up_a_tree_and_gather_round_a_ring() -> None:
    hops = group(8, 128)
    assert hops.summed(1.0).seconds < hops.around(1.0).seconds
    assert group(8, 1).summed(1.0).seconds > group(8, 1).around(1.0).seconds


@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_engines_that_gather_pay_for_every_layer(engine: str) -> None:
    deep, flat = (sent(sharding=engine, gpus=8, nodes=16, over={"layers": layers}) for layers in (80, 1))
    assert deep.micro_batch_seconds > flat.micro_batch_seconds


def test_deepspeeds_buckets_are_as_wide_as_the_model() -> None:
    narrow, wide = (sent(sharding="zero2", gpus=8, nodes=16, over={"width": width}) for width in (512, 8192))
    assert narrow.micro_batch_seconds > wide.micro_batch_seconds


@EVERY_ENGINE
def test_a_faster_network_makes_every_engine_faster(engine: str) -> None:
    h100 = find_gpu("h100").gpu
    networks = [
        network_of(RATES, 8, gpu=h100, link=read_link(link)) for link in ("ethernet-10", "ethernet-100", "infiniband-ndr*8")
    ]
    seconds = [total(sent(sharding=engine, gpus=8, nodes=4, over={"network": network})) for network in networks]
    assert seconds[0] > seconds[1] > seconds[2]
