"""Pack invariance: several sequences in one row, told apart by positions that begin anew, give what each gives alone."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import torch

from brim.locale import _
from brim.proofs import signatures
from brim.proofs.batch import inputs
from brim.proofs.comparing import Failed, attempt, change, measure_of_logits, tolerance_of
from brim.proofs.modules import inner_model
from brim.proofs.rows import packed
from brim.proofs.signatures import Cause
from brim.proofs.verdicts import could_not_run, failed, not_applicable, passed

if TYPE_CHECKING:
    from brim.proofs.subject import Subject
    from brim.records import Proof

_RECURRENT = re.compile(r"Mamba|SSM|Rwkv|xLSTM|Recurrent|LinearAttention|DeltaNet|ShortConv|LightningAttention|^(GRU|LSTM|RNN)$")


def prove_pack(subject: Subject) -> Proof:
    """Three sequences in one row."""
    why_not = _reason_against(subject)
    if why_not:
        return not_applicable(subject, "pack", why_not)
    tested = _("three sequences in one row, with position_ids that begin anew and no mask, against each alone")
    third = subject.length // 3
    rows = [subject.ids(1, length, seed=40 + length)[0] for length in (third + 1, third - 2, third)]
    alone = [attempt(subject, inputs(subject, row[None], masked=False)) for row in rows]
    broken = next((each for each in alone if isinstance(each, Failed)), None)
    if broken is not None:
        return could_not_run(subject, "pack", broken)
    wanted = torch.cat([each[0] for each in alone if isinstance(each, torch.Tensor)])
    tolerance = tolerance_of(subject, packed(subject, rows))
    found = attempt(subject, packed(subject, rows))
    if isinstance(found, Failed):
        said = _("A packed row cannot be run: {why}").format(why=found.words)
        return failed(
            subject,
            "pack",
            tested,
            Cause(None, said, _("Do not pack, or take position_ids of shape [1, tokens].")),
            None,
            tolerance,
        )
    value = max(change(subject, found[0], wanted), _second_row(subject, rows, wanted))
    if value <= tolerance:
        return passed(subject, "pack", tested, value, tolerance)
    cause = _why(subject, rows, found, tolerance)
    if subject.is_of_transformers:
        return _library_cannot(subject, cause, value, tolerance)
    return failed(subject, "pack", tested, cause, value, tolerance)


def _second_row(subject: Subject, rows: list[torch.Tensor], wanted: torch.Tensor) -> float:
    """The same sequences in a second row, whose boundaries are elsewhere than in the first."""
    if subject.attention == "flash2":
        return 0.0  # which takes packed rows one at a time
    one, two = packed(subject, [*rows[1:], rows[0]]), packed(subject, rows)
    found = attempt(subject, {name: torch.cat([one[name], two[name]]) for name in one})
    return change(subject, found[1], wanted) if isinstance(found, torch.Tensor) and len(found) == 2 else 0.0


def _library_cannot(subject: Subject, cause: Cause, value: float, tolerance: float) -> Proof:
    """A class of transformers itself, which nobody here can mend: it is a limit of the class, and no fault of the model."""
    why = _(
        "{name} of transformers cannot be packed: it does not make boundaries where position_ids begin anew, so that packed sequences "
        "change each other (by {value:.1f} standard deviations of the logits). Do not pack."
    ).format(name=type(inner_model(subject.model)).__name__, value=value)
    proof = not_applicable(subject, "pack", why)
    return dataclasses.replace(proof, value=value, tolerance=tolerance, measure=measure_of_logits(), signature=cause.signature)


def _reason_against(subject: Subject) -> str:
    if subject.kind != "causal-lm":
        return _("Only causal language models are packed.")
    if not subject.takes("position_ids"):
        return _("It takes no position_ids, so packed sequences cannot be told apart: do not pack.")
    if "attention_mask" in subject.signature.required:
        return _("It cannot be called without an attention mask, and with one packed sequences are not told apart: do not pack.")
    if getattr(getattr(subject.model, "active_peft_config", None), "is_prompt_learning", False):
        return _("Its virtual tokens stand before the row and not before each sequence in it: do not pack.")
    recurrent = [type(each).__name__ for each in subject.model.modules() if _RECURRENT.search(type(each).__name__)]
    if recurrent:
        return _("Its {layer} carries state from token to token, over the boundaries of packed sequences: do not pack.").format(
            layer=recurrent[0]
        )
    return ""


def _why(subject: Subject, rows: list[torch.Tensor], before: torch.Tensor, tolerance: float) -> Cause:
    """Whether the second sequence changes when the first does."""
    other = [subject.other(rows[0]), *rows[1:]]
    after = attempt(subject, packed(subject, other))
    first = len(rows[0])
    if isinstance(after, Failed) or change(subject, after[0, first:], before[0, first:]) > tolerance:
        return signatures.no_boundaries()
    return signatures.positions_not_restarted()
