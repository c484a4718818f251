"""A family that was traced at a few small shapes knows every other shape, event by event and size by size."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from brim.memory.family import Family, family_of, family_or_none, length_class, trace_family
from brim.memory.setup import Setup, Target
from brim.memory.stream import Trace
from brim.memory.tracing.depth import trace_deep

GPU = Target("cuda", (8, 0))
CPU = Target("cpu", threads=2)
COMMON = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 211, "num_hidden_layers": 6, "intermediate_size": 96}
GROUPED = {**COMMON, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **GROUPED}
WINDOWED = {**GROUPED, "head_dim": 16, "sliding_window": 512, "layer_types": ["sliding_attention"] * 6}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 6, "vocab_size": 211, "n_positions": 4096}
T5 = {
    "model_type": "t5", "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "vocab_size": 211, "decoder_start_token_id": 0,
    "num_layers": 6, "num_decoder_layers": 5,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 64, "vocab_size": 211, "encoder_layers": 6, "decoder_layers": 3, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3 = {"model_type": "qwen3", **GROUPED, "head_dim": 16}

SLOW = pytest.mark.slow
CASES: list[Any] = [
    pytest.param(LLAMA, GPU, {"precision": "bf16"}, id="llama"),
    pytest.param(LLAMA, GPU, {"precision": "bf16", "padded": False, "checkpointing": "full"}, id="llama, flash, checkpointed", marks=SLOW),
    pytest.param(LLAMA, GPU, {"precision": "amp-bf16", "accumulation": 4}, id="llama, autocast, accumulated", marks=SLOW),
    pytest.param(LLAMA, GPU, {"precision": "bf16", "optimizer": "adamw-8bit", "method": "qlora"}, id="llama, QLoRA"),
    pytest.param(LLAMA, GPU, {"task": "classification", "optimizer": "adafactor"}, id="llama classifier, Adafactor", marks=SLOW),
    pytest.param(LLAMA, GPU, {"evaluation_batch": 3}, id="llama, evaluated", marks=SLOW),
    pytest.param(LLAMA, CPU, {"optimizer": "sgd"}, id="llama on the CPU"),
    pytest.param(QWEN3, GPU, {"method": "lora", "lora_targets": ("q_proj",), "checkpointing": "full"}, id="qwen3, LoRA", marks=SLOW),
    pytest.param({"model_type": "gemma2", **WINDOWED}, GPU, {"attention": "eager"}, id="gemma2"),
    pytest.param({"model_type": "gemma3_text", **WINDOWED}, GPU, {"padded": False, "precision": "bf16"}, id="gemma3", marks=SLOW),
    pytest.param({"model_type": "phi3", **GROUPED, "pad_token_id": 0}, GPU, {"precision": "bf16"}, id="phi3"),
    pytest.param(GPT2, GPU, {"optimizer": "sgd-momentum"}, id="gpt2"),
    pytest.param(
        {"model_type": "opt", **COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 4096}, GPU, {}, id="opt", marks=SLOW
    ),
    pytest.param({"model_type": "bloom", "hidden_size": 64, "n_layer": 6, "n_head": 4, "vocab_size": 211}, GPU, {"attention": "eager"}, id="bloom", marks=SLOW),
    pytest.param({"model_type": "falcon", **COMMON}, GPU, {"precision": "bf16"}, id="falcon", marks=SLOW),
    pytest.param(MIXTRAL, GPU, {"precision": "bf16"}, id="mixtral", marks=SLOW),
    pytest.param(T5, GPU, {"task": "seq2seq"}, id="t5", marks=SLOW),
    pytest.param(T5, GPU, {"task": "seq2seq", "target_length": 64, "checkpointing": "full"}, id="t5, short targets", marks=SLOW),
    pytest.param(BART, GPU, {"task": "seq2seq"}, id="bart", marks=SLOW),
    pytest.param({"model_type": "bert", **COMMON, "max_position_embeddings": 4096}, GPU, {"task": "classification"}, id="bert", marks=SLOW),
]  # fmt: skip


def _setup(config: dict[str, Any], settings: dict[str, Any], batch: int = 2, length: int = 384) -> Setup:
    return Setup(config=config, micro_batch=batch, length=length, **{"task": "causal-lm", **settings})


def _rows(trace: Trace) -> list[tuple[object, ...]]:
    places = trace.places
    return [(birth.size, birth.operator, birth.kind, places[birth.place]) for birth in trace.births]


@pytest.mark.parametrize(("config", "target", "settings"), CASES)
def test_a_family_knows_shapes_that_were_not_traced(config: dict[str, Any], target: Target, settings: dict[str, Any]) -> None:
    families: dict[Any, Family | None] = {}
    for batch, length in ((1, 896), (2, 1152), (5, 1920), (5, 384 if target is GPU else 1024)):
        setup = _setup(config, settings, batch, length)
        name = repr(family_of(setup, target))
        if name not in families:
            families[name] = family_or_none(setup, target)
        family = families[name]
        assert family is not None
        expected = trace_deep(setup, target)
        found = family.at(batch, length)
        assert found.events == expected.trace.events
        assert _rows(found) == _rows(expected.trace)
        facts = family.facts
        assert (facts.total_parameters, facts.trainable_parameters) == (expected.total_parameters, expected.trainable_parameters)
        assert (frozenset(facts.kernels), facts.layers) == (expected.kernels, expected.layers)


def test_a_family_survives_a_file() -> None:
    family = trace_family(_setup(LLAMA, {"precision": "bf16"}), GPU)
    stream = io.BytesIO()
    arrays: dict[str, Any] = family.to_arrays()
    np.savez(stream, **arrays)
    stream.seek(0)
    again = Family.from_arrays(np.load(stream, allow_pickle=False))
    assert (again.inserted, again.above, again.up_to, again.facts) == (
        family.inserted, family.above, family.up_to, family.facts,
    )  # fmt: skip
    assert again.at(7, 1024) == family.at(7, 1024)
    assert again.requests(7, 1024) == family.requests(7, 1024)


def test_a_family_is_read_without_torch() -> None:
    check = "import brim.memory.family, brim.memory.shapes, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_window_divides_lengths_into_families() -> None:
    config = {"model_type": "mistral", **GROUPED, "sliding_window": 500}
    assert [length_class(config, GPU, length) for length in (384, 500, 512)] == [(0, 499), (499, 500), (500, float("inf"))]
    setup = _setup(config, {"padded": False, "precision": "bf16"})
    short, long = trace_family(setup, GPU), trace_family(replace(setup, length=512), GPU)
    assert [short.covers(2, length) for length in (384, 512, 1024)] == [True, False, False]
    assert [long.covers(2, length) for length in (384, 512, 1024)] == [False, True, True]
    assert short.facts.kernels != long.facts.kernels


def test_shapes_of_one_family_have_one_name() -> None:
    assert length_class({"n_positions": 1024}, GPU, 1024) == (0, 1024)
    named = {family_of(_setup(LLAMA, {}, batch, length), GPU).length for batch in (2, 3, 9) for length in (128, 1024, 4096)}
    assert named == {128}
    assert family_of(_setup(LLAMA, {}, 1, 256), GPU).micro_batch == 1
    odd = _setup(LLAMA, {}, 4, 300)
    assert family_of(odd, GPU) == odd


def test_what_changes_with_the_shape_has_no_family() -> None:
    """The chunked loss has as many chunks as it has tokens."""
    assert family_or_none(_setup(LLAMA, {"loss": "chunked"}), GPU) is None
    assert family_or_none(_setup(LLAMA, {}, length=300), GPU) is None


def test_layers_that_differ_are_traced_all() -> None:
    """Every third layer sees everything, the others a window: at lengths beyond it they do not run the same kernels."""
    config = {"model_type": "gemma3_text", **GROUPED, "head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 3}
    kinds = ["full_attention" if (layer + 1) % 3 == 0 else "sliding_attention" for layer in range(6)]
    setup = _setup({**config, "layer_types": kinds}, {"padded": False, "precision": "bf16"}, 2, 256)
    family = family_or_none(setup, GPU)
    assert family is not None
    assert family.inserted == ()
    assert family.facts.kernels == ("efficient", "flash") or family.facts.kernels == ("flash", "math")


def test_freezing_some_layers_makes_them_differ() -> None:
    setup = _setup(LLAMA, {"freeze": (r"layers\.[0-4]\.",)})
    assert trace_family(setup, GPU).inserted == ()
    assert trace_family(_setup(LLAMA, {"freeze": ("mlp",)}), GPU).inserted == ((1, 2),)
