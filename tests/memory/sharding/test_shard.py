"""One trace of one device tells what a rank of every engine holds: what is split, what is gathered, and what stays whole."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from brim.memory.layers import deepen
from brim.memory.setup import Setup, Target
from brim.memory.sharding.shard import Parallel, ddp_buckets, shard
from brim.memory.sharding.walk import read
from brim.memory.stream import Trace
from brim.memory.tracing.reference import trace_step

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "num_hidden_layers": 4,
}
GPU = Target("cuda", (8, 0))
SPLITTING = ("zero1", "zero2", "zero3", "fsdp")
ALL = ("ddp", *SPLITTING)
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora", "lora_targets": ("all-linear",)},
    "qlora": {"method": "qlora", "lora_targets": ("all-linear",), "precision": "bf16"},
    "bf16": {"precision": "bf16"},
    "accumulated": {"accumulation": 2},
    "checkpointed": {"checkpointing": "full"},
    "loop": {"optimizer": "adamw-loop"},
    "tied": {"config": {**LLAMA, "tie_word_embeddings": True}},
    "frozen first layers": {"freeze": (r"layers\.[01]\.", "embed")},
}
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory_sharding.py"


@cache
def _trace(name: str) -> Trace:
    settings: dict[str, Any] = {"config": LLAMA, "task": "causal-lm", "micro_batch": 2, "length": 16, **SETTINGS[name]}
    return trace_step(Setup(**settings), GPU).trace


def _sharded(name: str, sharding: Any, ranks: int = 2, **settings: Any) -> Trace:
    return shard(_trace(name), Parallel(sharding, ranks, hidden=64, **settings))[0]


def _peak(trace: Trace) -> int:
    return max(live for place, live in trace.peaks().items() if place.phase != "build")


def _bytes(trace: Trace, kind: str) -> int:
    return sum(birth.size for birth in trace.births if birth.kind == kind)


@pytest.mark.parametrize("sharding", ALL)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_storage_is_born_once_and_dies_at_most_once(name: str, sharding: str) -> None:
    old = _trace(name)
    new, sources = shard(old, Parallel(sharding, 2, hidden=64))  # type: ignore[arg-type]
    born = [event for event in new.events if event >= 0]
    dead = [~event for event in new.events if event < 0]
    assert born == list(range(len(new.births)))
    assert len(set(dead)) == len(dead)
    position = {event: index for index, event in enumerate(new.events)}
    assert all(position[number] < position[~number] for number in dead)
    assert len(sources) == len(new.births)
    assert len(new.events) == len(new.event_places)
    for birth, source in zip(new.births, sources, strict=True):
        assert source < 0 or (birth.kind, birth.operator) == (old.births[source].kind, old.births[source].operator)


@pytest.mark.parametrize("sharding", ALL)
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_but_the_optimizers_state_and_what_is_made_for_good_outlives_a_step(name: str, sharding: str) -> None:
    new, sources = shard(_trace(name), Parallel(sharding, 2, hidden=64))  # type: ignore[arg-type]
    alive = set(range(len(new.births))) - {~event for event in new.events if event < 0}
    for number in alive:
        birth = new.births[number]
        made_for_good = new.places[birth.place].phase == "build"
        assert made_for_good or birth.kind in {"optimizer", "buffers"}, birth
        assert sources[number] >= 0 or made_for_good


@pytest.mark.parametrize("sharding", SPLITTING)
@pytest.mark.parametrize("name", SETTINGS)
def test_more_ranks_never_need_more(name: str, sharding: str) -> None:
    peaks = [_peak(_sharded(name, sharding, ranks)) for ranks in (2, 3, 4, 8, 64)]
    # ZeRO-2 reduces a bucket that crosses a border between parts in a copy: more ranks have more borders.
    slack = 64 * 64 * 4 if sharding == "zero2" else 0
    slack += 8 * len(_trace(name).births)  # parts are rounded up
    assert all(more <= fewer + slack for fewer, more in pairwise(peaks)), peaks


@pytest.mark.parametrize("name", SETTINGS)
def test_one_device_alone_stays_as_it_is(name: str) -> None:
    trace = _trace(name)
    same, sources = shard(trace, Parallel("none", 1))
    assert same == trace
    assert sources == list(range(len(trace.births)))


@pytest.mark.parametrize("name", SETTINGS)
def test_ddp_takes_its_buckets_and_nothing_else(name: str) -> None:
    trace = _trace(name)
    trainable = sum(parameter.size for parameter in read(trace).trainable)
    assert _peak(_sharded(name, "ddp")) == _peak(trace) + trainable
    assert _bytes(_sharded(name, "ddp"), "communication") == trainable


def test_ddp_gradients_that_live_in_their_buckets_cost_nothing_more() -> None:
    viewing = _peak(_sharded("full", "ddp", gradient_as_bucket_view=True))
    assert _peak(_trace("full")) <= viewing < _peak(_sharded("full", "ddp"))


def test_ddp_buckets_are_filled_from_the_end_and_never_hold_two_dtypes() -> None:
    assert ddp_buckets([]) == []
    assert sum(ddp_buckets(read(_trace("full")).trainable)) == _bytes(_trace("full"), "parameters")


@pytest.mark.parametrize("sharding", SPLITTING)
def test_optimizer_state_is_split_evenly(sharding: str) -> None:
    whole = _bytes(_trace("full"), "optimizer")
    copied = [
        birth
        for birth in _sharded("full", sharding, 4).births
        if birth.kind == "optimizer" and not birth.operator.startswith("zero:")
    ]
    assert sum(birth.size for birth in copied) == pytest.approx(whole / 4, rel=0.01)


def test_zero_holds_float32_copies_of_what_trains_in_half_precision() -> None:
    trained = sum(parameter.size for parameter in read(_trace("bf16")).trainable)
    for sharding in ("zero1", "zero2", "zero3"):
        masters = [birth for birth in _sharded("bf16", sharding, 2).births if birth.operator == "zero:master"]
        assert sum(birth.size for birth in masters) == trained * 2 // 2


def test_what_is_frozen_is_split_by_those_who_split_parameters_and_has_no_gradients() -> None:
    parameters = _bytes(_trace("lora"), "parameters")
    assert _bytes(_sharded("lora", "ddp"), "parameters") == parameters
    assert _bytes(_sharded("lora", "zero2"), "parameters") == parameters
    assert _bytes(_sharded("lora", "fsdp", 4), "parameters") == pytest.approx(parameters / 4, rel=0.01)
    reduced = [birth.size for birth in _sharded("lora", "fsdp").births if birth.operator == "fsdp:reduce-input"]
    assert sum(reduced) == 2 * sum(parameter.size for parameter in read(_trace("lora")).trainable)  # two steps


def test_zero3_steps_through_its_part_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.memory.sharding import zero as sharding_zero

    def in_step(trace: Trace) -> int:
        return max(live for place, live in trace.peaks().items() if place.phase == "optimizer")

    whole = in_step(_sharded("full", "zero3"))
    monkeypatch.setattr(sharding_zero, "_GROUP_ELEMENTS", 10_000)
    assert in_step(_sharded("full", "zero3")) < whole


def _of(trace: Trace, operator: str) -> list[int]:
    return [birth.size for birth in trace.births if birth.operator == operator]


def test_a_rank_of_zero_keeps_the_whole_gradient_of_a_parameter_that_its_part_only_touches() -> None:
    trained = [parameter.size for parameter in read(_trace("full")).trainable]
    for sharding in ("zero1", "zero2"):
        room = sum(_of(_sharded("full", sharding, 64), "zero:gradients")) // 2  # two steps
        assert room >= max(trained) > sum(trained) // 64


def test_zero_steps_on_one_tensor_and_holds_no_other_parameters_temporaries() -> None:
    # The loop over parameters still has the last one's result when it computes the next one's; one flat tensor has no last one.
    trained = sum(parameter.size for parameter in read(_trace("loop")).trainable)
    for sharding in ("zero1", "zero2", "zero3"):
        assert _of(_sharded("loop", sharding, 2), "zero:step") == [trained // 2 * 2] * 2


def test_zero3_gives_back_at_once_what_backward_does_not_reach() -> None:
    def at_the_end_of_forward(name: str) -> int:
        new = _sharded(name, "zero3")
        live = 0
        for event, place in zip(new.events, new.event_places, strict=True):
            if new.places[place].phase == "backward":
                break
            number = event if event >= 0 else ~event
            if new.births[number].operator == "zero:gather":
                live += new.births[number].size if event >= 0 else -new.births[number].size
        return live

    parameters = [each for each in read(_trace("frozen first layers")).parameters if each.elements > 10 * 64]
    assert at_the_end_of_forward("full") == sum(each.size for each in parameters)
    assert at_the_end_of_forward("frozen first layers") == sum(each.size for each in parameters if each.stage > 2)


def _packed(splits_packed: bool) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes of what is kept in bytes, before and after FSDP2."""
    before = {each.number: each.size for each in read(_trace("qlora")).parameters if each.item_bytes == 1}
    new, sources = shard(_trace("qlora"), Parallel("fsdp", 4, splits_packed=splits_packed))
    return before, {source: birth.size for birth, source in zip(new.births, sources, strict=True) if source in before}


