"""Plain text as documents: by line, by paragraph or by file.

A document may be larger than the memory: it is given in parts, cut at the ends of lines, which belong together.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from brim.workload.formats import Found, lines_of, save_as_utf8, told_as_ours

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from brim.workload.formats import Line, Meter

_PART_BYTES: Final = 1 << 20


def has_blank_lines(path: Path) -> bool:
    """Whether a blank line stands between two texts of this file."""
    was_blank = has_text = False
    with told_as_ours(path), path.open("rb") as file:
        while line := file.readline(_PART_BYTES):
            is_blank = line.isspace()
            if was_blank and has_text and not is_blank:
                return True
            was_blank, has_text = is_blank, has_text or not is_blank
    return False


def text_lines(path: Path, meter: Meter) -> Iterator[Found]:
    """Text with a document on each line."""
    for line in lines_of(path, meter):
        if line.text.strip():
            yield from _documents(path, [line])


def text_paragraphs(path: Path, meter: Meter) -> Iterator[Found]:
    """Text with a blank line between two documents."""
    for is_blank, lines in itertools.groupby(lines_of(path, meter), key=lambda line: not line.text.strip()):
        if not is_blank:
            yield from _documents(path, lines)


def text_file(path: Path, meter: Meter) -> Iterator[Found]:
    """A file that is one document."""
    is_empty = True
    for found in _documents(path, lines_of(path, meter)):
        yield found._replace(unit="file", number=0) if found.row is not None else found
        is_empty = False
    if is_empty:
        yield Found(path, "file", 0, {"text": ""}, document="whole")


def _documents(path: Path, lines: Iterable[Line]) -> Iterator[Found]:
    """One document: whole, or in parts where it is long. Where one of its lines is no text, it ends there."""
    held: Found | None = None
    for part in _parts(lines):
        bad = next((line for line in part if line.fault), None)
        if bad is not None:
            if held is not None:
                yield _last_part(held)  # without it, the next document would be joined to this one
            yield Found(path, "line", bad.number, None, bad.fault, save_as_utf8())
            return
        text = "".join(line.text for line in part)
        if held is not None and text.isspace():
            continue
        if held is not None and held.row is not None and held.row["text"].strip():
            yield held
        held = Found(path, "line", part[0].number, {"text": text}, document="part")
    if held is not None:
        yield _last_part(held)


def _last_part(held: Found) -> Found:
    assert held.row is not None
    return held._replace(row={"text": held.row["text"].rstrip("\r\n")}, document="whole")


def _parts(lines: Iterable[Line]) -> Iterator[list[Line]]:
    held: list[Line] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line.text)
        if size > _PART_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held
