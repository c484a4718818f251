"""The event file: one JSON line for each thing that happened, appended by one write each."""

# ruff: noqa: PTH118 (pathlib is not imported into somebody else's interpreter)

from __future__ import annotations

import json
import math
import os
from typing import Any


class EventFile:
    """Opened with the first line that must be written: a launcher or a loader's worker, which trains nothing, leaves no file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._place: str | None = None
        self._settings: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        """Whether this process has a file."""
        return self._place is not None

    def keep(self, event: dict[str, Any]) -> None:
        """A setting: written now if there is a file, else below its first line; and again where a forked process opens its own."""
        self._settings.append(event)
        if self._place is not None:
            self.write(event)

    def open(self, first: dict[str, Any]) -> None:
        """Begin the file of this process."""
        name = f"rank{os.environ.get('RANK') or 0}-{os.getpid()}.jsonl"
        self._place = os.path.join(self._folder, name)
        for event in [first, *self._settings]:
            self.write(event)

    def write(self, event: dict[str, Any]) -> None:
        """Append one line. The file is opened for it: a script that closes what it did not open would hand our number to its own file."""
        assert self._place is not None
        descriptor = os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, (json.dumps(event, default=_plain) + "\n").encode())
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked process: the file is its parent's."""
        self._place = None


def number(value: Any) -> Any:
    """A float as JSON can hold it; the words are those of brim's ledger."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _plain(value: Any) -> Any:
    return str(value)[:200]
