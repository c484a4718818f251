"""Whether the files of a run are as they were written: for `brim verify --run`, and before a run continues."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.errors import RecordError, UsageError
from brim.locale import _
from brim.machine.screen import redraw, say
from brim.records import FileDamage, PartCheck, PartVerdict, RunCard, RunCheck
from brim.sizes import format_bytes
from brim.step.ledger import free_name
from brim.step.ledger_repair import check_lines, repair_ledger
from brim.trainer.evaluations import damaged_lines
from brim.trainer.manifest import (
    MANIFEST,
    MODEL_MANIFEST,
    Check,
    Progress,
    check_files,
    check_model_without_manifest,
    checkpoints,
    last_checkpoint,
    not_fully_verified,
    step_of,
    words_of,
)
from brim.trainer.request import EVALUATIONS_FILE, LEDGER_FILE, RUN_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

_HEARTBEAT_SECONDS: Final = 30.0
_LIVE_SECONDS: Final = 0.2
_BAR: Final = 20
_RANKS: Final[dict[PartVerdict, int]] = {"whole": 0, "not-fully-verified": 1, "damaged": 2}


class TellReading:
    """A bar on a terminal; elsewhere a line every half a minute. Both only where reading takes so long."""

    def __init__(self) -> None:
        self._is_live = sys.stderr is not None and sys.stderr.isatty()
        self._told = time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        """So many bytes of one checkpoint are read."""
        now, is_last = time.monotonic(), done >= total
        if is_last and self._is_live:
            redraw()
        if is_last or now - self._told < (_LIVE_SECONDS if self._is_live else _HEARTBEAT_SECONDS):
            return
        self._told = now
        text = _("Verifying {name}: {done} of {total}")
        line = text.format(name=name, done=format_bytes(done), total=format_bytes(total))
        if self._is_live:
            filled = _BAR * done // max(1, total)
            redraw(f"{line} [{'#' * filled}{'.' * (_BAR - filled)}]")
        else:
            say(line)


def verify_run(folder: str | Path, *, progress: Progress | None = None) -> RunCheck:
    """Read every file of a run, finished or not, and compare it with the checksum that was taken when it was written."""
    place = Path(folder)
    found = checkpoints(place)
    if not (place / RUN_FILE).is_file() and not (place / LEDGER_FILE).is_file() and not found:
        raise UsageError(
            _("{folder} is not the folder of a run: it has no {name}, no ledger and no checkpoint.").format(
                folder=place, name=RUN_FILE
            ),
            hint=_("Give the folder that `brim train -o` wrote."),
        )
    is_finished = any((place / name).is_file() for name in ("config.json", "adapter_config.json", MODEL_MANIFEST))
    parts = [_part("records", _check_records(place))]
    if is_finished:
        parts.append(_part("model", _check_model(place, progress)))
    parts += [_part(path.name, check_files(path, progress=progress)) for path in found]
    verdict = max((part.verdict for part in parts), key=_RANKS.__getitem__)
    return RunCheck(folder=str(place), finished=is_finished, verdict=verdict, parts=tuple(parts))


def model_damage(folder: Path) -> str | None:
    """What is wrong with the trained model of a finished run, as a sentence; None if nothing is known to be."""
    if not (folder / MODEL_MANIFEST).is_file():
        return None
    damages = check_files(folder, name=MODEL_MANIFEST, progress=TellReading()).damages
    return words_of(damages[0]) if damages else None


def repair_records(folder: Path, say: Callable[[str], None]) -> None:
    """Before a run continues: what its records can still say, and what is lost."""
    ledger = folder / LEDGER_FILE
    if ledger.is_file():
        if not repair_ledger(ledger, say).records:
            copy = free_name(ledger)
            ledger.rename(copy)
            text = _("brim: {path} holds no record that can be read. It is kept as {copy}, and a new ledger begins.")
            say(text.format(path=ledger, copy=copy.name))
    elif checkpoints(folder):
        text = _(
            "brim: {path} is missing: the records of the steps so far are lost. A new ledger begins; the model is not affected."
        )
        say(text.format(path=ledger))
    for number in damaged_lines(folder):
        text = _("brim: {path} is damaged in line {line}; that evaluation is left out.")
        say(text.format(path=folder / EVALUATIONS_FILE, line=number))


def where_it_resumes(checkpoint: Path | None, last_recorded: int, total: int) -> str:
    """In a sentence; empty for a run that begins."""
    step = 0 if checkpoint is None else step_of(checkpoint) or 0
    if checkpoint is None and not last_recorded:
        return ""
    if checkpoint is None:
        begin = _("There is no checkpoint yet, so training starts again from the beginning")
    elif step >= total:
        return _("Resuming from {name}: all {total} steps are done, and the model is saved.").format(
            name=checkpoint.name, total=total
        )
    else:
        begin = _("Resuming from {name}").format(name=checkpoint.name)
    last = min(last_recorded, total)
    if last > step + 1:
        text = _("{begin}; steps {first}-{last} will be repeated.")
    elif last == step + 1:
        text = _("{begin}; step {first} will be repeated.")
    else:
        text = _("{begin}; no step has to be repeated.")
    return text.format(begin=begin, first=step + 1, last=last)


def _part(name: str, check: Check) -> PartCheck:
    verdict: PartVerdict = "damaged" if check.damages else "not-fully-verified" if check.unverified else "whole"
    return PartCheck(
        name=name, verdict=verdict, size_bytes=check.size_bytes, damages=check.damages, unverified=check.unverified
    )  # fmt: skip


def _check_model(folder: Path, progress: Progress | None) -> Check:
    if (folder / MODEL_MANIFEST).is_file():
        return check_files(folder, name=MODEL_MANIFEST, progress=progress)
    return check_model_without_manifest(folder)


def _check_records(folder: Path) -> Check:
    """What the run wrote about itself: its card and its ledger."""
    damages: list[FileDamage] = []
    card, ledger = folder / RUN_FILE, folder / LEDGER_FILE
    try:
        RunCard.read(card)
    except RecordError as error:
        damages.append(FileDamage(file=RUN_FILE, problem="manifest" if card.is_file() else "missing", detail=error.message))
    if not ledger.is_file():
        # A run that was stopped before its first step has none.
        if checkpoints(folder):
            damages.append(FileDamage(file=LEDGER_FILE, problem="missing"))
    else:
        lines = check_lines(ledger)
        if lines.damaged:
            damages.append(FileDamage(file=LEDGER_FILE, problem="lines", lines=tuple(lines.damaged)))
    if numbers := damaged_lines(folder):
        damages.append(FileDamage(file=EVALUATIONS_FILE, problem="lines", lines=tuple(numbers)))
    return Check(tuple(damages), size_bytes=sum(file.stat().st_size for file in (card, ledger) if file.is_file()))


def last_whole_checkpoint(folder: str | Path, *, missing_is_error: bool = True) -> str | None:
    """The newest checkpoint that is whole, by `manifest.py`. Where it may be missing, sizes must do: nobody waits for it to be read."""
    whole = last_checkpoint(
        folder, none_is_error=missing_is_error, with_sums=missing_is_error, is_of_brim=False, progress=TellReading()
    )
    if whole is None and missing_is_error:
        text = _("There is no whole checkpoint in {folder}.")
        raise UsageError(text.format(folder=folder), hint=_("Start without resume_from_checkpoint."))
    return None if whole is None else str(whole)


def refuse_damaged(path: str) -> None:
    """An error where a file of this checkpoint is damaged."""
    check = check_files(Path(path), progress=TellReading())
    if check.damages:
        raise UsageError(
            _("Cannot resume from {path}: {damage}").format(path=path, damage=words_of(check.damages[0])),
            hint=_("Give another one, or resume_from_checkpoint=True for the newest that is whole."),
        )
    if check.unverified and (Path(path) / MANIFEST).exists():
        say(not_fully_verified(Path(path)))
