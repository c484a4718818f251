"""From what was found to a proof's record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from brim.locale import _
from brim.proofs import signatures
from brim.proofs.comparing import Failed, measure_of_logits
from brim.proofs.signatures import Cause
from brim.records import Proof, ProofName

if TYPE_CHECKING:
    from brim.proofs.subject import Subject


def passed(subject: Subject, name: ProofName, tested: str, value: float, tolerance: float, **more: Any) -> Proof:
    """It holds."""
    measure = more.pop("measure", None) or measure_of_logits()
    return Proof(
        name=name, verdict="pass", attention=subject.attention, tested=tested, measure=measure, value=value, tolerance=tolerance, **more
    )  # fmt: skip


def failed(
    subject: Subject,
    name: ProofName,
    tested: str,
    cause: Cause,
    value: float | None = None,
    tolerance: float | None = None,
    **more: Any,
) -> Proof:
    """It does not, and why."""
    measure = more.pop("measure", None) or measure_of_logits()
    value = value if value is not None and math.isfinite(value) else None
    tolerance = tolerance if tolerance is not None and math.isfinite(tolerance) else None
    return Proof(
        name=name, verdict="fail", attention=subject.attention, tested=tested, measure=measure, value=value, tolerance=tolerance,
        signature=cause.signature, diagnosis=cause.diagnosis, mend=cause.mend, **more,
    )  # fmt: skip


def not_applicable(subject: Subject, name: ProofName, why: str) -> Proof:
    """It has no meaning for this model."""
    return Proof(name=name, verdict="not-applicable", attention=subject.attention, tested=_("nothing"), diagnosis=why)


def could_not_run(subject: Subject, name: ProofName, failure: Failed) -> Proof:
    """The model does not run; where what its layers were handed explains that, it is a failure with a cause."""
    said = _("The model does not run: {kind}: {why}").format(kind=type(failure.error).__name__, why=failure.words)
    tested = _("one row of random tokens")
    known = known_cause(subject, failure, rows=1)
    if known is not None:
        return failed(subject, name, tested, Cause(known.signature, f"{known.diagnosis} {said}", known.mend))
    return Proof(
        name=name, verdict="error", attention=subject.attention, tested=tested, diagnosis=said,
        mend=_(
            "Make one call work first, of one row of {tokens} tokens with a mask of ones. If the model has fewer positions, give --seq-len."
        ).format(tokens=subject.length),
    )  # fmt: skip


def known_cause(subject: Subject, failure: Failed, *, rows: int) -> Cause | None:
    """What layers were handed before it died."""
    if subject.is_of_transformers:
        return None
    flat = signatures.of_masks([sight for sight in failure.sights if sight.is_2d])
    return flat or signatures.of_hidden_states(failure.sights, rows, subject.length)
