"""A notebook's cells, edited in place: its JSON is written back exactly as it was laid out, or not at all."""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.audit.editing import CannotFix, edited
from brim.audit.source.module import Source
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.found import Edit

_MAGIC: Final = re.compile(r"^(\s*)(?:[%!?]|[\w.]+\?+\s*$).*$", re.MULTILINE)
_LAYOUTS: Final[tuple[dict[str, Any], ...]] = (
    {"indent": 1},
    {"indent": 2},
    {"indent": 4},
    {"indent": "\t"},
    {},
    {"separators": (",", ":")},
)
"""How notebooks are written: by Jupyter with one blank, by other tools otherwise."""


def is_python(file: str) -> bool:
    """Whether a file holds nothing but Python."""
    return Path(file).suffix.lower() in {".py", ".pyw"}


def compiles(code: str | bytes) -> None:
    """Raise where Python would not take it. A keyword that stands twice parses and does not compile; `await` may stand in a cell."""
    flags = 0 if isinstance(code, bytes) else ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile(code, "<patched>", "exec", flags=flags, dont_inherit=True)


def cell_of(source: Source, line: int) -> int | None:
    """The code cell that a line of the notebook's code stands in, from 1; None for other files."""
    return max(1, bisect_right(source.cells, line)) if source.cells else None


@dataclass(frozen=True)
class Notebook:
    """The JSON of a notebook beside the code that was read out of it."""

    text: str
    source: Source

    @staticmethod
    def check(text: str) -> None:
        """Raise ValueError or SyntaxError where it is no notebook, or a cell of Python does not parse."""
        for cell in _code_cells(json.loads(text)):
            code = "".join(cell.get("source", ""))
            if not code.lstrip().startswith("%%"):
                compiles(_MAGIC.sub(r"\1pass", code))

    def edited(self, edits: Sequence[Edit]) -> str:
        """The file with the edits made."""
        layout = self._layout()
        document = json.loads(self.text)
        cells = _code_cells(document)
        if layout is None or len(cells) != len(self.source.cells):
            raise CannotFix(_("The notebook's JSON has an unusual layout that would not be preserved."))
        by_cell: dict[int, list[Edit]] = {}
        for edit in edits:
            by_cell.setdefault((cell_of(self.source, edit.line) or 1) - 1, []).append(edit)
        for index, own in by_cell.items():
            cell, before = cells[index], self.source.cells[index] - 1
            code = "".join(cell.get("source", ""))
            if not all(self._is_unchanged(edit, code, before) for edit in own):
                raise CannotFix(_("The fix is not within the lines of one cell."))
            moved = [replace(edit, line=edit.line - before, end_line=edit.end_line - before) for edit in own]
            _put(cell, edited(code, moved))
        return self._write(document, layout)

    def _is_unchanged(self, edit: Edit, code: str, before: int) -> bool:
        """Whether the lines of an edit stand in the cell as they were read: magics are read as something else."""
        raw = code.split("\n")
        read = self.source.text.split("\n")
        last = edit.end_line - (1 if edit.end_column == 0 and edit.end_line > edit.line else 0)
        lines = range(edit.line, last + 1)
        return all(line - before <= len(raw) and raw[line - before - 1].rstrip("\r") == read[line - 1] for line in lines)

    def _layout(self) -> dict[str, Any] | None:
        """The way in which this file is written, found by writing it."""
        document = json.loads(self.text)
        for layout in _LAYOUTS:
            for is_ascii in (False, True):
                tried = {**layout, "ensure_ascii": is_ascii}
                if self._write(document, tried) == self.text:
                    return tried
        return None

    def _write(self, document: Any, layout: dict[str, Any]) -> str:
        body = json.dumps(document, **layout)
        tail = self.text[len(self.text.rstrip()) :]
        return (body.replace("\n", "\r\n") if "\r\n" in self.text else body) + tail


def _code_cells(document: Any) -> list[dict[str, Any]]:
    """The cells that hold code, in order."""
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise ValueError("no notebook")  # noqa: TRY004 (as json says of broken text)
    return [cell for cell in document["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code"]


def _put(cell: dict[str, Any], code: str) -> None:
    """As a list of lines where it was one, as Jupyter writes it."""
    cell["source"] = [line for line in re.split(r"(?<=\n)", code) if line] if isinstance(cell.get("source"), list) else code
