"""The evaluations of a run: one JSON line each, beside its ledger."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from brim.errors import RecordError
from brim.records import Evaluation
from brim.trainer.request import EVALUATIONS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def append_evaluation(folder: Path, entry: Evaluation) -> None:
    """One more line; below a torn one, which a killed process may have left, and not behind it."""
    with (folder / EVALUATIONS_FILE).open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        is_torn = file.read(1) not in {b"", b"\n"}
        file.write(b"\n" * is_torn + entry.to_json(indent=None).encode() + b"\n")


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Of a run, one for each step: where it went on from an earlier one, the later counts. Damaged lines count for nothing."""
    found: dict[int, Evaluation] = {}
    for _number, _is_whole, entry in _evaluations(folder / EVALUATIONS_FILE):
        if entry is None:
            continue
        found = {step: each for step, each in found.items() if step < entry.step}
        found[entry.step] = entry
    return list(found.values())


def damaged_lines(folder: Path) -> list[int]:
    """Numbers of lines that are no evaluations, from 1; a torn last line is not among them."""
    return [number for number, is_whole, entry in _evaluations(folder / EVALUATIONS_FILE) if is_whole and entry is None]


def _evaluations(path: Path) -> Iterator[tuple[int, bool, Evaluation | None]]:
    if not path.is_file():
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        entry = None
        with suppress(RecordError):
            entry = Evaluation.from_json(line, where=str(path))
        yield number, line.endswith(b"\n"), entry
