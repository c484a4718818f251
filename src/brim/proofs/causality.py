"""Causality: a later token must not change an earlier logit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.locale import _
from brim.proofs import signatures
from brim.proofs.comparing import Failed, attempt, change, tolerance_of
from brim.proofs.rows import together
from brim.proofs.signatures import Cause
from brim.proofs.verdicts import could_not_run, failed, not_applicable, passed

if TYPE_CHECKING:
    import torch

    from brim.proofs.subject import Subject
    from brim.records import Proof

_BATCHES = (1, 3)


def prove_causality(subject: Subject, *, rows_are_alone: bool = True) -> Proof:
    """With and without a mask of ones, for a token near the start, in the middle, and at the end.

    At batch size 1 and, unless rows are known to change each other, 3.
    """
    if subject.kind in {"masked-lm", "classification"}:
        return not_applicable(subject, "causality", _("It is no model of next tokens: every token may see all others."))
    tested = _(
        "one token changed near the start, in the middle and at the end; batch sizes 1 and 3; with and without a mask of ones"
    )
    batches = _BATCHES if rows_are_alone else _BATCHES[:1]
    found = [_look(subject, count, masked=masked) for masked in _masks(subject) for count in batches]
    seen = [each for each in found if isinstance(each, _Seen)]
    if not seen:
        failures = [each for each in found if isinstance(each, Failed)]
        return could_not_run(subject, "causality", failures[0])
    tolerance = tolerance_of(
        subject, _inputs(subject, subject.ids(1, subject.length), masked="attention_mask" in subject.signature.required)
    )
    worst = max(seen, key=lambda each: each.value)
    if worst.value <= tolerance:
        return passed(subject, "causality", tested, worst.value, tolerance)
    explained = sorted((each for each in seen if each.value > tolerance), key=lambda each: each.cause is None)
    return failed(subject, "causality", tested, explained[0].cause or _unexplained(worst), worst.value, tolerance)


class _Seen:
    """By how much earlier logits moved, in the worst case of one batch."""

    def __init__(self, value: float, changed: int, touched: list[int], cause: Cause | None) -> None:
        self.value = value
        self.changed = changed
        self.touched = touched
        self.cause = cause


def _masks(subject: Subject) -> tuple[bool, ...]:
    if not subject.takes("attention_mask"):
        return (False,)
    return (True,) if "attention_mask" in subject.signature.required else (True, False)


def _inputs(subject: Subject, ids: torch.Tensor, *, masked: bool) -> dict[str, Any]:
    if subject.kind != "seq2seq":
        return together(list(ids), masked=masked)
    source = subject.ids(len(ids), subject.length, seed=9)
    return {**together(list(source), masked=masked), "decoder_input_ids": ids}


def _look(subject: Subject, count: int, *, masked: bool) -> _Seen | Failed:
    length = subject.length
    ids = subject.ids(count, length)
    before = attempt(subject, _inputs(subject, ids, masked=masked))
    cause = signatures.of_masks(subject.sights)
    if isinstance(before, Failed):
        return before
    if before.dim() != 3 or before.shape[:2] != ids.shape:
        return Failed(ValueError(f"logits {list(before.shape)} for ids {list(ids.shape)}"))
    worst = _Seen(0.0, 0, [], cause)
    for place in sorted({1, length // 2, length - 1}):
        other = ids.clone()
        other[:, place] = subject.other(ids[:, place])
        after = attempt(subject, _inputs(subject, other, masked=masked))
        if isinstance(after, Failed):
            return after
        value = change(after[:, :place], before[:, :place])
        if value > worst.value:
            moved = (after - before)[:, :place].abs().amax(dim=(0, 2))
            touched = (moved > moved.max() / 100).nonzero().flatten().tolist()
            worst = _Seen(value, place, touched, cause)
    return worst


def _unexplained(seen: _Seen) -> Cause:
    """By own attention, whose mask nobody sees: what can be said is which tokens saw the future."""
    if seen.touched == [seen.changed - 1]:
        return Cause(
            "mask-not-causal",
            _("Every token sees the next one: another token {place} changes the logits at {before}, and none before.").format(
                place=seen.changed, before=seen.changed - 1
            ),
            _("The mask is one off: a token may see itself and what stands before, torch.tril(..., diagonal=0)."),
        )
    return Cause(
        "mask-not-causal",
        _("Tokens see the future: another token {place} changes the logits from token {first} on.").format(
            place=seen.changed, first=seen.touched[0] if seen.touched else 0
        ),
        _(
            "Attention needs a causal mask or is_causal=True, and nothing else may reduce over the tokens: build masks for layers of "
            "transformers with create_causal_mask(...)."
        ),
    )
