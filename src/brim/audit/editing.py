"""Edits made in a text: lines and columns become places, and nothing may be changed twice."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.found import Edit

_LINE_END: Final = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")


class CannotFix(Exception):  # noqa: N818 (it says what it means)
    """These edits cannot be made; the message says why."""


def split_lines(text: str) -> list[str]:
    """Lines with their ends, as Python counts them; the last one may be empty."""
    return _LINE_END.split(text)


def bare(line: str) -> str:
    """A line without its end."""
    return line.rstrip("\r\n")


def edited(text: str, edits: Sequence[Edit], lines: Sequence[str] | None = None) -> str:
    """The text with the edits made; new lines end as their neighbours do. `lines`: those of the text, if they are known."""
    lines = split_lines(text) if lines is None else lines
    starts = [0, *accumulate(map(len, lines))]
    spans = sorted({(*span_of(lines, starts, edit), edit.text, edit.line) for edit in edits})
    for (start, end, _text, _line), (next_start, *_rest) in pairwise(spans):
        if next_start < end or next_start == start:
            raise CannotFix(_("Another fix changes the same place."))
    parts, place = [], 0
    for start, end, new, at in spans:
        parts += [text[place:start], new.replace("\n", _end_near(lines, at))]
        place = end
    return "".join([*parts, text[place:]])


def span_of(lines: Sequence[str], starts: Sequence[int], edit: Edit) -> tuple[int, int]:
    """The characters that an edit replaces, as places in the text of these lines."""

    def offset(line: int, column: int) -> int:
        if line > len(lines):
            return starts[-1]
        return starts[line - 1] + min(column, len(bare(lines[line - 1])))

    return offset(edit.line, edit.column), offset(edit.end_line, edit.end_column)


def _end_near(lines: Sequence[str], line: int) -> str:
    """How the edited line ends, or the one before it where the last line has no end."""
    for index in range(min(line, len(lines)) - 1, -1, -1):
        if end := lines[index][len(bare(lines[index])) :]:
            return end
    return "\n"
