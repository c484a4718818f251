"""Accumulation: the gradient of a step does not depend on how the step is sliced.

Told how many labels the whole step has, the losses of the slices must add up to that of one batch; not told, they must be means that add
up when each is weighed by its own number of labels. The first is how the trainer of transformers calls a model, the second how brim does
where a model counts for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from brim.errors import BrimError
from brim.locale import _
from brim.proofs import signatures
from brim.proofs.comparing import Failed, attempt, is_repeatable
from brim.proofs.modes import training
from brim.proofs.rows import items_of, labelled
from brim.proofs.signatures import Cause
from brim.proofs.verdicts import could_not_run, failed, not_applicable, passed

if TYPE_CHECKING:
    from brim.proofs.batch import Repeats
    from brim.proofs.subject import Subject
    from brim.records import Proof

_ROWS = 8
_SLICES = {"even": (4,), "uneven": (1, 2, 4)}
"""Rows of a slice, where all rows have as many labels, and where they differ."""
_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 2e-2, "amp-bf16": 5e-2, "amp-fp16": 2e-2}
_SIMILAR = 0.02
"""A ratio is taken for k or 1/k within this share of it."""


@dataclass(frozen=True)
class Agreement:
    """The gradient of slices against that of one batch."""

    slices: int
    cosine: float
    ratio: float
    items: int

    @property
    def miss(self) -> float:
        """How far it is off: the norm's share, or the sine of the angle."""
        if not math.isfinite(self.cosine) or not math.isfinite(self.ratio):
            return math.inf
        return max(abs(self.ratio - 1), math.sqrt(max(0.0, 1 - self.cosine**2)))


def prove_accumulation(subject: Subject, repeats: Repeats, batch_cause: Cause | None) -> Proof:
    """Eight rows at once against slices of 4, 2 and 1: rows with equally many labels, and with different numbers."""
    parameters = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    if not parameters:
        return not_applicable(subject, "accumulation", _("Nothing of it trains: every parameter is frozen."))
    tested = _(
        "the gradient of 8 rows in one batch against the same rows as 8 x 1, 4 x 2 and 2 x 4, with even and with uneven labels"
    )
    measure = _("how far the gradient of the slices is off, as a share of its norm")
    if repeats.cause is not None and repeats.cause.signature == "dropout-on":
        return failed(subject, "accumulation", tested, repeats.cause, measure=measure)
    with torch.inference_mode(False), torch.enable_grad(), training(subject.model):
        remark = _noise(subject)
        if remark:
            subject.model.eval()
        try:
            told, untold = _agreements(subject, parameters)
        except BrimError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the model is anybody's code)
            return _raised(subject, tested, measure, Failed(error, tuple(subject.sights)), batch_cause)
    tolerance = _TOLERANCE[subject.precision]
    worst = max([*told.values(), *untold.values()], key=lambda each: each.miss)
    numbers = {"cosine": _finite(worst.cosine), "norm_ratio": _finite(worst.ratio), "measure": measure}
    if worst.miss <= tolerance:
        return passed(subject, "accumulation", tested, worst.miss, tolerance, diagnosis=remark, **numbers)
    if _is_only_told_wrong(subject, told, untold, tolerance):
        rest = max(untold.values(), key=lambda each: each.miss)
        numbers |= {"cosine": _finite(rest.cosine), "norm_ratio": _finite(rest.ratio), "diagnosis": _trainer_only()}
        return passed(subject, "accumulation", tested, rest.miss, tolerance, **numbers)
    cause = batch_cause or _why(told, untold, tolerance)
    return failed(subject, "accumulation", tested, cause, _finite(worst.miss), tolerance, **numbers)


def _noise(subject: Subject) -> str:
    """Why the gradients are those of evaluation mode; empty if they are not."""
    ids = subject.ids(1, subject.length)
    asked: dict[str, Any] = {"input_ids": ids, **subject.required(ids)}
    if subject.kind == "seq2seq":
        asked["decoder_input_ids"] = ids
    return (
        ""
        if is_repeatable(subject, asked)
        else _("Tested in evaluation mode: in training mode it has noise that cannot be switched off.")
    )


Table = dict[tuple[str, int], Agreement]


def _agreements(subject: Subject, parameters: list[torch.nn.Parameter]) -> tuple[Table, Table]:
    """By evenness and size of slice: told the number of labels of the whole step, and not told."""
    told: Table = {}
    untold: Table = {}
    classes = _classes(subject)
    for evenness, sizes in _SLICES.items():
        rows, prompts = _rows(subject, is_even=evenness == "even")
        whole = labelled(subject, rows, prompts, classes)
        items = items_of(subject, whole)
        wanted = _gradient(subject, parameters, whole)
        for size in sizes:
            parts = [labelled(subject, rows[at : at + size], prompts[at : at + size], classes) for at in range(0, _ROWS, size)]
            counts = [items_of(subject, part) for part in parts]
            weighed = [
                _gradient(subject, parameters, part) * (count / items) for part, count in zip(parts, counts, strict=True) if count
            ]
            untold[evenness, size] = _agreement(weighed, wanted, len(parts), items)
            if subject.takes_items and subject.has_loss:
                # The trainer tells it as a number or as a tensor, by its version.
                number = items if evenness == "even" else torch.tensor(items, device=subject.device)
                sums = [_gradient(subject, parameters, {**part, "num_items_in_batch": number}) for part in parts]
                told[evenness, size] = _agreement(sums, wanted, len(parts), items)
    return told, untold


