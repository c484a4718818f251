"""The small files that a run has written about itself, kept in case its folder is deleted while the run goes on.

A process that trains holds them in memory. Between the moment when they are written and the moment when that process has read them, a
copy in brim's cache is all that is left of a deleted folder.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from brim.machine.host import cache_folder
from brim.record import write_atomically
from brim.records import RunCard
from brim.trainer.request import EVALUATIONS_FILE, PREPARED_FILES, RUN_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_NAMES = (*PREPARED_FILES, EVALUATIONS_FILE)


class RunRecords:
    """The records of one run, by file name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, str] = {}

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Those in the folder; those of the copy where the folder was deleted after they were written."""
        found = cls(folder)
        if not (folder / RUN_FILE).is_file():
            found._read(_copy_of(folder))
        found.keep()
        return found

    def keep(self) -> None:
        """Read what is in the folder now."""
        self._read(self._folder)

    def restore(self) -> bool:
        """Write those that were deleted; whether there were any."""
        lost = [name for name in self._texts if not (self._folder / name).exists()]
        for name in lost:
            write_atomically(self._folder / name, self._texts[name])
        return bool(lost)

    def text(self, name: str) -> str | None:
        """The content of one file; None if the run has no such file."""
        return self._texts.get(name)

    def card(self) -> RunCard:
        """Of the run; an error where there is none."""
        text = self.text(RUN_FILE)
        path = self._folder / RUN_FILE
        return RunCard.read(path) if text is None else RunCard.from_json(text, where=str(path))

    def _read(self, place: Path) -> None:
        for name in _NAMES:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._texts[name] = (place / name).read_text(encoding="utf-8")


@contextmanager
def copied_to_cache(folder: Path) -> Iterator[None]:
    """While the run goes on, a copy of its records for processes that have not read them yet."""
    copy = _copy_of(folder)
    # A full cache must not stop a run; it only goes without the copy.
    with suppress(OSError):
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        for name in _NAMES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, copy / name)
    try:
        yield
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _copy_of(folder: Path) -> Path:
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return cache_folder() / "records" / name
