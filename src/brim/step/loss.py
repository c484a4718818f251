"""What the loss of a model is a mean of, found out by asking it, before the first step.

The exact gradient needs every micro-batch weighed by the number of things that its loss averages over. Nothing declares that number: causal
models count the labels after the first, encoders all labels, classifiers rows, and some models take the mean themselves whatever the
trainer passes (transformers#47688). So pairs of sequences are run alone and together: the gradient of both must be that of each,
weighed by the right count. Whatever count that is, is the one to use; if none is, slices would change the gradient. Gradients, not
losses, are compared: every token of a model that has learned nothing costs the same, and any count would do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from brim.errors import OutOfMemoryError, UnsupportedError
from brim.locale import _
from brim.step.devices import device_of
from brim.step.four_bits import keep_trainable
from brim.step.micro import IGNORED, Counting, MicroBatch
from brim.step.oom import failure_of, release
from brim.step.randomness import Randomness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.machine.device import Device
    from brim.step.loading import StepDataset

MeanLoss = Callable[[Any, int | None], torch.Tensor]
"""`loss(batch, items)`: the mean loss of a batch, told how many items we believe it has. None: it counts for itself."""

_SAME: Final = 1e-7
"""Two runs of the same numbers differ by no more."""
_ORDER: Final[tuple[Counting, ...]] = ("next-token", "token", "sequence")
_LOOKED_AT: Final = 24
_FROM_THE_FIRST: Final = 256
_NOISE: Final = 0.1
"""Of the tolerance: what rounding alone may do to a gradient. Countings that miss by no more cannot be told apart."""
_MOST_PARAMETERS: Final = 12
_LARGEST_PARAMETER: Final = 1 << 18
_NUMBERS_OF_EACH: Final = 4096


def counting_of(data: StepDataset, model: torch.nn.Module, mean_loss: MeanLoss, *, is_half: bool = False) -> Counting:
    """What the loss is the mean of, asked with a few of the first sequences; `is_half` if it is computed at half precision."""
    parameters = _some_parameters(model)
    # Layers of 8 bits round their input to 127 steps: a last bit of difference becomes a whole one of them.
    has_bytes = any(parameter.dtype == torch.int8 for parameter in model.parameters())
    # Adapters are float32 also where all that is frozen around them is not.
    has_half = any(parameter.dtype in {torch.bfloat16, torch.float16} for parameter in model.parameters())
    is_half = is_half or has_bytes or has_half or parameters[0].dtype != torch.float32
    device = next(model.parameters()).device
    with looking_on(model, device):
        question = Question(mean_loss, parameters, device_of(device))
        return find_counting(_pairs(data), question, data.collate, tolerance=5e-2 if is_half else 1e-3)


def _pairs(data: StepDataset) -> list[MicroBatch]:
    """Pairs of sequences that are as different as possible: in their labels' number, in length, and in what their labels are.

    Short ones, if they will do: this is only a question.
    """
    first = data.plan.first(_FROM_THE_FIRST)
    lengths = data.plan.lengths_of(first).reshape(len(first), -1).sum(axis=1)
    ranked = first[lengths.argsort(kind="stable")]
    some = ranked[np.unique(np.linspace(0, len(ranked) - 1, min(_LOOKED_AT, len(ranked))).astype(int))]
    alone = [data.micro_batch(some[place : place + 1]) for place in range(len(some))]
    # Of a row with one token a causal model learns nothing, so such rows are asked only where there are no others.
    labelled = [micro for micro in alone if micro.items("next-token")] or [micro for micro in alone if micro.items("token")]
    if not labelled:
        return []
    if len(labelled) == 1:
        return labelled
    shorter = labelled[: max(2, (len(labelled) + 1) // 2)]
    chosen = [(min(shorter, key=differs), max(shorter, key=differs)) for differs in (_labels_of, _tokens_of)]
    chosen += [(labelled[0], _first_other(labelled, differs)) for differs in (_labels_of, _content)]
    pairs = {(int(one.ids[0]), int(two.ids[0])) for one, two in chosen if one is not two}
    return [data.micro_batch(np.array(pair)) for pair in sorted(pairs)]


def _first_other(group: Sequence[MicroBatch], differs: Callable[[MicroBatch], Any]) -> MicroBatch:
    return next((micro for micro in group if differs(micro) != differs(group[0])), group[1])


def _labels_of(micro: MicroBatch) -> int:
    return micro.items("token")


def _tokens_of(micro: MicroBatch) -> int:
    return sum(micro.padded)


def _content(micro: MicroBatch) -> Any:
    labels = micro.batch.get("labels") if isinstance(micro.batch, Mapping) else None
    return labels.flatten()[:1].tolist() if isinstance(labels, torch.Tensor) else None


def _some_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """A few that train, from all over the model, in pairs of neighbours: of an adapter's two factors one begins with no gradient."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small = [parameter for parameter in found if parameter.numel() <= _LARGEST_PARAMETER] or [min(found, key=torch.numel)]
    places = np.linspace(0, len(small) - 1, min(_MOST_PARAMETERS // 2, len(small))).astype(int).tolist()
    chosen = sorted({near for place in places for near in (place, min(place + 1, len(small) - 1))})
    return [small[place] for place in chosen]


@contextmanager
def looking_on(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Run the model without a trace: no dropout, no random number used up, no auxiliary loss that is not a mean over tokens."""
    randomness = Randomness.of(device)
    keep_trainable(model)
    training = [module for module in model.modules() if module.training]
    balanced: list[tuple[Any, Any]] = [
        (module, module.router_aux_loss_coef) for module in model.modules() if hasattr(module, "router_aux_loss_coef")
    ]
    model.eval()
    for module, _coefficient in balanced:
        module.router_aux_loss_coef = 0.0
    try:
        yield
    finally:
        for module, coefficient in balanced:
            module.router_aux_loss_coef = coefficient
        for module in training:
            module.training = True
        randomness.restore(device)


def find_counting(
    pairs: Sequence[MicroBatch], question: Question, collate: Callable[[Sequence[Any]], Any] | None, *, tolerance: float
) -> Counting:
    """The counting under which the gradient of two sequences together follows from that of each alone.

    Each alone is a row of the very batch that holds both: a collator that draws at random would draw something else.
    """
    if not pairs:
        return "next-token"
    answers = [answer for both in pairs if (answer := question.answer(both, collate)) is not None]
    if not answers:
        raise OutOfMemoryError(
            _("Memory ran out when two short sequences were tried before the first step."),
            hint=_("Shorten the sequences, or save memory: gradient checkpointing, LoRA, an 8-bit optimizer, a smaller model."),
        )
    answers = [answer for answer in answers if not answer.is_silent]
    if not answers or not question.has_values:  # nothing is learned from these rows, whatever is counted
        return "next-token"
    misses = {counting: max(answer.misses[counting] for answer in answers) for counting in _ORDER}
    best = min(misses, key=lambda counting: misses[counting])
    if misses[best] > tolerance:
        raise _refusal(misses[best])
    noise = max(_NOISE * tolerance, 2 * misses[best])
    found = next(counting for counting in _ORDER if misses[counting] <= noise)
    return _by_first_label(found, [one for answer in answers for one in answer.alone], misses, question.loss, tolerance)


@dataclass(frozen=True)
class Answer:
    """By how much each counting misses, for one pair."""

    alone: Sequence[MicroBatch]
    misses: dict[Counting, float]
    is_silent: bool = False
    """Whether nothing at all is learned from it."""


@dataclass(frozen=True)
class Pull:
    """What a batch does to the parameters: the gradient as one vector, and the loss for where that is zero."""

    gradient: torch.Tensor
    loss: torch.Tensor

    @property
    def is_silent(self) -> bool:
        """Neither moves anything: no label of the batch counts."""
        return not bool(self.gradient.any()) and not (bool(self.loss.isfinite().all()) and bool(self.loss.any()))


class Question:
    """Asks a loss for its gradient, once for each batch and count."""

    def __init__(self, loss: MeanLoss, parameters: Sequence[torch.nn.Parameter], device: Device) -> None:
        self._loss = loss
        self._parameters = list(parameters)
        self._device = device
        self._counts_for_itself = True
        self._kept: dict[int, Pull] = {}

    @property
    def has_values(self) -> bool:
        """Whether gradients are computed. An emulated card allocates their memory only, unless it is asked to compute."""
        is_emulated = "BRIM_CARD" in os.environ and os.environ.get("BRIM_CARD_COMPUTE") != "1"
        return not (is_emulated and any(parameter.is_cuda for parameter in self._parameters))

    def loss(self, batch: Any, items: int) -> float:
        """The mean loss of a batch."""
        with torch.no_grad():
            return float(self._loss(batch, items))

    def answer(self, both: MicroBatch, collate: Callable[[Sequence[Any]], Any] | None) -> Answer | None:
        """What this pair says; None if memory is too small for both at once, which training itself would survive."""
        alone = both.split(collate) if len(both) > 1 else (both,)
        try:
            misses = {counting: self._miss(both, alone, counting) for counting in _ORDER}
            is_silent = math.isinf(min(misses.values())) and self._ask(both.batch, both.items("token")).is_silent
            return Answer(alone, misses, is_silent)
        except Exception as error:
            if failure_of(error, "forward") is None:
                raise
            release(error, self._device)
        return None

    def _miss(self, both: MicroBatch, alone: Sequence[MicroBatch], counting: Counting) -> float:
        """By how much the gradient of the whole differs from what its parts say, as a share; by the loss where there is no gradient."""
        items = [micro.items(counting) for micro in alone]
        if not sum(items) or both.items(counting) != sum(items):
            return math.inf
        parts = [self._pull(micro, count) for micro, count in zip(alone, items, strict=True) if count]
        shares = [count / sum(items) for count in items if count]
        all_of_it = self._pull(both, sum(items), is_as_trained=True)
        # Adapters that begin with zeros have no gradient at first. A part without one, beside others that have it, counts as zero.
        has_gradient = any(bool(one.gradient.any()) for one in (all_of_it, *parts))
        whole = all_of_it.gradient if has_gradient else all_of_it.loss
        expected = torch.stack(
            [(one.gradient if has_gradient else one.loss) * share for one, share in zip(parts, shares, strict=True)]
        ).sum(dim=0)
        if not (bool(expected.isfinite().all()) and bool(whole.isfinite().all())):
            return math.inf
        return float((whole - expected).norm() / max(float(expected.norm()), 1e-12))

    def _pull(self, micro: MicroBatch, items: int, *, is_as_trained: bool = False) -> Pull:
        """Parts are asked for their own mean, whatever we count; the whole is asked as it will be in training."""
        if is_as_trained or not self._counts_for_itself:
            return self._ask(micro.batch, items)
        if id(micro) not in self._kept:
            try:
                self._kept[id(micro)] = self._ask(micro.batch, None)
            except TypeError:  # it divides by what it is told
                self._counts_for_itself = False
                return self._ask(micro.batch, items)
        return self._kept[id(micro)]

    def _ask(self, batch: Any, items: int | None) -> Pull:
        loss = self._loss(batch, items)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        flat = [
            _sample(torch.zeros_like(parameter) if gradient is None else gradient.detach())
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        return Pull(torch.cat(flat), loss.detach().float().reshape(1))


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Some of its numbers: enough to tell gradients apart, few enough to keep."""
    return gradient.flatten()[:: max(1, gradient.numel() // _NUMBERS_OF_EACH)].float()


def _refusal(miss: float) -> UnsupportedError:
    return UnsupportedError(
        _(
            "The loss of this model is not a mean over its labels: the gradient of two sequences together misses by {miss:.1%}."
        ).format(miss=miss),
        hint=_(
            "Slices would then change the gradient. Either padding changes the result (pad on the right, and give an attention mask), or "
            "the loss averages over something else: return the mean over the labels in the batch that are not -100, without weights."
        ),
    )


def _by_first_label(
    found: Counting,
    alone: Sequence[MicroBatch],
    misses: dict[Counting, float],
    mean_loss: Callable[[Any, int], float],
    tolerance: float,
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
