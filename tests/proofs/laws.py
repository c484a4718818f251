"""The five laws in plain torch, without brim: how far a model is from each, so that seeded faults are known to be real."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.proofs.fault_decoder import VOCABULARY, shifted_losses

LENGTH = 16


def ids(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))


def names(model: nn.Module) -> set[str]:
    """The arguments of `forward`; `**` if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {"**" if one.kind is one.VAR_KEYWORD else one.name for one in parameters}


def logits(model: nn.Module, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(model(input_ids, **_without_cache(model), **inputs))


def logits_of(out: Any) -> torch.Tensor:
    if isinstance(out, tuple):
        out = {"logits": next(part for part in reversed(out) if part is not None)}
    found: torch.Tensor = out if isinstance(out, torch.Tensor) else out["logits"]
    return found


def _without_cache(model: nn.Module) -> dict[str, bool]:
    """Library models look for documents in the positions only if no cache is asked for."""
    return {"use_cache": False} if {"use_cache", "**"} & names(model) and isinstance(model, PreTrainedModel) else {}


@contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """BatchNorm as in training, and all else, above all dropout, as in evaluation."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.train()
    try:
        yield
    finally:
        model.eval()
        model.zero_grad()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; infinite if they are not of one shape."""
    return (one - other).abs().max().item() if one.shape == other.shape else math.inf


def causality(model: nn.Module) -> float:
    """How far new words at the end move the logits before them, in a batch of one."""
    first = ids(1)
    other = first.clone()
    other[:, LENGTH // 2 :] = (other[:, LENGTH // 2 :] + 17) % VOCABULARY
    before = [logits(model, one).reshape(1, LENGTH, -1)[:, : LENGTH // 2] for one in (first, other)]
    return apart(*before)


def batch(model: nn.Module, rows: int = 3) -> float:
    """How far a row in a batch is from the same row alone; infinite if one of them does not run."""
    together = ids(rows)
    with as_trained(model):
        try:
            found = logits(model, together)
            return apart(found, torch.cat([logits(model, row[None]).reshape(1, LENGTH, -1) for row in together]))
        except (RuntimeError, ValueError):
            return math.inf


def pad(model: nn.Module) -> float:
    """How far four pads on the left, or on the right, move the logits of the words."""
    words = ids(2)
    pads = torch.zeros(2, 4, dtype=torch.long)
    worst = 0.0
    for left in (True, False):
        padded = torch.cat([pads, words] if left else [words, pads], 1)
        seen = torch.cat([pads, torch.ones_like(words)] if left else [torch.ones_like(words), pads], 1)
        inputs = {"attention_mask": seen}
        if "position_ids" in names(model):
            inputs["position_ids"] = (seen.cumsum(1) - 1).clamp(min=0)
        found = logits(model, padded, **inputs)
        worst = max(worst, apart(found[:, 4:] if left else found[:, :-4], logits(model, words)))
    return worst


def pack(model: nn.Module) -> float:
    """How far two documents in one row are from the same alone."""
    first, second = ids(1, 9), ids(1, 7)
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    alone = torch.cat([logits(model, first), logits(model, second)], 1)
    return apart(logits(model, torch.cat([first, second], 1), position_ids=positions), alone)


def accumulation(model: nn.Module, slices: int = 4) -> tuple[float, float]:
    """The gradient of one row at a time, as the Trainer sums it, against that of the mean over all tokens: cosine, and ratio of norms."""
    rows = ids(slices)
    labels = rows.clone()
    for row in range(slices):
        labels[row, : 3 * row] = -100
    with as_trained(model):
        losses, _ = shifted_losses(logits_of(model(rows)), labels)
        right = _gradient(model, [losses.sum() / (labels[:, 1:] != -100).sum()])
        found = _gradient(model, [_slice_loss(model, rows, labels, row) for row in range(slices)])
    return nn.functional.cosine_similarity(found, right, dim=0).item(), (found.norm() / right.norm()).item()


def _slice_loss(model: nn.Module, rows: torch.Tensor, labels: torch.Tensor, row: int) -> torch.Tensor:
    """As the Trainer asks for it: with the count of the step where the model says it takes one, else divided by the number of slices."""
    counted = getattr(model, "accepts_loss_kwargs", "**" in names(model))
    inputs = {"num_items_in_batch": (labels[:, 1:] != -100).sum()} if counted else {}
    out = model(rows[row : row + 1], labels=labels[row : row + 1], **inputs)
    loss: torch.Tensor = out[0] if isinstance(out, tuple) else out["loss"]
    return loss if counted else loss / len(rows)


def _gradient(model: nn.Module, losses: list[torch.Tensor]) -> torch.Tensor:
    parameters = [one for one in model.parameters() if one.requires_grad]
    found = torch.autograd.grad(torch.stack(losses).sum(), parameters, allow_unused=True)
    return torch.cat([one.flatten() for one in found if one is not None])
