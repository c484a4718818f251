"""What `brim doctor` found: in code, in configs, in the ledger of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from brim.errors import UsageError
from brim.locale import _
from brim.record import STRICT, Count, PositiveInt, Record

Severity = Literal["high", "medium", "low"]
"""high: the run is not the one that was asked for. medium: it is slower or less exact than it need be. low: worth knowing."""
Confidence = Literal["high", "medium", "low"]
"""How sure doctor is that the code does this, not how bad it would be."""
SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class InForce:
    """One row of "you set 64, in force 2"."""

    __pydantic_config__ = STRICT

    setting: str
    """As the user knows it: batch_size_per_gpu."""
    set: Value
    """What the user sets; None where there is nothing to set."""
    in_force: Value
    """What the run takes then; None where that cannot be said under this condition."""
    when: str = ""
    """The condition under which this row holds, as the code says it: `free_gb < 8`. Empty: always."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that changes what the user asked for, and where it stands."""

    __pydantic_config__ = STRICT

    rule: str
    """`brim doctor --explain RULE` tells more."""
    file: str
    line: PositiveInt
    """From 1; of a notebook: the line in the file's own code, cells one after another; of a ledger: the line of the file."""
    end_line: PositiveInt
    severity: Severity
    confidence: Confidence
    message: str
    code: str = ""
    """The line or lines that it is about."""
    in_force: tuple[InForce, ...] = ()
    """Empty where there is nothing to set, and where nothing is in force because the run stops."""
    patch: str | None = None
    """A unified diff that mends it, for `git apply` or `patch -p1` in the folder from which doctor was called."""
    is_safe: bool = False
    """Whether the patch changes only what the finding is about, so that --fix may apply it."""
    cell: Count | None = None
    """Of a notebook: the cell, from 1."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Record):
    """Everything that was found in what was looked at, the costliest first."""

    schema: ClassVar[str] = "brim.findings/1"

    targets: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    files: Count = 0
    lines: Count = 0
    ignored: Count = 0
    """Findings that a `# brim: ignore` comment holds back."""
    notes: tuple[str, ...] = ()
    """What was not looked at, and why."""

    def at_least(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of this severity and above."""
        if severity not in SEVERITIES:
            text = _("There is no severity {name!r}: it is one of {names}.")
            raise UsageError(text.format(name=severity, names=", ".join(SEVERITIES)))
        return tuple(each for each in self.findings if SEVERITIES.index(each.severity) <= SEVERITIES.index(severity))
