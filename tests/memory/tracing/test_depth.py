"""Four layers stand for a deep model only where they really do: whatever tells layers apart is found out."""

from __future__ import annotations

from typing import Any

import pytest

from brim.memory.setup import Setup, Target
from brim.memory.tracing.depth import shallow, trace_deep
from brim.memory.tracing.reference import trace_step

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300, "first_k_dense_replace": 3, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
CUDA = Target("cuda", (8, 0))


def setup(config: dict[str, Any] = LLAMA, **changes: Any) -> Setup:
    return Setup(**{"config": config, "task": "causal-lm", "micro_batch": 2, "length": 64, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"config": DEEPSEEK},
        {"checkpointing": "every:3"},
        {"checkpointing": "every:4"},
        {"method": "lora", "lora_targets": ("layers.3.self_attn.q_proj",)},
        {"freeze": ("layers.[0-4]",)},
    ],
    ids=["dense-first", "every:3", "every:4", "one-adapter", "some-frozen"],
)
def test_layers_that_differ_are_traced_whole(changes: dict[str, Any]) -> None:
    asked = setup(**changes)
    assert shallow(asked)[0] == asked
    deep, whole = trace_deep(asked, CUDA), trace_step(asked, CUDA)
    assert deep.trace.events == whole.trace.events
    assert deep.total_parameters == whole.total_parameters


def test_layers_that_are_alike_are_cut() -> None:
    assert shallow(setup())[0].config["num_hidden_layers"] == 4
    assert shallow(setup(checkpointing="every:1"))[1] == (3,)
