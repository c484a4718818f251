"""A model, data and a collator that are small enough for many whole runs, and ragged enough to show what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

Features = dict[str, list[int]]
Batch = dict[str, torch.Tensor]

IGNORED = -100
VOCABULARY = 128


def model(dropout: float = 0.0, seed: int = 1, **config: Any) -> Any:
    """A Llama of two layers with grouped heads. `seed` is for its weights; dropout draws from where torch then stands."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "attention_dropout": dropout, "use_cache": False, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **config}))  # type: ignore[no-untyped-call]


def adamw(module: torch.nn.Module) -> torch.optim.AdamW:
    """The optimizer of all runs that are compared with each other."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def data(n: int = 160, seed: int = 0, longest: int = 60, vocabulary: int = VOCABULARY) -> list[Features]:
    """Sequences of 4 to `longest` tokens, each with a prompt whose labels are masked: supervised tokens vary more than tokens do."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        drawn: list[int] = torch.randint(low, high, (count,), generator=generator).tolist()
        return drawn

    result = []
    for length in draw(4, longest + 1, n):
        ids = draw(1, vocabulary, length)
        prompt = draw(1, length - 1)[0]
        result.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return result


def collate(features: Sequence[Features]) -> Batch:
    """Pad on the right; the mask says where, and labels of padding are ignored."""
    longest = max(len(one["input_ids"]) for one in features)

    def matrix(rows: list[list[int]], padding: int) -> torch.Tensor:
        return torch.tensor([row + [padding] * (longest - len(row)) for row in rows])

    return {
        "input_ids": matrix([one["input_ids"] for one in features], 0),
        "attention_mask": matrix([[1] * len(one["input_ids"]) for one in features], 0),
        "labels": matrix([one["labels"] for one in features], IGNORED),
    }
