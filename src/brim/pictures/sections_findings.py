"""What the doctor found in the run, and what was proven of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _
from brim.pictures import words
from brim.pictures.markup import Html, join, tag
from brim.pictures.parts import Section, Table, facts, listed, paragraphs, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.pictures.subject import Subject
    from brim.records import Finding, Proof, Verification


def findings_section(subject: Subject) -> Section | None:
    """Also where nothing was found, if somebody looked."""
    if subject.ledger is None and not subject.findings:
        return None
    if not subject.findings:
        text = _("The doctor found nothing in this run.")
        if not subject.is_checked:
            text = _("The run is long, and was not audited for this page: `brim doctor` does that.")
        return Section("findings", _("Doctor's findings"), paragraphs(text))
    found = [_finding(each, subject.mends or {}) for each in subject.findings]
    return Section("findings", _("Doctor's findings"), tag("ul", *found, class_="findings"))


def _finding(each: Finding, mends: Mapping[str, str]) -> Html:
    rows = [
        _("{setting}: you set {set}, in force {in_force}").format(setting=row.setting, set=row.set, in_force=row.in_force)
        for row in each.in_force
    ]
    where = _("{file}, line {line}").format(file=each.file, line=each.line)
    head = _("Severity {severity}: {rule}").format(severity=words.severity(each.severity), rule=each.rule)
    mend = mends.get(each.rule, "")
    return tag(
        "li", tag("b", head), tag("p", each.message), listed(rows),
        tag("p", _("Mend: {text}").format(text=mend)) if mend else None,
        tag("p", tag("code", where), class_="small"), class_=each.severity,
    )  # fmt: skip


def proofs_section(subject: Subject) -> Section | None:
    """The five proofs, where they ran."""
    found = subject.verification
    if found is None:
        return None
    rows = [
        [proof.name, words.proof_verdict(proof.verdict), proof.attention or "–", _worst(proof.value), _worst(proof.tolerance),
         words.proof(proof.name)]
        for proof in found.proofs
    ]  # fmt: skip
    heads = [_("proof"), _("verdict"), _("attention"), _("worst"), _("may be"), _("the law")]
    told = [_told(proof) for proof in found.proofs if proof.verdict in {"fail", "error"}]
    body = join(
        [
            paragraphs(_headline(found)),
            table(Table(heads, rows, frozenset({0, 1, 2, 5})), _("Proofs")),
            tag("ul", *told, class_="findings") if told else None,
            facts([(_("Model"), found.model), (_("Class"), found.class_name), (_("A smaller copy"), found.shrunk)]),
            listed(found.notes),
        ]
    )
    return Section("proofs", _("Proofs"), body)


def _headline(found: Verification) -> str:
    if found.is_proven:
        return _("The model is right at every batch size that was tried.")
    names = ", ".join(dict.fromkeys(proof.name for proof in found.failures()))
    return _("The model is not right: {names}. What was trained with it may be wrong even where it ran.").format(names=names)


def _told(proof: Proof) -> Html:
    mend = tag("p", _("Mend: {text}").format(text=proof.mend)) if proof.mend else None
    return tag("li", tag("b", proof.name), tag("p", proof.diagnosis), mend, class_="high")


def _worst(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
