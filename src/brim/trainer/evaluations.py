"""The evaluations of a run: one JSON line each, beside its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.records import Evaluation
from brim.trainer.request import EVALUATIONS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def append_evaluation(folder: Path, entry: Evaluation) -> None:
    """One more line."""
    with (folder / EVALUATIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(entry.to_json(indent=None) + "\n")


def read_evaluations(folder: Path) -> list[Evaluation]:
    """Of a run, one for each step: where it went on from an earlier one, the later counts. A torn last line counts for nothing."""
    found: dict[int, Evaluation] = {}
    for entry in _evaluations(folder / EVALUATIONS_FILE):
        found = {step: each for step, each in found.items() if step < entry.step}
        found[entry.step] = entry
    return list(found.values())


def _evaluations(path: Path) -> Iterator[Evaluation]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.endswith("}"):
            continue
        yield Evaluation.from_json(line, where=str(path))