def _rows(subject: Subject, *, is_even: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Rows, and how many tokens of each are a prompt, of which nothing is learnt."""
    half = subject.length // 2
    can_be_padded = subject.takes("attention_mask") or subject.kind == "causal-lm"
    lengths = (
        [half] * _ROWS
        if is_even or not can_be_padded
        else [half + (5 * place) % (subject.length - half) for place in range(_ROWS)]
    )
    prompts = [1] * _ROWS if is_even else [1 + (place * 3) % (half - 2) for place in range(_ROWS)]
    return [subject.ids(1, length, seed=70 + place)[0] for place, length in enumerate(lengths)], prompts


def _classes(subject: Subject) -> int:
    """Labels lie below this: the vocabulary, or the classes of a classifier."""
    if subject.kind == "classification":
        return int(getattr(subject.config, "num_labels", None) or 2)
    ids = subject.ids(1, 4)
    asked: dict[str, Any] = {"input_ids": ids, **subject.required(ids)}
    if subject.kind == "seq2seq":
        asked["decoder_input_ids"] = ids
    with torch.no_grad():
        found = attempt(subject, asked)
    return subject.vocabulary if isinstance(found, Failed) else max(2, min(subject.vocabulary, int(found.shape[-1])))


def _gradient(subject: Subject, parameters: list[torch.nn.Parameter], batch: dict[str, Any]) -> torch.Tensor:
    """By `backward`, which reentrant checkpointing needs; gradients that were there are put back."""
    kept = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        subject.loss(batch).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    flat = [
        (torch.zeros_like(p) if g is None else g).detach().float().flatten() for p, g in zip(parameters, gradients, strict=True)
    ]
    return torch.cat(flat)


def _agreement(parts: list[torch.Tensor], wanted: torch.Tensor, slices: int, items: int) -> Agreement:
    found = torch.stack(parts).sum(dim=0).double()
    whole = wanted.double()
    norms = float(found.norm()), float(whole.norm())
    if not all(map(math.isfinite, norms)):
        return Agreement(slices, math.nan, math.nan, items)
    if not norms[1]:
        return Agreement(slices, 1.0 if not norms[0] else 0.0, 1.0 if not norms[0] else math.inf, items)
    cosine = float(found @ whole) / max(norms[0] * norms[1], 1e-300)
    return Agreement(slices, min(1.0, cosine), norms[0] / norms[1], items)


def _why(told: Table, untold: Table, tolerance: float) -> Cause:
    """By the ratio where all rows have as many labels, then by whether uneven ones differ."""
    even_told = [each for (evenness, _size), each in told.items() if evenness == "even"]
    even_untold = [each for (evenness, _size), each in untold.items() if evenness == "even"]
    if even_told and max(each.miss for each in even_told) > tolerance:
        if all(_is_like(each.ratio, each.slices) for each in even_told):
            return signatures.never_averaged()
        if all(each.ratio < 0.9 for each in even_told):
            return signatures.averaged_twice(min(each.ratio for each in even_told))
    if max(each.miss for each in even_untold) > tolerance:
        if all(_is_like(each.ratio, 1 / each.slices) for each in even_untold):
            return signatures.summed(min(each.ratio for each in even_untold))
        return _unknown(max(even_untold, key=lambda each: each.miss))
    if max(each.miss for (evenness, _size), each in untold.items() if evenness == "uneven") > tolerance:
        return signatures.mean_of_means()
    return _unknown(max([*told.values(), *untold.values()], key=lambda each: each.miss))


def _is_like(ratio: float, wanted: float) -> bool:
    return abs(ratio / wanted - 1) <= _SIMILAR


def _unknown(worst: Agreement) -> Cause:
    return Cause(
        None,
        _(
            "The gradient depends on how the step is sliced: over {slices} slices its cosine is {cosine:.4f} and its norm "
            "{ratio:.3g} times."
        ).format(slices=worst.slices, cosine=worst.cosine, ratio=worst.ratio),
        _(
            "Look for a loss that is no sum over labels (a balance of experts, a contrast between rows), or for what changes "
            "with the batch."
        ),
    )


def _is_only_told_wrong(subject: Subject, told: Table, untold: Table, tolerance: float) -> bool:
    """A class of transformers itself that ignores the number: nobody can mend it, and brim's own step counts for it."""
    return (
        subject.is_of_transformers
        and bool(told)
        and max(each.miss for each in untold.values()) <= tolerance
        and all(_is_like(each.ratio, each.slices) for (evenness, _size), each in told.items() if evenness == "even")
    )


def _trainer_only() -> str:
    return _(
        "Exact in brim's own step. The plain Trainer of transformers would take gradients that are as many times too large as "
        "there are accumulation steps, for this class ignores num_items_in_batch (transformers#47688): divide the learning "
        "rate there, or set accepts_loss_kwargs = False."
    )


def _raised(subject: Subject, tested: str, measure: str, failure: Failed, batch_cause: Cause | None) -> Proof:
    if batch_cause is not None:
        return failed(subject, "accumulation", tested, batch_cause, measure=measure)
    return could_not_run(subject, "accumulation", failure)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