def test_fsdp_leaves_quantised_bytes_whole() -> None:
    before, after = _packed(splits_packed=False)
    assert before
    assert after == before


def test_fsdp_splits_packed_weights_that_are_stored_as_floats_but_not_their_scales() -> None:
    before, after = _packed(splits_packed=True)
    whole = {number for number, size in after.items() if size == before[number]}
    assert len(whole) == len(before) // 2
    assert all(after[number] * 4 == before[number] for number in set(before) - whole)
    assert sum(before[number] for number in whole) * 32 == sum(before[number] for number in set(before) - whole)


@pytest.mark.parametrize("sharding", SPLITTING)
@pytest.mark.parametrize("name", ["full", "bf16", "accumulated"])
def test_offload_lowers_what_the_device_holds(name: str, sharding: str) -> None:
    peaks = [_peak(_sharded(name, sharding, offload=offload)) for offload in ("none", "optimizer", "parameters")]
    assert peaks[0] > peaks[1] >= peaks[2]
    assert not [birth for birth in _sharded(name, sharding, offload="optimizer").births if birth.kind == "optimizer"]


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_one_rank_is_one_device_and_stated_buffers(sharding: str) -> None:
    new = _sharded("full", sharding, 1)
    parameters = _bytes(_trace("full"), "parameters")
    assert _peak(_trace("full")) - parameters <= _peak(new) <= _peak(_trace("full")) + 3 * parameters
    assert not [birth for birth in new.births if birth.operator in {"fsdp:gather", "zero:gather"}]


