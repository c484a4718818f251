"""Edits made in a text: lines and columns become places, and nothing may be changed twice."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.found import Edit

_LINE_END: Final = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")


class CannotMend(Exception):  # noqa: N818 (it says what it means)
    """These edits cannot be made; the message says why."""


def split_lines(text: str) -> list[str]:
    """Lines with their ends, as Python counts them; the last one may be empty."""
    return _LINE_END.split(text)


def bare(line: str) -> str:
    """A line without its end."""
    return line.rstrip("\r\n")


def edited(text: str, edits: Sequence[Edit]) -> str:
    """The text with the edits made; new lines end as their neighbours do."""
    lines = split_lines(text)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        if line > len(lines):
            return len(text)
        return starts[line - 1] + min(column, len(bare(lines[line - 1])))

    spans = sorted(
        {(offset(each.line, each.column), offset(each.end_line, each.end_column), each.text, each.line) for each in edits}
    )
    for (start, end, _text, _line), (next_start, *_rest) in pairwise(spans):
        if next_start < end or next_start == start:
            raise CannotMend(_("Another patch changes the same place."))
    for start, end, new, at in reversed(spans):
        text = text[:start] + new.replace("\n", _end_near(lines, at)) + text[end:]
    return text


def _end_near(lines: Sequence[str], line: int) -> str:
    """How the edited line ends, or the one before it where the last line has no end."""
    for text in reversed(lines[: min(line, len(lines))]):
        if end := text[len(bare(text)) :]:
            return end
    return "\n"
