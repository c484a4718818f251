"""What the checks found, made ready for people: with its code, its patch and its place in the order of cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from brim.audit.cells import cell_of
from brim.audit.patching import patch_of
from brim.audit.rules import RULES
from brim.audit.rules.rule import Group
from brim.records.findings import SEVERITIES, Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from brim.audit.found import Found
    from brim.audit.patching import Desk
    from brim.audit.source.module import Source

GROUPS: Final[tuple[Group, ...]] = get_args(Group)


def severity_of(found: Found) -> Severity:
    """The finding's own, or its rule's."""
    return found.severity or RULES[found.rule].severity


def in_order(found: Iterable[Found]) -> list[Found]:
    """The costliest first, each once: severity, confidence, group, file, line."""
    once: dict[tuple[str, str, int, int, str], Found] = {}
    for each in found:
        once.setdefault((each.rule, each.file, each.line, each.end_line, each.message), each)
    return sorted(once.values(), key=_cost)


def publish(found: Found, source: Source | None, desk: Desk) -> Finding:
    """A finding as it leaves doctor. `source` is None where there is no code to show, as of a ledger."""
    patch = patch_of(found.edits, desk) if found.edits else None
    return Finding(
        rule=found.rule,
        file=found.file,
        line=max(1, found.line),
        end_line=max(1, found.line, found.end_line),
        severity=severity_of(found),
        confidence=found.confidence,
        message=found.message,
        code=_code(found, source),
        in_force=found.in_force,
        patch=patch,
        is_safe=found.is_safe and patch is not None,
        cell=None if source is None else cell_of(source, found.line),
    )


def publish_all(found: Iterable[Found], sources: Mapping[str, Source], desk: Desk) -> tuple[Finding, ...]:
    """All of them, in order."""
    return tuple(publish(each, sources.get(each.file), desk) for each in in_order(found))


def _code(found: Found, source: Source | None) -> str:
    if source is None:
        return ""
    return "\n".join(source.text.split("\n")[max(0, found.line - 1) : max(found.line, found.end_line)])


def _cost(found: Found) -> tuple[int, int, int, str, int, str]:
    return (
        SEVERITIES.index(severity_of(found)),
        SEVERITIES.index(found.confidence),
        GROUPS.index(RULES[found.rule].group),
        found.file,
        found.line,
        found.rule,
    )
