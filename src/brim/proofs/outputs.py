"""Logits and loss, in whatever a model returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brim.errors import UnsupportedError
from brim.locale import _


def logits_of(output: Any) -> torch.Tensor:
    """The scores in whatever a model returns."""
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    parts = list(output.values()) if isinstance(output, Mapping) else list(output) if isinstance(output, Sequence) else []
    scores = [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point() and part.dim() >= 2]
    if not scores:
        raise UnsupportedError(
            _("The model returned {kind}, and no logits are in it.").format(kind=type(output).__name__),
            hint=_("Let forward return the logits, a tuple or dictionary that has them, or a ModelOutput of transformers."),
        )
    return scores[0]


def loss_of(output: Any) -> torch.Tensor | None:
    """The scalar in whatever a model returns; None if there is none."""
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    parts = list(output) if isinstance(output, Sequence) else []
    return next((part for part in parts if isinstance(part, torch.Tensor) and part.dim() == 0), None)
