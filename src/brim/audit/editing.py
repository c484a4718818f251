"""Edits made in a text, and diffs: lines and columns become places, and nothing may be changed twice."""

from __future__ import annotations

import difflib
import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.found import Edit

_HUNK: Final = re.compile(r"@@ -(\d+)((?:,\d+)?) \+(\d+)((?:,\d+)?) @@")
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


def unified(file: str, before: str, after: str, first: int = 1) -> str:
    """A unified diff between two texts of one file, or of a part of it that begins in line `first`."""
    old, new = ([line for line in re.split(r"(?<=\n)", text) if line] for text in (before, after))
    lines = list(difflib.unified_diff(old, new, *_names(file)))
    if first > 1:
        lines = [_HUNK.sub(lambda hunk: _moved(hunk, first - 1), line) if line.startswith("@@ ") else line for line in lines]
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _moved(hunk: re.Match[str], by: int) -> str:
    return f"@@ -{int(hunk[1]) + by}{hunk[2]} +{int(hunk[3]) + by}{hunk[4]} @@"


def _names(file: str) -> tuple[str, str]:
    """The two names at the head of a diff. A tab ends a name with blanks, as git writes it."""
    name = file.lstrip("/") + ("\t" if " " in file else "")
    return f"a/{name}", f"b/{name}"
