"""A verification of a model, or of a run's files, on the terminal: pure views of the records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli._output import Column, indented, show, table
from brim.locale import _
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from brim.records import PartVerdict, Proof, ProofName, RunCheck, Verification

_MARKS = {"pass": "✓", "fail": "✗", "not-applicable": "-", "error": "!"}


def verification_blocks(found: Verification) -> Iterator[RenderableType]:
    """The whole answer."""
    yield from (_headline(found), "", _proofs(found))
    told: set[str] = set()
    for proof in found.proofs:
        if proof.verdict != "pass":
            yield from ("", *_explained(proof, told, several=_has_several(found)))
    for proof in found.proofs:
        if proof.verdict == "pass" and proof.diagnosis:
            yield from ("", f"{proof.name}: {proof.diagnosis}")
    if found.notes:
        yield from ("", *(_("Note: {text}").format(text=text) for text in found.notes))
    yield from ("", _closing(found))


def show_line(found: Verification) -> None:
    """One of several models."""
    words = ", ".join(f"{proof.name} {proof.verdict}" for proof in found.proofs if proof.verdict != "pass") or _("all pass")
    mark = _MARKS["pass" if found.is_proven else "fail"]
    show(f"{mark}  {found.model:32}  {words}")


def show_failures(found: Sequence[Verification]) -> None:
    """Of several models: what is wrong with those that are not right."""
    wrong = [each for each in found if not each.is_proven]
    for each in wrong:
        show("", *verification_blocks(each))
    seconds = sum(each.seconds for each in found)
    show(
        "",
        _("Models: {count}, of which {wrong} are not right. {seconds:.1f} s.").format(
            count=len(found), wrong=len(wrong), seconds=seconds
        ),
    )


def _headline(found: Verification) -> str:
    words = [f"{found.model} ({found.class_name})" if found.class_name != found.model else found.model]
    words.append(_("{count:,} parameters").format(count=found.parameters))
    words.append(found.precision)
    words.append(_("its own weights") if found.weights == "own" else _("fresh weights"))
    text = ", ".join(words)
    return text if found.shrunk is None else text + "\n" + _("A shrunk copy: {what}.").format(what=found.shrunk)


def _has_several(found: Verification) -> bool:
    return len({proof.attention for proof in found.proofs}) > 1


def _proofs(found: Verification) -> Table:
    columns = (
        Column(""), Column(_("Proof")), Column(_("Attention"), rank=1), Column(_("Verdict")), Column(_("Worst"), right=True),
        Column(_("May be"), right=True, rank=2), Column(_("The law"), rank=3),
    )  # fmt: skip
    return table(columns, [_row(proof) for proof in found.proofs])


def _law(name: ProofName) -> str:
    return {
        "causality": _("a later token changes no earlier logit"),
        "batch": _("a row alone equals the row in a batch"),
        "pad": _("padding changes nothing for real tokens"),
        "pack": _("packed sequences equal each alone"),
        "accumulation": _("slices have the gradient of one batch"),
    }[name]


def _row(proof: Proof) -> tuple[str, ...]:
    return (
        _MARKS[proof.verdict], proof.name, proof.attention or "-", proof.verdict,
        "-" if proof.value is None else f"{proof.value:.1e}",
        "-" if proof.tolerance is None else f"{proof.tolerance:.0e}",
        _law(proof.name),
    )  # fmt: skip


def _explained(proof: Proof, told: set[str], *, several: bool) -> list[RenderableType]:
    """What is wrong with it; how to mend it is told once."""
    where = f" ({proof.attention})" if several and proof.attention else ""
    lines = [proof.diagnosis]
    if proof.norm_ratio is not None and proof.cosine is not None:
        text = _("In the worst case the cosine of the two gradients is {cosine:.6f} and the ratio of their norms {ratio:.4g}.")
        lines.append(text.format(cosine=proof.cosine, ratio=proof.norm_ratio))
    if proof.mend:
        lines.append(_("Mend: {text}").format(text=_("as above.") if proof.mend in told else proof.mend))
        told.add(proof.mend)
    if proof.verdict == "fail":
        lines.append(_("Tested: {text}.").format(text=proof.tested))
    heading = f"{proof.name}{where}: {proof.verdict}"
    return [heading, *(indented(line) for line in lines)]


def _closing(found: Verification) -> str:
    seconds = _("{seconds:.1f} s").format(seconds=found.seconds)
    failures = found.failures()
    if not failures:
        return _("Right at every batch size that was tried. {seconds}.").format(seconds=seconds)
    names = ", ".join(dict.fromkeys(proof.name for proof in failures))
    return _("Not right: {names}. What was trained with it may be wrong even where it ran. {seconds}.").format(
        names=names, seconds=seconds
    )


def show_run(found: RunCheck) -> None:
    """Part by part, then every file that is damaged."""
    from brim.trainer.manifest import words_of

    columns = (Column(_("Part")), Column(_("Size"), right=True, rank=1), Column(_("Verdict")))
    words: dict[PartVerdict, str] = {
        "whole": _("✓ whole"), "not-fully-verified": _("! not fully verified"), "damaged": _("✗ damaged"),
    }  # fmt: skip
    show(table(columns, [(part.name, format_bytes(part.size_bytes), words[part.verdict]) for part in found.parts]), "")
    for part in found.parts:
        show(*(f"{part.name}: {words_of(damage)}" for damage in part.damages))
    for part in found.parts:
        if part.unverified:
            text = _(
                "{part} is not fully verified: an older brim wrote it, without a checksum of every byte of its files ({count})."
            )
            show(text.format(part=part.name, count=len(part.unverified)))
    show(_run_closing(found))


def _run_closing(found: RunCheck) -> str:
    if found.verdict != "damaged":
        if found.verdict == "whole":
            return _("Every byte is as it was written.")
        return _("No damage was found, and not every byte could be checked.")
    damaged = [part.name for part in found.parts if part.verdict == "damaged"]
    from brim.trainer.request import RUN_FILE

    checkpoint = _last_whole(found)
    if any(damage.file == RUN_FILE for part in found.parts for damage in part.damages):
        text = _("Damaged: {parts}. Restore {file} from a backup: the run cannot be resumed without it.")
    elif checkpoint is None:
        text = _("Damaged: {parts}. Restore the files from a backup.")
    elif "model" in damaged:
        text = _("Damaged: {parts}. `brim train --resume {folder}` continues from {checkpoint} and saves the model again.")
    else:
        text = _("Damaged: {parts}. `brim train --resume {folder}` continues from {checkpoint}.")
    return text.format(parts=", ".join(damaged), folder=found.folder, checkpoint=checkpoint, file=RUN_FILE)


def _last_whole(found: RunCheck) -> str | None:
    """The newest checkpoint that is not damaged."""
    from brim.trainer.manifest import step_of

    whole = [Path(part.name) for part in found.parts if part.name.startswith("checkpoint-") and part.verdict != "damaged"]
    return max(whole, key=lambda path: step_of(path) or 0).name if whole else None
