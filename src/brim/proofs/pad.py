"""Pad invariance: padding on either side, under a mask, changes nothing for the real tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from brim.locale import _
from brim.proofs import signatures
from brim.proofs.batch import inputs
from brim.proofs.comparing import Failed, attempt, change, measure_of_logits, tolerance_of
from brim.proofs.modules import inner_model
from brim.proofs.rows import Side, padded, real_tokens
from brim.proofs.signatures import Cause
from brim.proofs.verdicts import could_not_run, failed, known_cause, not_applicable, passed

if TYPE_CHECKING:
    from brim.proofs.subject import Subject
    from brim.records import Proof


def prove_pad(subject: Subject) -> Proof:
    """Two rows of different length in one batch, and one short row in a long one: padded on the right, and on the left."""
    sides = _sides(subject)
    if not sides:
        return not_applicable(
            subject, "pad", _("It takes no attention mask, so padding cannot be told from tokens: give it rows of one length.")
        )
    tested = _("rows of different lengths padded on the right, with their mask, against each row alone")
    if "left" in sides:
        tested = _("rows of different lengths padded on the right and on the left, with their mask, against each row alone")
    lengths = (subject.length * 2 // 3, subject.length // 3)
    rows = [subject.ids(1, length, seed=3 + length)[0] for length in lengths]
    alone = [attempt(subject, _alone(subject, row)) for row in rows]
    broken = next((each for each in alone if isinstance(each, Failed)), None)
    if broken is not None:
        return could_not_run(subject, "pad", broken)
    wanted = [each for each in alone if isinstance(each, torch.Tensor)]
    tolerance = tolerance_of(subject, _alone(subject, rows[0]))
    values = {}
    for side in sides:
        found = _compare(subject, rows, wanted, side)
        if isinstance(found, Cause):
            return failed(subject, "pad", tested, found, None, tolerance)
        values[side] = found
    worst = max(values, key=lambda side: values[side])
    if values[worst] > tolerance:
        cause = _why(subject, rows, worst, tolerance)
        if subject.is_of_transformers:
            return _library_cannot(subject, worst, cause, values[worst], tolerance)
        return failed(subject, "pad", tested, cause, values[worst], tolerance)
    seen = max(_by_filler(subject, rows, side) for side in sides) if _may_be_anything(subject) else 0.0
    if seen > tolerance:
        return failed(subject, "pad", tested, signatures.padding_seen(), seen, tolerance)
    return passed(subject, "pad", tested, max(values[worst], seen), tolerance)


def _may_be_anything(subject: Subject) -> bool:
    """Whether other tokens than the padding's may stand under the mask's zeros. Classifiers find the last token by its id."""
    return subject.kind == "causal-lm" and subject.takes("attention_mask") and not subject.is_of_transformers


def _by_filler(subject: Subject, rows: list[torch.Tensor], side: Side) -> float:
    """By how much real tokens change when other tokens are the padding."""
    fillers = [subject.pad, int(subject.other(torch.tensor([[subject.pad]], device=subject.device))[0, 0])]
    results = [attempt(subject, _padded(subject, rows, side, filler)) for filler in fillers]
    first, second = (each if isinstance(each, torch.Tensor) else torch.zeros(0) for each in results)
    if not len(first) or not len(second):
        return 0.0
    return max(
        change(subject, _real(subject, first[place], row, side), _real(subject, second[place], row, side))
        for place, row in enumerate(rows)
    )


def _library_cannot(subject: Subject, side: Side, cause: Cause, value: float, tolerance: float) -> Proof:
    """A class of transformers itself, which nobody here can mend: it is a limit of the class, and no fault of the model."""
    why = _(
        "{name} of transformers is not exact with padding on the {side}: it changes real tokens by {value:.2g} standard "
        "deviations of a logit. Batch rows of one length, or one row at a time."
    ).format(name=type(inner_model(subject.model)).__name__, side=_("right") if side == "right" else _("left"), value=value)
    proof = not_applicable(subject, "pad", why)
    return dataclasses.replace(proof, value=value, tolerance=tolerance, measure=measure_of_logits(), signature=cause.signature)


def _sides(subject: Subject) -> tuple[Side, ...]:
    """Encoders are padded on the right; a causal model without a mask can be, for padding lies in the future."""
    if not subject.takes("attention_mask"):
        return ("right",) if subject.kind == "causal-lm" else ()
    is_classifier = subject.kind == "classification"
    if subject.kind in {"masked-lm", "seq2seq"} or (is_classifier and not (subject.is_of_transformers and _is_decoder(subject))):
        return ("right",)
    return ("right", "left")


def _is_decoder(subject: Subject) -> bool:
    from transformers.models.auto import modeling_auto

    kind = getattr(subject.config, "model_type", "")
    return kind not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _alone(subject: Subject, row: torch.Tensor) -> dict[str, Any]:
    return inputs(subject, row[None], masked="attention_mask" in subject.signature.required)


def _padded(subject: Subject, rows: list[torch.Tensor], side: Side, filler: int | None = None) -> dict[str, Any]:
    batch = padded(subject, rows, side, length=subject.length, filler=filler)
    if subject.kind == "seq2seq":
        targets = [_alone(subject, row)["decoder_input_ids"][0] for row in rows]
        longest = max(len(target) for target in targets)
        batch["decoder_input_ids"] = torch.stack(
            [torch.cat([target, target.new_full((longest - len(target),), subject.pad)]) for target in targets]
        )
    return batch


def _compare(subject: Subject, rows: list[torch.Tensor], wanted: list[torch.Tensor], side: Side) -> float | Cause:
    found = attempt(subject, _padded(subject, rows, side))
    if isinstance(found, Failed):
        known = known_cause(subject, found, rows=len(rows))
        said = _("A padded batch cannot be run: {why}").format(why=found.words)
        if known is not None:
            return Cause(known.signature, f"{known.diagnosis} {said}", known.mend)
        return Cause(
            None, said, _("Make a batch of two rows with an attention mask [2, {tokens}] run.").format(tokens=subject.length)
        )
    if len(found) != len(rows):
        return signatures.row_zero(_("{rows} rows went in, and {found} came out.").format(rows=len(rows), found=len(found)))
    return max(change(subject, _real(subject, found[place], row, side), wanted[place][0]) for place, row in enumerate(rows))


def _real(subject: Subject, logits: torch.Tensor, row: torch.Tensor, side: Side) -> torch.Tensor:
    if subject.kind == "classification":
        return logits
    if subject.kind == "seq2seq":
        return logits[: max(2, len(row) // 2)]
    return logits[real_tokens(len(row), subject.length, side)]


def _why(subject: Subject, rows: list[torch.Tensor], side: Side, tolerance: float) -> Cause:
    """If other tokens under the mask's zeros change anything, padding is seen; else it is the positions."""
    known = None if subject.is_of_transformers else signatures.of_masks([sight for sight in subject.sights if sight.is_2d])
    if known is not None:
        return known
    if _by_filler(subject, rows, side) > tolerance:
        return signatures.padding_seen()
    if side == "left":
        return signatures.positions_ignore_padding(takes_positions=subject.takes("position_ids"))
    return Cause(
        None,
        _("A row with padding behind it gives other logits than alone, though it does not matter which tokens are the padding."),
        _("Look for what depends on the length of the padded row: a mean over all tokens, or positions that count from the end."),
    )
