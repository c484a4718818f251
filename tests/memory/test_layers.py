"""Four layers traced and repeated are the deep model's own stream of births and deaths, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brim.memory.layers import NotRepeatedError, deepen
from brim.memory.setup import Setup, Target
from brim.memory.stream import Trace
from brim.memory.tracing.depth import shallow, trace_deep
from brim.memory.tracing.losses import TRACED_CHUNKS
from brim.memory.tracing.reference import trace_step, trace_unrepeated
from brim.memory.tracing.trace import Tracer

COMMON = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 211}
LLAMA = {"model_type": "llama", "intermediate_size": 96, "num_key_value_heads": 2, **COMMON}
QWEN3 = {"model_type": "qwen3", "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, **COMMON}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "vocab_size": 211, "n_positions": 64}
BERT = {"model_type": "bert", "intermediate_size": 96, **COMMON}
MIXTRAL = {
    "model_type": "mixtral",
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    **COMMON,
}
T5 = {"model_type": "t5", "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "vocab_size": 211, "decoder_start_token_id": 0}
GPU = Target("cuda", (8, 0))
CPU = Target("cpu", threads=2)

CASES: list[Any] = [
    pytest.param(LLAMA, GPU, {}, id="llama"),
    pytest.param(LLAMA, CPU, {"checkpointing": "full"}, id="llama, checkpointed, CPU"),
    pytest.param(LLAMA, GPU, {"accumulation": 4, "precision": "bf16"}, id="llama, accumulated, bf16"),
    pytest.param(QWEN3, GPU, {"method": "lora", "lora_targets": ("q_proj", "v_proj")}, id="qwen3, LoRA"),
    pytest.param(GPT2, CPU, {"padded": False}, id="gpt2, unpadded, CPU"),
    pytest.param(GPT2, GPU, {"optimizer": "sgd-momentum"}, id="gpt2, SGD"),
    pytest.param(BERT, GPU, {"task": "classification", "optimizer": "adamw-fused"}, id="bert classifier, fused"),
    pytest.param(MIXTRAL, GPU, {"checkpointing": "full"}, id="mixtral, checkpointed"),
]


def _signature(trace: Trace) -> list[tuple[object, ...]]:
    births = trace.births
    return [
        ("born", births[event].size, births[event].operator, births[event].kind) if event >= 0 else ("died", births[~event].size)
        for event in trace.events
    ]


def _setup(config: dict[str, Any], depth: int, **settings: Any) -> Setup:
    key = "n_layer" if "n_layer" in config or "n_embd" in config else "num_hidden_layers"
    return Setup(config={**config, key: depth}, micro_batch=2, length=32, **{"task": "causal-lm", **settings})


@pytest.mark.parametrize(("config", "target", "settings"), CASES)
def test_a_deepened_trace_is_the_deep_models_own(config: dict[str, Any], target: Target, settings: dict[str, Any]) -> None:
    four = trace_step(_setup(config, 4, **settings), target).trace
    nine = trace_step(_setup(config, 9, **settings), target).trace
    deep = deepen(four, template=1, extra=5)
    assert deep.events == nine.events
    assert _signature(deep) == _signature(nine)


def test_no_extra_layer_changes_nothing() -> None:
    trace = trace_step(_setup(LLAMA, 4), GPU).trace
    assert _signature(deepen(trace, template=1, extra=0)) == _signature(trace)


def test_an_encoder_and_a_decoder_are_deepened_each() -> None:
    config = {**T5, "num_layers": 7, "num_decoder_layers": 6}
    setup = Setup(config=config, task="seq2seq", micro_batch=2, length=32, target_length=16)
    assert _signature(trace_deep(setup, GPU).trace) == _signature(trace_step(setup, GPU).trace)


def test_a_deep_model_is_traced_by_four_of_its_layers() -> None:
    setup = _setup(LLAMA, 12)
    reduced, stacks = shallow(setup)
    assert (reduced.config["num_hidden_layers"], stacks) == (4, (8,))
    deep = trace_deep(setup, GPU)
    whole = trace_step(setup, GPU)
    assert _signature(deep.trace) == _signature(whole.trace)
    assert (deep.total_parameters, deep.trainable_parameters, deep.layers) == (
        whole.total_parameters,
        whole.trainable_parameters,
        12,
    )


def test_layers_that_differ_are_not_repeated() -> None:
    """Checkpointing every other layer: neighbours do not do the same, and the model is traced whole."""
    setup = _setup(LLAMA, 8, checkpointing="every:2")
    with pytest.raises(NotRepeatedError):
        deepen(trace_step(_setup(LLAMA, 4, checkpointing="every:2"), CPU).trace, template=1, extra=4)
    assert _signature(trace_deep(setup, CPU).trace) == _signature(trace_step(setup, CPU).trace)


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        pytest.param(GPU, {}, id="full"),
        pytest.param(
            GPU, {"accumulation": 4, "precision": "amp-fp16", "checkpointing": "full"}, id="accumulated, amp, checkpointed"
        ),
        pytest.param(GPU, {"method": "lora", "precision": "bf16", "padded": False}, id="LoRA, bf16"),
        pytest.param(CPU, {"evaluation_batch": 20}, id="CPU, evaluated"),
    ],
)
def test_a_loss_of_many_chunks_is_traced_by_five_of_them(target: Target, settings: dict[str, Any]) -> None:
    setup = replace(_setup(LLAMA, 3, loss="chunked", **settings), micro_batch=20, length=100)
    few, whole = trace_step(setup, target).trace, trace_unrepeated(setup, target).trace
    assert _signature(few) == _signature(whole)
    assert few.events == whole.events
    assert [few.places[place] for place in few.event_places] == [
        whole.places[place]._replace(chunk=None) for place in whole.event_places
    ]
    assert sorted(call[2:] for call in few.calls) == sorted(call[2:] for call in whole.calls)


def test_a_chunked_loss_runs_as_few_chunks_however_many_tokens_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them twice: in forward, and again in backward; in two steps."""
    begun: list[int] = []
    enter = Tracer.enter_chunk

    def enter_and_count(tracer: Tracer, chunk: int) -> None:
        begun.append(chunk)
        enter(tracer, chunk)

    monkeypatch.setattr(Tracer, "enter_chunk", enter_and_count)
    trace_step(replace(_setup(LLAMA, 3, loss="chunked"), micro_batch=200, length=256), GPU)
    assert len(begun) == 2 * 2 * TRACED_CHUNKS
