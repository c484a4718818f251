"""Read what the observers write: one file for each process, whole lines only, while they are still being written."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Event = dict[str, Any]
_SETTINGS = ("fact", "loader", "trains", "gave-up")


class _Tail:
    """The lines of a file that have come since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                text = stream.read()
        except OSError:  # somebody has removed it; what was read is kept
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.splitlines() if isinstance(event := _loaded(line), dict)]


def _loaded(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


@dataclass
class Process:
    """One process that trained, or was about to."""

    tail: _Tail
    opening: Event = field(default_factory=dict)
    rank: Event | None = None
    """Told with the first step: only then ranks have met."""
    steps: deque[Event] = field(default_factory=deque)
    """Steps that were read and not yet joined with those of the other ranks."""
    settings: list[Event] = field(default_factory=list)
    errors: list[Event] = field(default_factory=list)
    end: Event | None = None
    count: int = 0

    @property
    def identity(self) -> Event:
        """Who it is among its ranks."""
        return self.rank or self.opening

    def read(self) -> None:
        """Take in what is new."""
        for event in self.tail.read():
            kind = event.get("kind")
            if kind == "step":
                self.steps.append(event)
                self.count += 1
                self._went_on()
            elif kind == "error":
                self._went_on()
                self.errors.append(event)
            elif kind in _SETTINGS:
                self.settings.append(event)
            elif kind == "open":
                self.opening = event
            elif kind == "rank":
                self.rank = event
            elif kind == "end":
                self.end = event

    def _went_on(self) -> None:
        """Errors that lie before something else were caught by the script."""
        for error in self.errors:
            error["survived"] = True


@dataclass
class Run:
    """The processes of one training: its ranks."""

    key: tuple[Any, ...]
    ranks: dict[int, Process] = field(default_factory=dict)

    @property
    def first(self) -> Process:
        """The process that speaks for the run."""
        return self.ranks[min(self.ranks)]

    @property
    def world(self) -> int:
        """Ranks on all machines."""
        return int(self.first.identity.get("world", 1))

    @property
    def expected(self) -> int:
        """Ranks on this machine."""
        return max(1, min(self.world, int(self.first.identity.get("local_world", 1))))

    def joined(self, *, at_the_end: bool = False) -> list[dict[int, Event]]:
        """Steps that all ranks have completed, each with its event by rank. At the end, ranks that never came are not waited for."""
        found: list[dict[int, Event]] = []
        if len(self.ranks) < self.expected and not at_the_end:
            return found
        while all(process.steps for process in self.ranks.values()):
            found.append({rank: process.steps.popleft() for rank, process in self.ranks.items()})
        return found


class Reader:
    """All event files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, Process] = {}
        self.runs: list[Run] = []

    def look(self) -> None:
        """Read what is new, and find out which processes belong together."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path not in self._tails:
                self._tails[path] = Process(_Tail(path))
        for process in self._tails.values():
            process.read()
            if process.rank is not None and not any(process in run.ranks.values() for run in self.runs):
                self._assign(process)

    def _assign(self, process: Process) -> None:
        who = process.identity
        rank, world = int(who.get("rank", 0)), int(who.get("world", 1))
        key = (world, who.get("launch"), who.get("restart")) if world > 1 else (world, who.get("pid"))
        for run in self.runs:
            if run.key == key and rank not in run.ranks:
                run.ranks[rank] = process
                return
        self.runs.append(Run(key, {rank: process}))

    @property
    def processes(self) -> list[Process]:
        """Every process that made an optimizer."""
        return list(self._tails.values())

    def has(self, sign: str) -> bool:
        """Whether an observer left this sign."""
        return (self._folder / sign).exists()

    def trouble(self) -> str:
        """Why an observer could not put its hooks on; empty if it could."""
        path = self._folder / "trouble"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
