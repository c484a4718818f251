"""Findings as records: with their code, their fix and their place in the order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.audit.cells import cell_of
from brim.audit.patching import diffs_of
from brim.audit.rules import RULES
from brim.audit.rules.rule import GROUPS
from brim.locale import _
from brim.records.findings import SEVERITIES, Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from brim.audit.found import Found
    from brim.audit.patching import Desk
    from brim.audit.source.module import Source


def severity_of(found: Found) -> Severity:
    """The finding's own, or its rule's."""
    return found.severity or RULES[found.rule].severity


def in_order(found: Iterable[Found]) -> list[Found]:
    """The costliest first, each once: severity, confidence, group, file, line."""
    once: dict[tuple[str, str, int, int, str], Found] = {}
    for each in found:
        once.setdefault((each.rule, each.file, each.line, each.end_line, each.message), each)
    return sorted(once.values(), key=_cost)


def publish_all(
    found: Iterable[Found], sources: Mapping[str, Source], desk: Desk, notes: list[str] | None = None
) -> tuple[Finding, ...]:
    """All findings, in order. `sources` has no entry where there is no code to show, as of a ledger."""
    ordered = in_order(found)
    diffs = diffs_of([each for each in ordered if each.edits], desk)
    if notes is not None and desk.is_exhausted:
        notes.append(_("There are too many suggested fixes to check each: some are left out."))
    return tuple(_publish(each, sources.get(each.file), diffs.get(each), desk) for each in ordered)


def _publish(found: Found, source: Source | None, patch: str | None, desk: Desk) -> Finding:
    return Finding(
        rule=found.rule,
        file=found.file,
        line=max(1, found.line),
        end_line=max(1, found.line, found.end_line),
        severity=severity_of(found),
        confidence=found.confidence,
        message=found.message,
        code=code_of(found, source),
        in_force=found.in_force,
        patch=patch,
        is_safe=found.is_safe and patch is not None and not desk.checks.deletes_code(found.edits),
        cell=None if source is None else cell_of(source, found.line),
    )


def code_of(found: Found, source: Source | None) -> str:
    """The lines that a finding is about."""
    return "" if source is None else "\n".join(source.lines[max(0, found.line - 1) : max(found.line, found.end_line)])


def _cost(found: Found) -> tuple[int, int, int, str, int, str]:
    return (
        SEVERITIES.index(severity_of(found)),
        SEVERITIES.index(found.confidence),
        GROUPS.index(RULES[found.rule].group),
        found.file,
        found.line,
        found.rule,
    )
