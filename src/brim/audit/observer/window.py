"""Micro-batches: what was called between two backwards; and windows: what lies between two optimizer steps.

A micro-batch is what one backward is about. Its rows are those of the first model that was called for it: a head that is called on what
an encoder gave sees the same samples in another shape. Rows that go through the same model twice count once.
"""

from __future__ import annotations

import weakref
from typing import Any

from .later import known, total
from .shapes import IGNORED


class Call:
    """One forward pass of a model, called from outside any other."""

    __slots__ = ("is_training", "length", "model", "rows", "targets", "tensor", "tokens")

    def __init__(self, model: Any, given: Any) -> None:
        self.model = id(model)
        self.is_training = bool(model.training)
        self.rows = given.rows
        self.length = given.length
        self.tokens = None if given.mask is None else known(given.mask.sum())
        # Counted at once: a call that no backward follows must not keep its labels alive.
        self.targets = _labels(given.targets, shifts="CausalLM" in type(getattr(model, "module", model)).__name__)
        self.tensor = None if given.tensor is None else weakref.ref(given.tensor)


class Micro:
    """One micro-batch whose gradient has been added."""

    __slots__ = ("calls", "length", "loss", "rows", "targets", "tokens")

    def __init__(self, calls: list[Call], targets: list[Any], loss: Any) -> None:
        counted = _counted(calls)
        self.calls = max(1, len(counted))
        # Called several times for one backward: a cell for each moment, both sides of a pair, a validation that kept its gradients.
        # Which of them make the batch does not show, so the nearest to the backward is told, and that there were others.
        last = counted[-1] if counted else None
        self.rows = None if last is None else last.rows
        self.length = None if last is None else last.length
        self.tokens = None if last is None else last.tokens
        self.targets = total(targets) if targets else None if last is None else last.targets
        self.loss = loss


def evaluations_among(calls: list[Call]) -> int:
    """Calls of a model in evaluation mode that kept gradients beside others in training mode: no part of the micro-batch."""
    training = sum(call.is_training for call in calls)
    return len(calls) - training if training else 0


def _counted(calls: list[Call]) -> list[Call]:
    if any(call.is_training for call in calls):
        calls = [call for call in calls if call.is_training]
    found: list[Call] = []
    seen: list[Any] = []
    for call in calls:
        tensor = None if call.tensor is None else call.tensor()
        if call.model != calls[0].model or (tensor is not None and any(tensor is other for other in seen)):
            continue
        seen.append(tensor)
        found.append(call)
    return found


def _labels(labels: Any, *, shifts: bool) -> Any:
    """Supervised targets by the labels, where no loss function was seen that counts them. Decoders predict the next token."""
    if labels is None or labels.is_floating_point():
        return None
    return known(((labels[:, 1:] if labels.dim() == 2 and shifts else labels) != IGNORED).sum())
