"""How to do it again: commands, versions, and what was taken for granted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _
from brim.pictures.markup import Html, join, tag
from brim.pictures.parts import Section, facts, folded, listed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from brim.pictures.subject import Subject


def repeat_section(subject: Subject) -> Section | None:
    """Always the same order: commands first."""
    assumed = _unique(_all(subject, "assumptions"))
    warned = _unique(_all(subject, "warnings"))
    noted = _unique([*_all(subject, "notes"), *_header_notes(subject), *subject.notes])
    parts = [
        tag("pre", tag("code", "\n".join(subject.commands))) if subject.commands else None,
        _list(_("Warnings"), warned),
        _list(_("Assumed"), assumed),
        _list(_("Worth knowing"), noted),
        _configuration(subject),
        _versions(subject),
    ]
    found = [part for part in parts if part]
    return Section("repeat", _("To repeat it"), join(found)) if found else None


def _all(subject: Subject, name: str) -> Iterable[str]:
    for record in (subject.run, subject.plan, subject.probe, subject.observation):
        yield from getattr(record, name, ())


def _header_notes(subject: Subject) -> Iterable[str]:
    if subject.ledger is not None:
        for header in subject.ledger.headers:
            yield from header.notes


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _list(title: str, texts: list[str]) -> Html | None:
    return join([tag("h3", title), listed(texts)]) if texts else None


def _configuration(subject: Subject) -> Html | None:
    if subject.ledger is None or not subject.ledger.headers:
        return None
    found = subject.ledger.headers[-1].configuration
    return folded(_("Settings of the run"), facts((name, str(value)) for name, value in found.items())) if found else None


def _versions(subject: Subject) -> Html | None:
    found: dict[str, str] = {}
    for record in (subject.probe, subject.observation, subject.run):
        found |= getattr(record, "versions", {}) if record is not None else {}
    if subject.ledger is not None and subject.ledger.headers:
        found |= subject.ledger.headers[-1].versions
    if subject.plan is not None and subject.plan.brim_version:
        found.setdefault("brim", subject.plan.brim_version)
    return join([tag("h3", _("Versions")), facts(found.items())]) if found else None
