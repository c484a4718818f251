"""A damaged ledger, found before anything is added to it, and repaired as far as its lines allow.

A line that is not a record (a bad sector, an editor, a power cut that left zeros) is left out. Whole records inside it are kept: two lines
that ran together, or a line behind zeros. The file as it was is kept as `ledger.jsonl.damaged-N`. Steps whose lines are lost are named in
`unrecorded_steps` of the header above them, so that whoever checks the ledger later knows a lost line from a step that was not taken.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from brim.errors import RecordError, RunError
from brim.locale import _, sentences
from brim.records import LedgerHeader, LedgerSummary
from brim.step.ledger import START, Line, free_name, line_of, open_to_read, parse_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from brim.records import Ledger

StepRange = tuple[int, int]
"""The first and the last."""
_MOST_LISTED: Final = 5
_BLOCK_BYTES: Final = 1 << 16
_HEADER: Final = START + b'"kind": "header"'


@dataclass
class LineCheck:
    """What the lines of a ledger hold."""

    damaged: list[int] = field(default_factory=list)
    """Numbers of lines that are not records, from 1. A torn last line is not among them: it is cut off when the run continues."""
    records: int = 0
    last_step: int = 0
    """Of the steps that were not superseded."""
    lost: dict[int, list[StepRange]] = field(default_factory=dict)
    """Steps whose lines are lost, by the header above them (from 0)."""
    lost_headers: dict[int, int] = field(default_factory=dict)
    """Lines (from 1) above which the header of a continuation is missing, each with the step after which it continued."""

    @property
    def lost_steps(self) -> list[StepRange]:
        """In order."""
        return sorted(each for ranges in self.lost.values() for each in ranges)


def check_lines(path: Path) -> LineCheck:
    """Read every line of a ledger."""
    check, headers, is_behind_damage = LineCheck(), 0, False
    with open_to_read(path) as stream:
        for number, line in enumerate(stream, 1):
            records, is_damaged = _records_in(line)
            if is_damaged and not line.endswith(b"\n"):
                break
            if is_damaged:
                check.damaged.append(number)
                is_behind_damage = True
            for record in records:
                check.records += 1
                if isinstance(record, LedgerSummary):
                    if is_behind_damage and record.last_step > check.last_step:
                        check.lost.setdefault(max(0, headers - 1), []).append((check.last_step + 1, record.last_step))
                        check.last_step = record.last_step
                    continue
                is_header = isinstance(record, LedgerHeader)
                before = record.resumed_from_step if isinstance(record, LedgerHeader) else record.step - 1
                if is_behind_damage and before > check.last_step:
                    check.lost.setdefault(max(0, headers - 1), []).append((check.last_step + 1, before))
                elif is_behind_damage and headers and before < check.last_step and not is_header:
                    check.lost_headers[number] = before
                    check.lost = {header: _up_to(ranges, before) for header, ranges in check.lost.items()}
                    headers += 1
                if is_header:
                    check.lost = {header: _up_to(ranges, before) for header, ranges in check.lost.items()}
                headers += is_header
                check.last_step, is_behind_damage = before + (not is_header), False
    return check


def repair_ledger(path: Path, say: Callable[[str], None]) -> LineCheck:
    """Check a ledger; rewrite it without its damaged lines where there are some, and say what is lost."""
    check = check_lines(path)
    if check.damaged:
        copy = free_name(path)
        try:
            shutil.copyfile(path, copy)
            _write_repaired(path, check)
        except OSError as error:
            text = _("Cannot repair {path}: {why}.").format(path=path, why=error.strerror or error)
            raise RunError(text, hint=_("Its disk needs room for a copy, and you need permission to write there.")) from error
        say(_told(path, check, copy))
    return check


def last_step_of(path: Path) -> int:
    """The last step of a ledger that was not superseded, by its last whole line; 0 where there is none."""
    if not path.is_file():
        return 0
    with open_to_read(path) as stream:
        size, block = stream.seek(0, os.SEEK_END), _BLOCK_BYTES
        while True:
            start = max(0, size - block)
            stream.seek(start)
            lines = stream.read(size - start).split(b"\n")
            for line in reversed(lines[1:] if start else lines):
                with suppress(RecordError):
                    record = parse_line(line)
                    if isinstance(record, LedgerHeader):
                        return record.resumed_from_step
                    return record.last_step if isinstance(record, LedgerSummary) else record.step
            if not start:
                return 0
            block *= 4


def lost_steps(ledger: Ledger) -> list[StepRange]:
    """Steps that were taken and have no line."""
    lost: list[StepRange] = []
    for header in ledger.headers:
        # What comes after this step is taken again.
        lost = [*_up_to(lost, header.resumed_from_step), *header.unrecorded_steps]
    return sorted(set(_up_to(lost, ledger.steps[-1].step if ledger.steps else 0)))


def listed(ranges: Iterable[StepRange]) -> str:
    """`18, 20-22`; the first few of many."""
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(words if len(words) <= _MOST_LISTED else [*words[:_MOST_LISTED], "..."])


def _up_to(ranges: Iterable[StepRange], step: int) -> list[StepRange]:
    return [(first, min(last, step)) for first, last in ranges if first <= step]


def _records_in(line: bytes) -> tuple[list[Line], bool]:
    """The whole records in a line, and whether it is anything but one record."""
    with suppress(RecordError):
        return [parse_line(line)], False
    found = []
    for piece in line.split(START)[1:]:
        with suppress(RecordError):
            found.append(parse_line(START + piece))
    return found, True


def _write_repaired(path: Path, check: LineCheck) -> None:
    part = path.with_name(f".{path.name}.part")
    headers: list[LedgerHeader] = []
    with open_to_read(path) as old, part.open("wb") as new:
        for number, line in enumerate(old, 1):
            if number in check.lost_headers:
                # All that may not change when a run continues is as above.
                note = _("The header of this continuation was lost.")
                header = dataclasses.replace(
                    headers[-1], resumed_from_step=check.lost_headers[number], unrecorded_steps=(), notes=(note,)
                )
                headers.append(header)
                new.write(line_of(_with_lost(header, check, len(headers))))
            if number not in check.damaged and not line.startswith(_HEADER):
                new.write(line)
                continue
            for record in _records_in(line)[0]:
                if isinstance(record, LedgerHeader):
                    headers.append(record)
                    record = _with_lost(record, check, len(headers))
                new.write(line_of(record))
        new.flush()
        os.fsync(new.fileno())
    part.replace(path)


def _with_lost(header: LedgerHeader, check: LineCheck, number: int) -> LedgerHeader:
    lost = (*header.unrecorded_steps, *check.lost.get(number - 1, ()))
    return dataclasses.replace(header, unrecorded_steps=tuple(sorted(lost)))


def _told(path: Path, check: LineCheck, copy: Path) -> str:
    lines = listed((number, number) for number in check.damaged)
    lost = _("No step's record is lost.")
    if check.lost_steps:
        lost = _("The records of these steps are lost: {steps}.").format(steps=listed(check.lost_steps))
    kept = _("The other records are kept, and the damaged file as {copy}. The model is not affected.")
    return sentences(
        _("brim: {path} is damaged in line {lines}.").format(path=path, lines=lines), lost, kept.format(copy=copy.name)
    )
