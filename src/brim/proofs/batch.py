"""Batch invariance: a row alone equals the row in a batch, whatever else is in it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.locale import _
from brim.proofs import signatures
from brim.proofs.comparing import Failed, attempt, change, is_repeatable, tolerance_of
from brim.proofs.modes import training
from brim.proofs.rows import together
from brim.proofs.signatures import Cause
from brim.proofs.verdicts import could_not_run, failed, known_cause, passed

if TYPE_CHECKING:
    from brim.proofs.subject import Subject
    from brim.records import Proof

_SIZES = (2, 3, 8)


@dataclass(frozen=True)
class Repeats:
    """Whether a model can be asked twice."""

    cause: Cause | None
    """Why not."""


def check_repeats(subject: Subject) -> Repeats:
    """Whether the same input gives the same result: not where noise stays on, and not where a call changes the next."""
    batch = inputs(subject, subject.ids(1, subject.length), masked="attention_mask" in subject.signature.required)
    before = _attributes(subject.model)
    first = attempt(subject, batch)
    second = attempt(subject, batch)
    if isinstance(first, Failed):
        return Repeats(None)
    if bool(first.isnan().any()):
        text = _("Its logits are not numbers (NaN) for one row alone.")
        return Repeats(Cause("not-a-number", text, _("Look for a division by zero: a deviation of one row, a mean of nothing.")))
    if isinstance(second, Failed) or first.shape != second.shape or change(subject, second, first) > 1e-6:
        return Repeats(signatures.state_kept(_what_changed(before, _attributes(subject.model))))
    return Repeats(None if is_repeatable(subject, batch) else signatures.dropout_on())


def prove_batch(subject: Subject, repeats: Repeats) -> Proof:
    """Rows alone against rows in batches of 2, 3 and 8 in evaluation mode, then of 2 in training mode without dropout."""
    tested = _("rows alone against rows in batches of 2, 3 and 8 in evaluation mode, and of 2 in training mode without dropout")
    if repeats.cause is not None:
        return failed(subject, "batch", tested, repeats.cause)
    tolerance = 0.0
    worst = 0.0
    remark = ""
    for in_training in (False, True):
        with training(subject.model) if in_training else nullcontext():
            for masked in masks(subject):
                found = _compare(subject, masked=masked, in_training=in_training)
                if found is None:
                    remark = _("In training mode it was not tested: it has noise there that cannot be switched off.")
                    continue
                if isinstance(found, Failed):
                    if _is_optional(subject, masked):
                        continue
                    return could_not_run(subject, "batch", found)
                if isinstance(found, Cause):
                    return failed(subject, "batch", tested, found)
                tolerance = tolerance or tolerance_of(subject, inputs(subject, subject.ids(2, subject.length), masked=masked))
                worst = max(worst, found)
                if found > tolerance:
                    return failed(subject, "batch", tested, _why(subject, masked, in_training, tolerance), found, tolerance)
    return passed(subject, "batch", tested, worst, tolerance, diagnosis=remark)


def masks(subject: Subject) -> tuple[bool, ...]:
    """Whether to give a mask of ones: as collators do, and not."""
    if not subject.takes("attention_mask"):
        return (False,)
    return (True,) if "attention_mask" in subject.signature.required else (True, False)


def inputs(subject: Subject, ids: torch.Tensor, *, masked: bool) -> dict[str, Any]:
    """A batch; the targets of a sequence-to-sequence model are other tokens of the same rows."""
    batch = together(list(ids), masked=masked)
    return (
        {**batch, "decoder_input_ids": subject.other(ids)[:, : max(2, ids.shape[1] // 2)]} if subject.kind == "seq2seq" else batch
    )


def _is_optional(subject: Subject, masked: bool) -> bool:
    """A model that cannot do without a mask need not."""
    return not masked and subject.takes("attention_mask")


def _compare(subject: Subject, *, masked: bool, in_training: bool) -> float | Cause | Failed | None:
    """The largest change; a cause, if batches die where single rows do not; how it failed, if single rows do.

    None: in training mode it cannot be told, for noise of its own that nothing switches off is right there.
    """
    if in_training and (stop := _noise(subject, masked)) is not _QUIET:
        return stop
    sizes = _SIZES[:1] if in_training else _SIZES
    ids = subject.ids(max(sizes), subject.length)
    alone = [attempt(subject, inputs(subject, row[None], masked=masked)) for row in ids]
    broken = next((each for each in alone if isinstance(each, Failed)), None)
    if broken is not None:
        return broken
    if (shape := _wrong_shape(subject, alone[0], ids[:1])) is not None:
        return shape
    worst = 0.0
    for size in sizes:
        both = attempt(subject, inputs(subject, ids[:size], masked=masked))
        if isinstance(both, Failed):
            return _died(subject, both, size)
        if (shape := _wrong_shape(subject, both, ids[:size])) is not None:
            return shape
        wanted = torch.cat([each for each in alone[:size] if isinstance(each, torch.Tensor)])
        worst = max(worst, change(subject, both, wanted))
    return worst


_QUIET = Failed(RuntimeError())


def _noise(subject: Subject, masked: bool) -> Cause | Failed | None:
    """Why rows cannot be compared in training mode."""
    batch = inputs(subject, subject.ids(1, subject.length), masked=masked)
    if is_repeatable(subject, batch):
        return _QUIET
    result = attempt(subject, batch)
    if isinstance(result, Failed):
        return Cause(
            None,
            _("It runs in evaluation mode and dies in training mode: {why}").format(why=result.words),
            _("Look for what self.training switches on."),
        )
    if bool(result.isnan().any()):
        return Cause(None, _("In training mode its logits are not numbers."), _("Look for what self.training switches on."))
    return None


def _wrong_shape(subject: Subject, logits: torch.Tensor | Failed, ids: torch.Tensor) -> Cause | None:
    assert isinstance(logits, torch.Tensor)
    dimensions = 2 if subject.kind == "classification" else 3
    if logits.dim() == dimensions and len(logits) == len(ids):
        return None
    seen = _("{rows} rows went in, and logits {shape} came out.").format(
        rows=len(ids), shape=signatures.shape_words(logits.shape)
    )
    return signatures.of_hidden_states(subject.sights, len(ids), ids.shape[1]) or signatures.row_zero(seen)


def _died(subject: Subject, failure: Failed, size: int) -> Cause:
    """It runs with one row, and not with more."""
    known = known_cause(subject, failure, rows=size)
    said = _("It runs with one row and dies with {size}: {why}").format(size=size, why=failure.words)
    if known is not None:
        return Cause(known.signature, f"{known.diagnosis} {said}", known.mend)
    return Cause(
        None,
        said,
        _(
            "Look for what assumes one row: a mask or position of shape [1, ...] that is no longer broadcast, or a fixed view(1, ...)."
        ),
    )


def _why(subject: Subject, masked: bool, in_training: bool, tolerance: float) -> Cause:
    """Which rows change which: three rows, and each of them exchanged in turn."""
    ids = subject.ids(3, subject.length)
    with training(subject.model) if in_training else nullcontext():
        before = attempt(subject, inputs(subject, ids, masked=masked))
        touched = []
        for place in range(3):
            other = ids.clone()
            other[place] = subject.other(ids[place])
            after = attempt(subject, inputs(subject, other, masked=masked))
            if isinstance(before, Failed) or isinstance(after, Failed):
                continue
            touched += [(row, place) for row in range(3) if row != place and change(subject, after[row], before[row]) > tolerance]
    if touched and all(by == 0 for _row, by in touched):
        return signatures.row_zero(_("Row 0 changes all other rows, and none of them changes it."))
    names = [name for name, module in subject.model.named_modules() if "BatchNorm" in type(module).__name__]
    if in_training and names:
        return signatures.batch_norm(names)
    if touched:
        turned = [name for name, module in subject.model.named_modules() if getattr(module, "batch_first", None) is False]
        return signatures.rows_mixed(turned, in_training=in_training)
    return Cause(
        None,
        _(
            "A row gives other logits in a batch than alone, though what the other rows hold does not matter: it is their number that does."
        ),
        _("Look for what depends on the size of the first dimension: positions or masks made from it, or statistics over it."),
    )


def _attributes(model: nn.Module) -> dict[str, str]:
    """What modules keep beside parameters, in a form that shows growth."""
    found = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if (attribute.startswith("_") and attribute != "_buffers") or attribute == "training":
                continue
            found[f"{name}.{attribute}".lstrip(".")] = _size(value)
    return found


def _size(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)}"
    if hasattr(value, "get_seq_length"):
        return f"{value.get_seq_length()} tokens"
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _what_changed(before: dict[str, str], after: dict[str, str]) -> str | None:
    for name, size in after.items():
        if before.get(name) != size:
            return _("{name}: {old}, then {new}").format(name=name, old=before.get(name, "-"), new=size)
    return None
