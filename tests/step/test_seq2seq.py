"""A model that reads one sequence and writes another is sliced by both lengths, in a loop of one's own too."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import brim


def rows(count: int) -> list[dict[str, list[int]]]:
    draw = np.random.default_rng(0)
    return [
        {
            "input_ids": draw.integers(1, 50, draw.integers(3, 20)).tolist(),
            "labels": draw.integers(1, 50, draw.integers(2, 12)).tolist(),
        }
        for _row in range(count)
    ]


def collate(features: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def matrix(name: str, padding: int) -> torch.Tensor:
        longest = max(len(feature[name]) for feature in features)
        return torch.tensor([feature[name] + [padding] * (longest - len(feature[name])) for feature in features])

    ids = matrix("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": matrix("labels", -100)}


def test_the_steps_are_the_same_whatever_the_slices() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    others: dict[str, Any] = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
    fresh: Any = T5ForConditionalGeneration(T5Config(**sizes, **others))
    found = []
    for budget in (brim.Budget.tokens(60), brim.Budget.sequences(40)):
        model = copy.deepcopy(fresh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        entries = [
            step.run() for step in brim.steps(rows(40), model, optimizer, effective_batch=16, budget=budget, collate=collate)
        ]
        found.append(entries)
    few, many = found[1], found[0]
    assert max(one.sequences * ((one.length or 0) + one.target_length) for entry in many for one in entry.slices) <= 60
    assert all(len(cut.slices) > len(whole.slices) for cut, whole in zip(many, few, strict=True))
    for cut, whole in zip(many, few, strict=True):
        assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
        assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
