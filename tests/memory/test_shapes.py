"""Four small traces give the trace of any other batch and length, size by size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brim.memory.setup import Setup, Target
from brim.memory.shapes import NotAProductError, ShapedTrace, fit
from brim.memory.stream import Trace
from brim.memory.tracing.reference import trace_step

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 211,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 211, "n_positions": 2048}

CASES: list[Any] = [
    pytest.param(LLAMA, Target("cuda", (8, 0)), {"precision": "bf16"}, id="llama, efficient attention"),
    pytest.param(
        LLAMA, Target("cuda", (8, 0)), {"precision": "bf16", "padded": False, "checkpointing": "full"}, id="llama, flash"
    ),
    pytest.param(LLAMA, Target("cuda", (7, 5)), {"precision": "fp16", "padded": False}, id="llama on a T4: math"),
    pytest.param(GPT2, Target("cpu"), {"attention": "eager"}, id="gpt2, eager, CPU"),
]


def _fitted(setup: Setup, target: Target) -> ShapedTrace:
    def trace(batch: int, length: int) -> Trace:
        return trace_step(replace(setup, micro_batch=batch, length=length), target).trace

    return fit(trace, (128, 256))


@pytest.mark.parametrize(("config", "target", "settings"), CASES)
def test_another_shape_is_predicted_size_by_size(config: dict[str, Any], target: Target, settings: dict[str, Any]) -> None:
    setup = Setup(config=config, task="causal-lm", micro_batch=1, length=1, **settings)
    shaped = _fitted(setup, target)
    for batch, length in ((5, 384), (7, 1024)):
        whole = trace_step(replace(setup, micro_batch=batch, length=length), target).trace
        predicted = shaped.at(batch, length)
        assert predicted.events == whole.events
        assert [birth.size for birth in predicted.births] == [birth.size for birth in whole.births]
        assert shaped.live_peak_bytes(batch, length) == max(whole.peaks().values())


def test_shapes_and_depth_go_together() -> None:
    """Four layers at four small shapes give nine layers at another."""
    setup = Setup(
        config={**LLAMA, "num_hidden_layers": 4},
        task="causal-lm",
        micro_batch=1,
        length=1,
        precision="bf16",
        checkpointing="full",
    )
    target = Target("cuda", (8, 0))
    shaped = _fitted(setup, target).deepened(template=1, extra=5)
    deep = replace(setup, config={**LLAMA, "num_hidden_layers": 9}, micro_batch=5, length=384)
    whole = trace_step(deep, target).trace
    predicted = shaped.at(5, 384)
    assert predicted.events == whole.events
    assert [birth.size for birth in predicted.births] == [birth.size for birth in whole.births]


def test_a_structure_that_changes_with_the_shape_is_not_fitted() -> None:
    """A sliding window that is shorter than the longer trace: a mask appears."""
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 200}
    setup = Setup(config=config, task="causal-lm", micro_batch=1, length=1, padded=False)
    with pytest.raises(NotAProductError):
        _fitted(setup, Target("cuda", (8, 0)))
