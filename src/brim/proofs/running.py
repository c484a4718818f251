"""All proofs of one subject: made ready, run in the order in which each can explain the next, told in the order of the record."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, get_args

from brim.errors import BrimError
from brim.locale import _
from brim.proofs.accumulation import prove_accumulation
from brim.proofs.batch import check_repeats, inputs, prove_batch
from brim.proofs.causality import prove_causality
from brim.proofs.comparing import EXACT, Failed, attempt, change, is_repeatable, measure_spread
from brim.proofs.modes import training
from brim.proofs.pack import prove_pack
from brim.proofs.pad import prove_pad
from brim.proofs.signatures import Cause
from brim.proofs.verdicts import could_not_run
from brim.proofs.weights import draw
from brim.records import Proof, ProofName

if TYPE_CHECKING:
    from brim.proofs.subject import Subject

PROOFS: tuple[ProofName, ...] = get_args(ProofName)
_OTHERS: Mapping[ProofName, Callable[[Subject], Proof]] = {"pad": prove_pad, "pack": prove_pack}
Say = Callable[[str], None]


def make_ready(subject: Subject, notes: list[str]) -> Subject:
    """What only a call can tell; and weights in which faults would show, where the model's own would hide them."""
    subject.settle()
    _classify(subject)
    subject.spread = measure_spread(subject)
    if _has_a_say(subject):
        return subject
    if not subject.can_be_copied():
        notes.append(
            _("With its own weights its logits hardly depend on earlier tokens: what should not be seen would not show.")
        )
        return subject
    other = copy.copy(subject)
    other.model = copy.deepcopy(subject.model)
    draw(other.model, subject.seed)
    other.spread = measure_spread(other)
    if not _has_a_say(other):  # it has no attention at all
        return subject
    notes.append(_("With its own weights its logits hardly depend on earlier tokens, so fresh ones were drawn."))
    return other


def prove_all(subject: Subject, wanted: tuple[ProofName, ...], say: Say) -> list[Proof]:
    """The proofs that are wanted; `batch` and `causality` are run in any case, for they explain the others."""
    say("batch")
    repeats = check_repeats(subject)
    if repeats.cause is not None and repeats.cause.signature == "state-kept" and subject.can_be_copied():
        subject.is_stateful = True
    batch = _guarded(subject, "batch", lambda: prove_batch(subject, repeats))
    alone = batch.verdict == "pass"
    is_quiet = repeats.cause is None
    say("causality")
    causality = _in_both_modes(subject, "causality", lambda: prove_causality(subject, rows_are_alone=alone), is_quiet)
    root = next((proof for proof in (batch, causality) if proof.verdict == "fail" and proof.signature is not None), None)
    found: dict[ProofName, Proof] = {"batch": batch, "causality": causality}
    for name, prove in _OTHERS.items():
        if name in wanted:
            say(name)
            found[name] = _explained(_in_both_modes(subject, name, partial(prove, subject), is_quiet), root)
    if "accumulation" in wanted:
        say("accumulation")
        cause = Cause(batch.signature, batch.diagnosis, batch.mend) if batch.verdict == "fail" else None
        found["accumulation"] = _explained(
            _guarded(subject, "accumulation", lambda: prove_accumulation(subject, repeats, cause)), root
        )
    return [found[name] for name in PROOFS if name in wanted]


def _classify(subject: Subject) -> None:
    """A module of one's own that gives one answer for each row is a classifier."""
    if subject.kind != "causal-lm" or subject.is_of_transformers:
        return
    ids = subject.ids(1, subject.length)
    logits = attempt(subject, inputs(subject, ids, masked="attention_mask" in subject.signature.required))
    if not isinstance(logits, Failed) and logits.dim() == 2 and len(logits) == 1:
        subject.kind = "classification"


def _has_a_say(subject: Subject) -> bool:
    """Whether a token changes what comes after it; true where that cannot be asked."""
    if subject.kind == "seq2seq":
        return True
    ids = subject.ids(1, subject.length)
    other = ids.clone()
    other[:, -3] = subject.other(ids[:, -3])
    required = "attention_mask" in subject.signature.required
    before, after = (attempt(subject, inputs(subject, each, masked=required)) for each in (ids, other))
    if isinstance(before, Failed) or isinstance(after, Failed):
        return True
    if before.dim() == 3:
        before, after = before[:, -1], after[:, -1]
    return subject.spread > 0 and change(subject, after, before) > 10 * EXACT


def _guarded(subject: Subject, name: ProofName, prove: Callable[[], Proof]) -> Proof:
    """A proof that cannot be carried out is an error of that proof, and the others go on."""
    subject.model.eval()
    try:
        return prove()
    except BrimError:
        raise
    except Exception as error:  # noqa: BLE001 (a model of anybody's may return anything)
        return could_not_run(subject, name, Failed(error, tuple(subject.sights)))
    finally:
        subject.model.eval()


def _in_both_modes(subject: Subject, name: ProofName, prove: Callable[[], Proof], is_quiet: bool) -> Proof:
    """In evaluation mode; and where it holds there, in training mode too, with fewer cases."""
    proof = _guarded(subject, name, prove)
    if proof.verdict != "pass" or not is_quiet:
        return proof
    ids = subject.ids(1, subject.length)
    with training(subject.model):
        if not is_repeatable(subject, inputs(subject, ids, masked="attention_mask" in subject.signature.required)):
            return dataclasses.replace(
                proof, diagnosis=_("Tested in evaluation mode only: in training mode it has noise of its own.")
            )
        subject.is_brief = True
        try:
            again = prove()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as above)
            again = could_not_run(subject, name, Failed(error, tuple(subject.sights)))
        finally:
            subject.is_brief = False
    if again.verdict == "pass":
        return dataclasses.replace(proof, value=max(proof.value or 0.0, again.value or 0.0))
    text = _("It holds in evaluation mode, and not in training mode. {diagnosis}").format(diagnosis=again.diagnosis)
    return dataclasses.replace(again, diagnosis=text)


def _explained(proof: Proof, root: Proof | None) -> Proof:
    """A failure that follows from another is told as that: one fault, one cause."""
    if root is None or proof.verdict != "fail":
        return proof
    text = _("This follows from what failed under {name}, where the cause is told.").format(name=root.name)
    return dataclasses.replace(proof, signature=root.signature, diagnosis=text, mend=root.mend)
