"""A finding on its way: where it is, what it says, and the edits that would mend it."""

from __future__ import annotations

from dataclasses import dataclass

from brim.records.findings import Confidence, InForce, Severity


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Text that takes the place of other text. Lines from 1, columns from 0, in characters (not bytes, as `ast` counts)."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a check found. `brim.audit.publishing` makes a Finding of it: code, patch and cell are added there."""

    rule: str
    file: str
    """The path as it is shown."""
    line: int
    end_line: int
    message: str
    confidence: Confidence = "high"
    severity: Severity | None = None
    """None: the rule's own."""
    in_force: tuple[InForce, ...] = ()
    edits: tuple[Edit, ...] = ()
    is_safe: bool = False
