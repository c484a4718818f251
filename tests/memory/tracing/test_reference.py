"""A step that is traced without memory holds what the same step holds when it really runs on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from brim.errors import UsageError
from brim.memory.peaks import Walk, walk_plain
from brim.memory.setup import Setup, Target
from brim.memory.tracing.measured import measure_step
from brim.memory.tracing.reference import trace_step

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500, "intermediate_size": 96}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "pad_token_id": 0, **SIZES}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 128}
BERT = {"model_type": "bert", **SIZES}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, **SIZES}
T5 = {
    "model_type": "t5", "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2,
    "vocab_size": 500, "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 500, "max_position_embeddings": 128,
    "eos_token_id": 2,
}  # fmt: skip
SHORT = {"micro_batch": 1, "length": 8}

CASES: dict[str, dict[str, Any]] = {
    "Llama, padded": {"config": LLAMA},
    "Llama, unpadded": {"config": LLAMA, "padded": False},
    "Llama, checkpointed, accumulated": {"config": LLAMA, "checkpointing": "full", "accumulation": 2, "micro_batch": 8},
    "Llama, LoRA in bfloat16": {"config": LLAMA, "method": "lora", "precision": "bf16"},
    "Llama, LoRA with dropout": {"config": LLAMA, "method": "lora", "lora_dropout": 0.1, "lora_targets": ("all-linear",)},
    "Llama, the first layer and the embeddings frozen": {"config": LLAMA, "freeze": ("embed", r"layers\.0\.")},
    "Llama, loss in chunks": {"config": LLAMA, "loss": "chunked", "micro_batch": 6},
    "GPT-2, every second layer checkpointed": {"config": GPT2, "checkpointing": "every:2"},
    "GPT-2, eager, bfloat16": {"config": GPT2, "attention": "eager", "precision": "bf16"},
    "BERT, dropout in attention": {"config": BERT, "task": "classification"},
    "BERT, dropout in attention, bfloat16": {"config": BERT, "task": "classification", "precision": "bf16"},
    "Mixtral": {"config": MIXTRAL},
    "T5, frozen encoder": {"config": T5, "task": "seq2seq", "target_length": 32, "freeze": ("encoder",)},
    "BART, whose decoder is not padded though its encoder is": {"config": BART, "task": "seq2seq", "target_length": 32},
    "BART, one embedding used three times": {"config": BART, "task": "seq2seq", "optimizer": "sgd", **SHORT},
    "BART, classification": {"config": BART, "task": "classification"},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def setup(**settings: Any) -> Setup:
    return Setup(**{"config": LLAMA, "task": "causal-lm", "micro_batch": 4, "length": 64, **settings})


def predicted(**settings: Any) -> Walk:
    return walk_plain(trace_step(setup(**settings), Target("cpu")).trace)


def error_percent(**settings: Any) -> float:
    return 100 * (predicted(**settings).peak_bytes() / measure_step(setup(**settings)).peak_bytes - 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_predicted_peak_is_the_peak_of_the_real_step(case: dict[str, Any]) -> None:
    # Not counted: tensors of one number, and 5 KB of random state for each checkpoint. In bfloat16 the CPU's layer norm keeps its means in
    # bfloat16, the trace in float32.
    is_exact = "checkpointing" not in case and "loss" not in case and "precision" not in case
    assert abs(error_percent(**case)) < (0.02 if is_exact else 0.2)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-loop", "adamw-fused", "adafactor", "sgd", "sgd-momentum", "lion"])
def test_each_optimizer_holds_what_the_real_one_holds(optimizer: str) -> None:
    assert abs(error_percent(optimizer=optimizer, **SHORT)) < 0.02


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_optimizers_of_half_precision_weights_hold_what_the_real_ones_hold(optimizer: str) -> None:
    assert abs(error_percent(optimizer=optimizer, precision="bf16", **SHORT)) < 0.02


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["Llama", "GPT-2"])
def test_a_step_of_evaluation_holds_what_the_real_one_holds(config: dict[str, Any]) -> None:
    settings = {"config": config, "micro_batch": 1, "evaluation_batch": 8}
    measured = measure_step(setup(**settings)).peak_bytes
    assert abs(predicted(**settings).by_phase()["evaluation"] / measured - 1) < 0.0002


def test_a_loss_in_chunks_never_holds_the_logits_of_all_tokens() -> None:
    whole, chunked = (predicted(loss=loss, micro_batch=16) for loss in ("standard", "chunked"))
    assert whole.by_kind(whole.peak_event())["logits"] >= 2 * 16 * 63 * 500 * 4
    assert 0 < chunked.by_kind(chunked.peak_event())["logits"] <= 4 * 256 * 500 * 4, (
        "logits, their logarithms and gradients: of 256 tokens"
    )
    assert chunked.peak_bytes() < whole.peak_bytes()


def test_the_kinds_add_up_to_the_live_total_at_the_peak() -> None:
    peaks = predicted(length=96)
    kinds = peaks.by_kind(peaks.peak_event())
    assert sum(kinds.values()) == peaks.peak_bytes()
    assert set(kinds) <= {"parameters", "gradients", "optimizer", "activations", "logits", "temporary", "buffers"}


def test_kinds_are_what_their_names_say() -> None:
    trace = trace_step(setup(length=96), Target("cpu")).trace
    kinds = trace.alive_at_peak({"backward"})
    parameters = kinds["parameters"]
    assert kinds["optimizer"] == 2 * parameters
    assert kinds["logits"] % (4 * 500) == 0
    assert kinds["logits"] >= 2 * 4 * 96 * 500 * 4, "logits and their gradient, four sequences of 96 tokens"
    assert kinds["activations"] > kinds["temporary"]
    assert trace.alive_at_peak({"optimizer"})["gradients"] == parameters
    assert trace.alive_at_peak({"optimizer"})["activations"] == 0


def test_checkpointing_trades_activations_for_time() -> None:
    plain, checkpointed = (
        trace_step(setup(checkpointing=word, length=96), Target("cpu")).trace.alive_at_peak({"forward"})["activations"]
        for word in ("none", "full")
    )
    assert checkpointed < plain / 3


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    grown=st.sampled_from(["micro_batch", "length", "lora_rank", "layers"]),
    start=st.integers(1, 40),
    more=st.integers(1, 40),
    padded=st.booleans(),
    method=st.sampled_from(["full", "lora"]),
    checkpointing=st.sampled_from(["none", "full"]),
)
def test_live_bytes_never_fall_when_the_work_grows(
    grown: str, start: int, more: int, padded: bool, method: str, checkpointing: str
) -> None:
    def peak(amount: int) -> int:
        arguments: dict[str, Any] = {"micro_batch": 2, "length": 24, "padded": padded, "checkpointing": checkpointing}
        arguments["method"] = "lora" if grown == "lora_rank" else method
        if grown == "layers":
            arguments["config"] = {**LLAMA, "num_hidden_layers": 1 + amount // 16}
        else:
            arguments[grown] = amount
        return predicted(**arguments).peak_bytes()

    assert peak(start) <= peak(start + more)


def test_a_step_in_which_nothing_trains_is_refused() -> None:
    with pytest.raises(UsageError, match="every parameter is frozen"):
        predicted(freeze=(".",))
