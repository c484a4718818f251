"""What a page is about: the records of one run, one plan or one probe, each where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim.records import Emulation, Evaluation, Finding, Ledger, Measurement, Observation, Plan, RunCard, Verification


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Read by the command line, drawn by `brim.pictures.page`."""

    title: str
    run: RunCard | None = None
    batch: str = ""
    """The effective batch of the run, in the words of its banner."""
    plan: Plan | None = None
    probe: Measurement | None = None
    verification: Verification | None = None
    ledger: Ledger | None = None
    evaluations: tuple[Evaluation, ...] = ()
    timeline: Mapping[str, Any] | None = None
    """`brim.timeline/1`: a list a column."""
    observation: Observation | None = None
    emulation: Emulation | None = None
    findings: tuple[Finding, ...] = ()
    mends: Mapping[str, str] | None = None
    """How to mend what a rule finds, by its name."""
    promise: tuple[str, ...] = ()
    """What is not as promised, in sentences; empty: nothing."""
    is_checked: bool = True
    """Whether every step was held against its promise. False of a run that is too long to be read whole for a page."""
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be read, and other things that a reader should know."""
