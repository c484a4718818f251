"""Qwen's own finetune.py on one A100 (QwenLM/Qwen, README, "Profiling of Memory and Speed")."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from brim.memory.setup import Setup, Target

from .case import Case, Change, OutOfScopeError, Row, in_order, set_dropout

READ = (
    "Qwen-1 is not in transformers: a Phi-3 of the same sizes stands for it (fused qkv and gate/up); adapters in float32 (peft 0.5 moved"
    " them to the base's device only); Trainer's bf16 autocast, flash attention 2, accumulation; bfloat16 logits copied for the loss"
    " (modeling_qwen.py), then made float32 by accelerate; torch 2.0, as it says (a mean keeps its input, AdamW takes a second copy);"
    " metric unstated"
)
UNIT_BYTES = 10**9
"""The README says "we profile the memory (GB)". It cannot mean GiB: 162.0 on two A100-80G (full, 1024 tokens) would be 81.0 GiB each, and
such a card has 80."""
CONFIG: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
}


def case_of(row: Row) -> tuple[Case, float]:
    """A row as an estimate."""
    if row["method"] not in {"LoRA", "LoRA+emb"}:
        raise OutOfScopeError(f"method {row['method']}")
    setup = Setup(
        config=CONFIG,
        task="causal-lm",
        micro_batch=1,
        length=int(row["seq_len"]),
        padded=False,
        accumulation=8,
        method="lora",
        lora_rank=64,
        lora_targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        precision="amp-bf16",
        checkpointing="full",
    )
    changes: list[Change] = [train_embeddings] if row["method"] == "LoRA+emb" else []
    changes.append(partial(set_dropout, 0.05))
    case = Case(
        setup,
        Target("cuda", (8, 0)),
        "unknown",
        loss="shifted",
        upcasts_logits=False,
        converts_logits=True,
        old_torch="2.0",
        change=in_order(*changes),
        card="a100-80gb",
    )
    return case, float(row["peak_gb"]) * UNIT_BYTES


def train_embeddings(model: Any) -> None:
    """`modules_to_save`: a trainable copy beside the frozen original."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.register_parameter("original", nn.Parameter(torch.empty_like(module.weight), requires_grad=False))
        module.weight.requires_grad_(True)
