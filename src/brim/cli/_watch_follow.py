"""A ledger that grows, read as it grows: each line once, the newest first.

The file is opened anew at every look, by its name: so what another machine wrote is seen on network disks too, and nothing has to notify.
A long ledger opens at once, because its end is read first; what stands before that is taken up piece by piece, between two looks. A few
numbers of each step are kept, some dozen bytes, so that a resume can take steps back.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from bisect import bisect_right
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final

from pydantic_core import from_json

from brim.errors import RecordError
from brim.records.ledgers import LedgerEntry, LedgerHeader, LedgerSummary
from brim.step.ledger import parse_line

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 4 << 20
"""What is read first of a long ledger: some thousand steps."""
_WHOLE_BYTES: Final = 16 << 20
"""A ledger up to this size is read from its start, in a fraction of a second."""
_HEAD_BYTES: Final = 256
_NAMES: Final = (
    "loss",
    "tokens",
    "padded_tokens",
    "seconds",
    "wait_seconds",
    "peak_bytes",
    "splits",
    "kept",
    "promised",
    "skipped",
)
_LASTS: Final = ("step", "split", "pulse")
_NOTHING: Final = (0, b"")
_SUMS: Final = tuple(name for name in _NAMES if name not in {"loss", "peak_bytes"})


class Columns:
    """A few numbers of each step, in the order of the steps, and their sums. NaN: not known, and not in the sums."""

    def __init__(self) -> None:
        self.step = array("q")
        self.of = {name: array("d") for name in _NAMES}
        self.sums = dict.fromkeys(_SUMS, 0.0)
        self.counted_seconds = 0.0
        """Of the steps whose tokens were counted."""
        self.highest_bytes = 0.0

    def __len__(self) -> int:
        return len(self.step)

    def append(self, step: int, row: dict[str, float]) -> None:
        """One step more."""
        for name, column in self.of.items():
            column.append(row[name])
        self.step.append(step)
        self._count(row)

    def drop_after(self, step: int) -> int:
        """Forget what comes after this step; how many they were."""
        keep = bisect_right(self.step, step)
        dropped = len(self.step) - keep
        if dropped:
            del self.step[keep:]
            for column in self.of.values():
                del column[keep:]
            self._count_again()
        return dropped

    def extend(self, later: Columns) -> None:
        """Put the steps of a later part behind these."""
        self.step.extend(later.step)
        for name, column in self.of.items():
            column.extend(later.of[name])
        for name in _SUMS:
            self.sums[name] += later.sums[name]
        self.counted_seconds += later.counted_seconds
        self.highest_bytes = max(self.highest_bytes, later.highest_bytes)

    def last(self, name: str, count: int) -> array[float]:
        """One number of the last steps."""
        return self.of[name][-count:]

    def _count(self, row: dict[str, float]) -> None:
        for name in _SUMS:
            if not math.isnan(row[name]):
                self.sums[name] += row[name]
        if not math.isnan(row["tokens"]):
            self.counted_seconds += row["seconds"]
        if row["peak_bytes"] > self.highest_bytes:
            self.highest_bytes = row["peak_bytes"]

    def _count_again(self) -> None:
        self.sums = dict.fromkeys(_SUMS, 0.0)
        self.counted_seconds = self.highest_bytes = 0.0
        for values in zip(*self.of.values(), strict=True):
            self._count(dict(zip(_NAMES, values, strict=True)))


class Part:
    """The lines of a file from one place to another, or to wherever it ends."""

    def __init__(self, begin: int, end: int | None = None) -> None:
        self.offset, self.end = begin, end
        """Where the first line begins that has not been taken; where the part ends."""
        self.columns = Columns()
        self.headers: list[LedgerHeader] = []
        self.summary: LedgerSummary | None = None
        self.superseded = self.unreadable = 0
        self.floor: int | None = None
        """The earliest step after which this part goes on: later steps of the part before it are superseded."""
        self.last = dict.fromkeys(_LASTS, _NOTHING)
        """The newest step, the newest in which memory ran out, the newest with a look at the machine: its number and its line."""

    @property
    def is_read(self) -> bool:
        """Whether nothing is left."""
        return self.end is not None and self.offset >= self.end

    def feed(self, stream: IO[bytes], until: float = math.inf) -> None:
        """Take whole lines, at least one, until this moment. A torn end is left: it is read again when there is more."""
        stream.seek(self.offset)
        rest = b""
        while not self.is_read:
            left = _BLOCK_BYTES if self.end is None else min(_BLOCK_BYTES, self.end - self.offset - len(rest))
            block = stream.read(left)
            if not block:
                break
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._take(line)
                self.offset += len(line) + 1
            if lines and time.monotonic() >= until:
                return
        if self.end is None and self._is_whole(rest):
            self._take(rest)
            self.offset += len(rest)

    def join(self, later: Part) -> None:
        """Put the part that follows behind this one."""
        if later.floor is not None:
            self._supersede(later.floor)
        self.columns.extend(later.columns)
        self.headers += later.headers
        self.summary = later.summary
        self.superseded += later.superseded
        self.unreadable += later.unreadable
        self.last |= {name: found for name, found in later.last.items() if found[1]}
        self.offset, self.end = later.offset, None

    def _is_whole(self, rest: bytes) -> bool:
        """A last line may lack nothing but its end."""
        if not rest.endswith(b"}"):
            return False
        with suppress(RecordError):
            parse_line(rest)
            return True
        return False

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            found = from_json(line)
            is_step = found.get("schema") == LedgerEntry.schema and found["kind"] == "step"
            self._take_step(found, line) if is_step else self._take_other(line)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self.unreadable += 1

    def _take_step(self, found: dict[str, Any], line: bytes) -> None:
        step = int(found["step"])
        self.columns.append(step, _row(found))
        self.summary = None
        for name, is_one in (("step", True), ("split", found.get("splits")), ("pulse", found.get("pulse"))):
            if is_one:
                self.last[name] = step, line

    def _take_other(self, line: bytes) -> None:
        found = parse_line(line)
        if isinstance(found, LedgerHeader):
            self._supersede(found.resumed_from_step)
            self.floor = found.resumed_from_step if self.floor is None else min(found.resumed_from_step, self.floor)
            self.headers.append(found)
        self.summary = found if isinstance(found, LedgerSummary) else None

    def _supersede(self, step: int) -> None:
        """The run went on after this step: later ones do not count any more."""
        self.superseded += self.columns.drop_after(step)
        self.last = {name: found if found[0] <= step else _NOTHING for name, found in self.last.items()}


class Follower:
    """What is known of a ledger by now. `look` takes up what was written since, and for a while what is older."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head = b""
        self._old: Part | None = None
        self._new = Part(0)
        self._changed_at = time.monotonic()
        """When it was last seen to be longer than before; at first, by the file's own time."""

    def look(self, seconds: float = 0.0) -> bool:
        """Whether the file is there. Its newest lines are taken; older ones that wait, for so many seconds."""
        try:
            with self.path.open("rb") as stream:
                self._look(stream, time.monotonic() + seconds)
        except OSError:
            return False
        return True

    def _look(self, stream: IO[bytes], until: float) -> None:
        size = stream.seek(0, 2)
        stream.seek(0)
        head = stream.read(_HEAD_BYTES)
        is_new = not self._head or size < self._new.offset or not head.startswith(self._head)
        if is_new:
            self._begin(stream, size)
        self._head = head
        before = self._new.offset
        self._new.feed(stream)
        if is_new:
            # The clock of the disk may be another machine's: never in the future.
            self._changed_at = time.monotonic() - max(0.0, time.time() - os.fstat(stream.fileno()).st_mtime)
        elif self._new.offset > before:
            self._changed_at = time.monotonic()
        if self._old is None:
            return
        self._old.feed(stream, until)
        if self._old.is_read:
            self._old.join(self._new)
            self._new, self._old = self._old, None

    def _begin(self, stream: IO[bytes], size: int) -> None:
        self._old, begin = None, 0
        tail = max(0, size - _TAIL_BYTES)
        if size > _WHOLE_BYTES and tail:
            stream.seek(tail)
            cut = stream.read(size - tail).find(b"\n")
            begin = tail + cut + 1 if cut >= 0 else 0
        self._new = Part(begin)
        if begin:
            self._old = Part(0, begin)

    def quiet_seconds(self) -> float:
        """Since something was written."""
        return time.monotonic() - self._changed_at

    @property
    def waiting_bytes(self) -> int:
        """Of older lines that have not been read yet."""
        return 0 if self._old is None else (self._old.end or 0) - self._old.offset

    @property
    def columns(self) -> Columns:
        """The steps that have been read, to the newest."""
        return self._new.columns

    @property
    def headers(self) -> list[LedgerHeader]:
        """Those that have been read, in their order."""
        return [*(self._old.headers if self._old is not None else ()), *self._new.headers]

    @property
    def summary(self) -> LedgerSummary | None:
        """The last line, where a run has ended."""
        return self._new.summary

    @property
    def unreadable(self) -> int:
        """Whole lines that hold no part of a ledger."""
        return self._new.unreadable + (self._old.unreadable if self._old is not None else 0)

    def last(self, name: str = "step") -> LedgerEntry | None:
        """The newest `step`, the newest with a `split` after out of memory, the newest with a `pulse` of the machine."""
        parts = (self._new,) if self._old is None else (self._new, self._old)
        return next((found for part in parts if (found := _entry(part.last[name][1])) is not None), None)


def _entry(line: bytes) -> LedgerEntry | None:
    if not line:
        return None
    try:
        found = parse_line(line)
    except RecordError:
        return None
    return found if isinstance(found, LedgerEntry) else None


def _row(found: dict[str, Any]) -> dict[str, float]:
    promised, ids, sequences = found["promised_sequences"], found["sequence_ids"], found["sequences"]
    # An observed step does not know which sequences it took, only how many.
    kept = promised == sequences and (not ids or len(ids) == len(set(ids)) == sequences)
    return {
        "loss": _real(found.get("loss")),
        "tokens": _real(found["tokens"]),
        "padded_tokens": _real(found["padded_tokens"]),
        "seconds": found["compute_seconds"] + found["wait_seconds"],
        "wait_seconds": found["wait_seconds"],
        "peak_bytes": _real(found.get("peak_reserved_bytes") or found.get("peak_allocated_bytes")),
        "splits": len(found.get("splits", ())),
        "kept": promised is not None and kept,
        "promised": promised is not None,
        "skipped": found.get("skipped", False),
    }


def _real(value: float | str | None) -> float:
    """In a ledger, a loss that diverged is a word; here, one that is not known is a NaN."""
    return math.nan if value is None else float(value)
