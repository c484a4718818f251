"""Causality: a later token must not change an earlier logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brim.locale import _
from brim.proofs import signatures
from brim.proofs.comparing import Failed, attempt, change, tolerance_of
from brim.proofs.rows import together
from brim.proofs.signatures import Cause
from brim.proofs.verdicts import could_not_run, failed, known_cause, not_applicable, passed

if TYPE_CHECKING:
    import torch

    from brim.proofs.subject import Subject
    from brim.records import Proof

_BATCHES = (1, 3)


@dataclass(frozen=True)
class Way:
    """One way to call a model."""

    rows: int
    masked: bool
    labelled: bool = False


def prove_causality(subject: Subject, *, rows_are_alone: bool = True) -> Proof:
    """With and without a mask of ones, with labels too, for a token near the start, in the middle, and at the end.

    At batch size 1 and, unless rows are known to change each other, 3.
    """
    if subject.kind in {"masked-lm", "classification"}:
        return not_applicable(subject, "causality", _("It is no model of next tokens: every token may see all others."))
    tested = _(
        "one token changed near the start, in the middle and at the end; batch sizes 1 and 3; with and without a mask of ones"
    )
    found = {way: _look(subject, way) for way in _ways(subject, rows_are_alone)}
    seen = {way: each for way, each in found.items() if isinstance(each, Seen)}
    died = {way: each for way, each in found.items() if isinstance(each, Failed) and _must_run(subject, way)}
    if not seen:
        return could_not_run(subject, "causality", next(iter(died.values())))
    first = next(iter(seen))
    tolerance = tolerance_of(subject, _inputs(subject, subject.ids(1, subject.length), first))
    worst = max(seen.values(), key=lambda each: each.value)
    if worst.value > tolerance:
        explained = sorted((each for each in seen.values() if each.value > tolerance), key=lambda each: each.cause is None)
        return failed(subject, "causality", tested, explained[0].cause or _unexplained(worst), worst.value, tolerance)
    alone = {way: failure for way, failure in died.items() if way.rows == 1}
    if alone:
        return failed(subject, "causality", tested, _dies(subject, *next(iter(alone.items()))), worst.value, tolerance)
    return passed(subject, "causality", tested, worst.value, tolerance)


def _ways(subject: Subject, rows_are_alone: bool) -> list[Way]:
    masks = [True, False] if subject.takes("attention_mask") else [False]
    if "attention_mask" in subject.signature.required:
        masks = [True]
    batches = _BATCHES if rows_are_alone and not subject.is_brief else _BATCHES[:1]
    ways = [Way(count, masked) for masked in masks for count in batches]
    return [*ways, Way(1, masks[0], labelled=True)] if subject.has_loss and subject.kind == "causal-lm" else ways


def _must_run(subject: Subject, way: Way) -> bool:
    """A model that cannot do without a mask need not, and one that returns a loss alone has no logits to compare."""
    return not way.labelled and (way.masked or not subject.takes("attention_mask"))


def _dies(subject: Subject, way: Way, failure: Failed) -> Cause:
    said = _("It runs without a mask and dies with one: {why}").format(why=failure.words)
    known = known_cause(subject, failure, rows=way.rows)
    if known is not None:
        return Cause(known.signature, f"{known.diagnosis} {said}", known.mend)
    return Cause(None, said, _("Take an attention mask of ones and zeros, [batch, tokens], as collators give it."))


@dataclass(frozen=True)
class Seen:
    """By how much earlier logits moved, in the worst case of one way to call."""

    value: float
    touched: tuple[tuple[int, tuple[int, ...]], ...]
    """Of each token that was changed: which earlier ones moved."""
    cause: Cause | None


def _inputs(subject: Subject, ids: torch.Tensor, way: Way) -> dict[str, Any]:
    if subject.kind == "seq2seq":
        source = subject.ids(len(ids), subject.length, seed=9)
        return {**together(list(source), masked=way.masked), "decoder_input_ids": ids}
    batch = together(list(ids), masked=way.masked)
    return {**batch, "labels": ids} if way.labelled else batch


def _look(subject: Subject, way: Way) -> Seen | Failed:
    length = subject.length
    ids = subject.ids(way.rows, length)
    before = attempt(subject, _inputs(subject, ids, way))
    cause = None if subject.is_of_transformers else signatures.of_masks(subject.sights)
    if isinstance(before, Failed):
        return before
    if before.dim() != 3 or before.shape[:2] != ids.shape:
        return Failed(ValueError(f"logits {list(before.shape)} for ids {list(ids.shape)}"), tuple(subject.sights))
    value, touched = 0.0, []
    for place in (length // 2,) if subject.is_brief else sorted({1, length // 2, length - 1}):
        other = ids.clone()
        other[:, place] = subject.other(ids[:, place])
        after = attempt(subject, _inputs(subject, other, way))
        if isinstance(after, Failed):
            return after
        value = max(value, change(subject, after[:, :place], before[:, :place]))
        moved = (after - before)[:, :place].abs().amax(dim=(0, 2))
        reached = moved > max(float(moved.max()) / 100, 1e-5 * subject.spread)
        touched.append((place, tuple(reached.nonzero().flatten().tolist())))
    return Seen(value, tuple(touched), cause)


def _unexplained(seen: Seen) -> Cause:
    """By own attention, whose mask nobody sees: what can be said is which tokens saw the future."""
    late = [(place, touched) for place, touched in seen.touched if place > 1 and touched]
    if late and all(touched == (place - 1,) for place, touched in late):
        place = late[-1][0]
        return Cause(
            "mask-not-causal",
            _("Every token sees the next one: another token {place} changes the logits at {before}, and none before.").format(
                place=place, before=place - 1
            ),
            _("The mask is one off: a token may see itself and what stands before, torch.tril(..., diagonal=0)."),
        )
    place, touched = max(seen.touched, key=lambda each: len(each[1]))
    return Cause(
        "mask-not-causal",
        _("Tokens see the future: another token {place} changes the logits from token {first} on.").format(
            place=place, first=touched[0] if touched else 0
        ),
        _(
            "Attention needs a causal mask or is_causal=True, and nothing else may reduce over the tokens: build masks for layers of "
            "transformers with create_causal_mask(...)."
        ),
    )