def test_zero3_gathers_less_where_it_may_hold_less() -> None:
    roomy, tight = (_sharded("full", "zero3", 2, live_elements=elements, reuse_elements=elements) for elements in (10**9, 10**4))
    assert _peak(tight) < _peak(roomy)


def test_whole_gradients_wait_for_the_last_micro_batch_unless_each_is_synchronised() -> None:
    waiting, each = (_sharded("accumulated", "fsdp", 8, synchronise_each=flag) for flag in (False, True))
    assert _peak(waiting) > _peak(each)


def test_a_trace_can_be_made_deep_before_it_is_sharded() -> None:
    deep = trace_step(Setup(config={**LLAMA, "num_hidden_layers": 7}, task="causal-lm", micro_batch=2, length=16), GPU).trace
    for sharding in ALL:
        from_shallow = shard(deepen(_trace("full"), 1, 3), Parallel(sharding, 2, hidden=64))[0]  # type: ignore[arg-type]
        whole = shard(deep, Parallel(sharding, 2, hidden=64))[0]  # type: ignore[arg-type]
        assert [birth.size for birth in from_shallow.births] == [birth.size for birth in whole.births]


def test_a_trace_is_sharded_without_torch() -> None:
    code = "import sys, brim.memory.sharding, brim.memory.sharding.fsdp, brim.memory.sharding.zero; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp, short", "fsdp, short"])
def test_two_real_processes_hold_what_was_predicted(name: str) -> None:
    pytest.importorskip("torch.distributed")
    finished = subprocess.run([sys.executable, str(BENCHMARK), name, "--json"], capture_output=True, text=True, timeout=280)
    (result,) = json.loads(finished.stdout)
    assert abs(result["error_percent"]) < 1.0, result
