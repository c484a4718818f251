"""What the loss of a model is a mean of, found out by asking it, before the first step.

The exact gradient needs every micro-batch weighed by the number of things that its loss averages over. Nothing declares that number: causal
models count the labels after the first, encoders all labels, classifiers rows, and some models take the mean themselves whatever the
trainer passes (transformers#47688). So two sequences are run alone and together: the mean over both must be the mean of
both means, weighed by the right count. Whatever count that is, is the one to use; if none is, slices would change the gradient.
Where a model is fresh, every token has nearly the same loss and so every count fits; then another first label tells whether it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from brim.errors import UnsupportedError
from brim.locale import _
from brim.step.micro import IGNORED
from brim.step.randomness import Randomness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.step.loading import Collate, StepDataset
    from brim.step.micro import Counting, MicroBatch

MeanLoss = Callable[[Any, int], float]
"""`loss(batch, items)`: the mean loss of a batch of which we believe that it has `items` items; without gradient, dropout off."""

_SAME: Final = 1e-7
"""Two runs of the same numbers differ by no more."""
_ORDER: Final[tuple[Counting, ...]] = ("next-token", "token", "sequence")
_LOOKED_AT: Final = 16
_NOISE: Final = 0.03
"""Of the tolerance: what rounding alone may do to a mean loss. Countings that miss by no more cannot be told apart."""


def counting_of(data: StepDataset, mean_loss: MeanLoss, dtype: torch.dtype) -> Counting:
    """What the loss is the mean of, asked with some of the first step's sequences, all of them of its shorter half."""
    first = data.plan.global_batch(0)
    lengths = data.plan.lengths_of(first).reshape(len(first), -1).sum(axis=1)
    shorter = first[lengths.argsort(kind="stable")][: (len(first) + 1) // 2 + 1]
    some = shorter[np.unique(np.linspace(0, len(shorter) - 1, min(_LOOKED_AT, len(shorter))).astype(int))]
    alone = [data.micro_batch(some[place : place + 1]) for place in range(len(some))]
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    return find_counting(
        alone, lambda places: data.micro_batch(some[list(places)]), mean_loss, tolerance=tolerance, collate=data.collate
    )


@contextmanager
def looking_on(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Run the model without a trace: no gradient, no dropout, no random number used up."""
    randomness = Randomness.of(device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        randomness.restore(device)


def find_counting(
    candidates: Sequence[MicroBatch],
    together: Callable[[Sequence[int]], MicroBatch],
    mean_loss: MeanLoss,
    *,
    tolerance: float,
    collate: Collate | None = None,
) -> Counting:
    """The counting under which the loss of two sequences together follows from that of each alone.

    `candidates` are micro-batches of one sequence; `together` collates several of them (by their place in the list). Each alone is
    then a row of that very batch: a collator that draws at random would draw something else.
    """
    chosen = _two_that_differ(candidates)
    if not chosen:
        return "next-token"
    both = together(chosen)
    alone = both.split(collate) if len(both) > 1 else (both,)
    misses = {counting: _miss(alone, both, counting, mean_loss) for counting in _ORDER}
    best = min(misses, key=lambda counting: misses[counting])
    if misses[best] <= tolerance:
        noise = max(_NOISE * tolerance, 2 * misses[best])
        return _by_first_label(
            next(counting for counting in _ORDER if misses[counting] <= noise), alone, misses, mean_loss, tolerance
        )
    raise UnsupportedError(
        _("The loss of this model is not a mean over its labels: for two sequences together it misses by {miss:.1%}.").format(
            miss=misses[best]
        ),
        hint=_(
            "Slices would then change the gradient. Either the model is wrong at batch sizes above 1 (padding or position ids), or its "
            "loss averages over something else: return the mean over labels that are not -100."
        ),
    )


def _two_that_differ(candidates: Sequence[MicroBatch]) -> list[int]:
    """Two sequences with labels, as different in their number as the short ones have; one if there is no more."""
    counts = {place: micro.items("next-token") for place, micro in enumerate(candidates)}
    usable = [place for place, count in counts.items() if count > 1] or [place for place, count in counts.items() if count]
    if not usable:
        return []
    fewest, most = min(usable, key=lambda place: counts[place]), max(usable, key=lambda place: counts[place])
    if fewest != most:
        return [fewest, most]
    return usable[:2]


def _by_first_label(
    found: Counting, alone: Sequence[MicroBatch], misses: dict[Counting, float], mean_loss: MeanLoss, tolerance: float
) -> Counting:
    """Labels with or without the first of each row, where both would fit: with it, if another first label is another loss."""
    micro = max(alone, key=lambda one: one.items("token"))
    labels = micro.batch.get("labels") if isinstance(micro.batch, Mapping) else None
    if found == "sequence" or labels is None or labels.dim() < 2 or labels.is_floating_point() or "shift_labels" in micro.batch:
        return found
    if max(misses["token"], misses["next-token"]) > tolerance:
        return found
    others = labels[(labels != IGNORED) & (labels != labels[:, :1])]
    changed = labels.clone()
    changed[:, 0] = others[0] if len(others) else IGNORED
    items = micro.items("token")
    before, after = (mean_loss({**micro.batch, "labels": each}, items) for each in (labels, changed))
    return "token" if abs(after - before) > _SAME * abs(before) else "next-token"


def _miss(alone: Sequence[MicroBatch], both: MicroBatch, counting: Counting, mean_loss: MeanLoss) -> float:
    """By how much the loss of the whole differs from what its parts say, as a share."""
    items = [micro.items(counting) for micro in alone]
    losses = [mean_loss(micro.batch, count) for micro, count in zip(alone, items, strict=True)]
    expected = sum(loss * count for loss, count in zip(losses, items, strict=True)) / max(1, sum(items))
    found = mean_loss(both.batch, both.items(counting))
    if not (math.isfinite(expected) and math.isfinite(found)):
        return math.inf
    return abs(found - expected) / max(abs(expected), 1e-6)
