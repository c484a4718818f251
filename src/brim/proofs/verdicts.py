"""From what was found to a proof's record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from brim.locale import _
from brim.proofs.comparing import Failed, measure_of_logits
from brim.records import Proof, ProofName

if TYPE_CHECKING:
    from brim.proofs.signatures import Cause
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
    return Proof(
        name=name, verdict="fail", attention=subject.attention, tested=tested, measure=measure, value=value, tolerance=tolerance,
        signature=cause.signature, diagnosis=cause.diagnosis, mend=cause.mend, **more,
    )  # fmt: skip


def not_applicable(subject: Subject, name: ProofName, why: str) -> Proof:
    """It has no meaning for this model."""
    return Proof(name=name, verdict="not-applicable", attention=subject.attention, tested=_("nothing"), diagnosis=why)


def could_not_run(subject: Subject, name: ProofName, failure: Failed) -> Proof:
    """Nothing is known: the model does not run."""
    return Proof(
        name=name, verdict="error", attention=subject.attention, tested=_("one row of random tokens"),
        diagnosis=_("The model does not run: {kind}: {why}").format(kind=type(failure.error).__name__, why=failure.words),
        mend=_("Make one call of one row work first: model(input_ids) of shape {shape}.").format(shape=f"[1, {subject.length}]"),
    )  # fmt: skip
