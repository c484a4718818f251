"""The ledger: one JSON line per optimizer step that says what was promised and what happened. checker.py compares the two.

A line is appended by one write, so that a killed process leaves whole lines and at most one torn end. A run that continues cuts the torn
end off and appends a new header; lines of steps that it takes again are superseded, never deleted. A full disk costs no training: lines
wait in memory until they can be written. Nor does `rm`: a file that is open outlives its name, and is copied back to it.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self, overload

from brim.errors import BrimError, RecordError, RunError, UsageError
from brim.locale import _, sentences
from brim.records import Ledger, LedgerEntry, LedgerHeader, LedgerSummary, Slice, Totals

if TYPE_CHECKING:
    from types import TracebackType

    from pydantic import TypeAdapter

Line = LedgerHeader | LedgerEntry | LedgerSummary

LEDGER: Final = "ledger.jsonl"
"""Its name in the folder of a run."""

SYNC_SECONDS: Final = 10.0
"""The most that a power cut may cost. A killed process costs nothing: the system has the lines."""

_KINDS: Final[dict[str, type[Line]]] = {"header": LedgerHeader, "step": LedgerEntry, "summary": LedgerSummary}
START: Final = b'{"schema": "brim.ledger/1", '
_STEP: Final = START + b'"kind": "step", '
_BLOCK_BYTES: Final = 1 << 16


class LedgerWriter:
    """Appends to one ledger: the header when it is opened, a line per step, the summary when it is closed.

    What is wrong at the start (no folder, no permission, a foreign file) is an error at once. What goes wrong later is told once to
    `on_trouble` (by default as a warning), tried again at every step, and an error only if lines still cannot be written at the end.
    """

    def __init__(
        self,
        path: str | Path,
        header: LedgerHeader,
        *,
        on_trouble: Callable[[str], None] | None = None,
        started: float | None = None,
    ) -> None:
        """Open it. `started` is the `time.monotonic()` that the header's `started_at` means, if that is not now."""
        self.path = Path(path)
        self.summary: LedgerSummary | None = None
        """What `close` wrote."""
        self._on_trouble = on_trouble or _warn
        self._told = False
        self.times_restored = 0
        """How often the file was deleted while it was open, and written again."""
        self._totals = Totals(header.resumed_from_step)
        self._waiting = bytearray()
        self._synced = time.monotonic()
        self._started = self._synced if started is None else started
        self._stream = _open(self.path)
        size = self._stream.seek(0, os.SEEK_END)
        self._waiting += line_of(header)
        try:
            self._flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            with suppress(OSError):
                self._stream.truncate(size)
            self._stream.close()
            raise _cannot_write(self.path, error) from error

    def write(self, entry: LedgerEntry) -> None:
        """Append a step. Never fails for want of space: what cannot be written waits."""
        assert self.summary is None, "the ledger is closed"
        self._totals.add(entry)
        self._waiting += line_of(entry)
        self.restore_if_deleted()
        try:
            self._flush()
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._synced = time.monotonic()
                os.fsync(self._stream.fileno())
        except OSError as error:
            self._tell(error)

    def settle(self) -> None:
        """Bring all lines up to here to the disk; an OSError where that cannot be done, and then they go on waiting.

        For whoever keeps a checkpoint: one that is ahead of the ledger would leave, after a power cut, steps that nothing can prove.
        """
        self.restore_if_deleted()
        self._flush()
        self._synced = time.monotonic()
        os.fsync(self._stream.fileno())

    def restore_if_deleted(self) -> None:
        """Put the file back, with its folder and all its lines, where somebody has deleted or replaced it."""
        try:
            if not self._is_deleted():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.path.rename(free_name(self.path))
            self._stream = _copied_back(self._stream, self.path)
        except OSError as error:
            self._tell(error)
            return
        self.times_restored += 1
        self._on_trouble(_("{path} was deleted while it was in use. It is restored with all its lines.").format(path=self.path))

    def _is_deleted(self) -> bool:
        mine = os.fstat(self._stream.fileno())
        try:
            there = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        # Some network file systems give a file another number at every look; its size is then still the same.
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino) and there.st_size != mine.st_size

    def close(self, *, finished: bool, reason: str = "") -> LedgerSummary:
        """Write the summary and see to it that all is on the disk. A second call changes nothing."""
        if self.summary is not None:
            return self.summary
        self.summary = self._totals.summary(seconds=time.monotonic() - self._started, finished=finished, reason=reason)
        self._waiting += line_of(self.summary)
        self.restore_if_deleted()
        try:
            try:
                self._flush()
                os.fsync(self._stream.fileno())
            finally:
                self._stream.close()
        except OSError as error:
            raise _cannot_write(self.path, error, lines=self._waiting.count(b"\n")) from error
        return self.summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close(finished=True)
            return
        try:
            self.close(finished=False, reason=_reason(error))
        except RunError as trouble:
            # The error that ended the run is the one to be seen.
            self._on_trouble(trouble.message)

    def _flush(self) -> None:
        """Write what waits; what part of it the disk has taken is not written again."""
        while self._waiting:
            del self._waiting[: self._stream.write(self._waiting) or 0]

    def _tell(self, error: OSError) -> None:
        if self._told:
            return
        self._told = True
        text = _("Cannot write {path}: {why}. Training goes on; the lines are kept in memory and tried again at every step.")
        self._on_trouble(text.format(path=self.path, why=error.strerror or error))


def parse_line(line: bytes | str, *, where: str = "JSON") -> Line:
    """One line of a ledger, checked field by field; `where` names it in messages."""
    text = line.encode("utf-8", "replace") if isinstance(line, str) else line
    if text.startswith(_STEP):
        # As brim writes it. Nearly all lines are such, and this is a hundred times faster; what is wrong is said by the way below.
        with suppress(ValueError):
            return _step_adapter().validate_json(b"{" + text[len(START) :], strict=True)
    return _type_of(text, where).from_json(text, where=where)


def read_ledger(path: str | Path) -> Ledger:
    """A ledger with the steps that are in force. A torn end is tolerated and told; any other broken line is an error with its number."""
    headers: list[LedgerHeader] = []
    steps = _Steps(Path(path))
    summary: LedgerSummary | None = None
    superseded, torn, offset = 0, False, 0
    with open_to_read(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                found = parse_line(line, where=_("{path}, line {number}").format(path=path, number=number))
            except RecordError:
                torn = not line.endswith(b"\n")
                if not torn:
                    raise
                break
            if isinstance(found, LedgerEntry):
                steps.append(offset, found.step, number)
            elif isinstance(found, LedgerHeader):
                headers.append(found)
                superseded += steps.drop_after(found.resumed_from_step)
            summary = found if isinstance(found, LedgerSummary) else None
            offset += len(line)
    if not offset:
        raise RecordError(_("{path} is not a ledger, or has not one whole line yet.").format(path=path))
    return Ledger(tuple(headers), steps, summary, superseded, torn, steps.lines)


class _Steps(Sequence[LedgerEntry]):
    """The steps of a file, each found by where its line begins and read when it is asked for: a few dozen bytes of memory a step."""

    def __init__(self, path: Path, offsets: list[int] | None = None, numbers: list[int] | None = None) -> None:
        self._path = path
        self._offsets = offsets or []
        self._numbers = numbers or []
        self.lines: list[int] = []
        """Of each step: its line in the file, from 1."""

    def append(self, offset: int, step: int, line: int) -> None:
        self._offsets.append(offset)
        self._numbers.append(step)
        self.lines.append(line)

    def drop_after(self, step: int) -> int:
        """Forget what comes after this step; how many they were."""
        keep = next((index for index, number in enumerate(self._numbers) if number > step), len(self._numbers))
        dropped = len(self._numbers) - keep
        del self._offsets[keep:], self._numbers[keep:], self.lines[keep:]
        return dropped

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[LedgerEntry]:
        with open_to_read(self._path) as stream:
            for offset in self._offsets:
                yield self._read(stream, offset)

    @overload
    def __getitem__(self, index: int) -> LedgerEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LedgerEntry]: ...
    def __getitem__(self, index: int | slice) -> LedgerEntry | Sequence[LedgerEntry]:
        if isinstance(index, slice):
            return _Steps(self._path, self._offsets[index], self._numbers[index])
        with open_to_read(self._path) as stream:
            return self._read(stream, self._offsets[index])

    def _read(self, stream: IO[bytes], offset: int) -> LedgerEntry:
        stream.seek(offset)
        found = parse_line(stream.readline(), where=str(self._path))
        assert isinstance(found, LedgerEntry)
        return found


def ids_of_slices(entry: LedgerEntry) -> Iterator[tuple[Slice, tuple[int, ...]]]:
    """Each micro-batch of a step with the sequences that it held."""
    first = 0
    for one in entry.slices:
        yield one, entry.sequence_ids[first : first + one.sequences]
        first += one.sequences


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def line_of(record: Line) -> bytes:
    """As it stands in the file."""
    # A path may hold what is no letter; a ledger that cannot be written would be worse than a question mark in it.
    return (record.to_json(indent=None) + "\n").encode("utf-8", "replace")


@cache
def _step_adapter() -> TypeAdapter[LedgerEntry]:
    from pydantic import TypeAdapter

    return TypeAdapter(LedgerEntry)


def _type_of(text: bytes, where: str) -> type[Line]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    kind = data.get("kind") if isinstance(data, dict) and data.get("schema") == LedgerEntry.schema else "step"
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    raise RecordError(_('{where}: kind is {kind!r}; "header", "step" and "summary" are known.').format(where=where, kind=kind))


def _warn(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def _open(path: Path) -> FileIO:
    """Open for appending, below whole lines of a ledger or at the start of an empty file."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(_("{path} is not a regular file, and a ledger cannot be kept there.").format(path=path))
        if not path.parent.is_dir():
            raise UsageError(_("The folder {folder} for the ledger does not exist.").format(folder=path.parent))
        stream = FileIO(path, "a+")
        try:
            _lock(path, stream)
            _mend(path, stream)
            _lock(path, stream)  # again: a lock of this kind ends when its process closes the file anywhere
        except BaseException:
            stream.close()
            raise
    except BrimError:
        raise
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error
    return stream


def _copied_back(stream: FileIO, path: Path) -> FileIO:
    """A deleted file that is still open, under its name again."""
    part = path.with_name(f".{path.name}.part")
    copy = FileIO(part, "w+")
    try:
        stream.seek(0)
        while block := stream.read(_BLOCK_BYTES):
            while block:  # a disk that is nearly full takes a part of it
                block = block[copy.write(block) or 0 :]
        os.fsync(copy.fileno())
        part.rename(path)
    finally:
        copy.close()
    restored = FileIO(path, "a+")
    _lock(path, restored)
    stream.close()
    return restored


def free_name(path: Path) -> Path:
    """`ledger.jsonl.damaged-1`, or the first number that is free."""
    number = 1
    while (name := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return name


def _lock(path: Path, stream: FileIO) -> None:
    """One process writes at a time. A process that is killed gives its lock back; file systems without locks do without."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UsageError(
            _("Another run is writing {path}.").format(path=path),
            hint=_("Wait until it has ended, or take another output folder."),
        ) from error
    except OSError:
        return


def _mend(path: Path, stream: FileIO) -> None:
    """End an earlier run's last line: by its missing line end if it is whole, else by cutting it off."""
    with path.open("rb") as old:
        first = old.readline(_BLOCK_BYTES)
        if not _begins_a_ledger(first):
            raise UsageError(
                _("{path} holds something else than a ledger, and nothing is appended to it.").format(path=path),
                hint=_("Move it away, or take another output folder."),
            )
        size = old.seek(0, os.SEEK_END)
        start = _start_of_torn_line(old, size)
        old.seek(start)
        torn = old.read()
    if not torn:
        return
    try:
        parse_line(torn)
    except RecordError:
        stream.truncate(start)
    else:
        stream.write(b"\n")


def _begins_a_ledger(first: bytes) -> bool:
    if first[: len(START)] == START[: len(first)]:
        return True
    # What a power cut may leave of a file: its size, and zeros.
    return not first.strip(b"\0")


def _start_of_torn_line(stream: IO[bytes], size: int) -> int:
    """Where the line begins that has no end; `size` if every line has one."""
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        stream.seek(begin)
        found = stream.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def open_to_read(path: str | Path) -> IO[bytes]:
    """A ledger that may not be there."""
    try:
        return Path(path).open("rb")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(_("Cannot read {path}: {why}.").format(path=path, why=why)) from error


def _cannot_write(path: Path, error: Exception, *, lines: int = 0) -> RunError:
    text = _("Cannot write {path}: {why}.").format(path=path, why=getattr(error, "strerror", None) or error)
    if not lines:
        return RunError(text, hint=_("See that its disk has room and that you may write there."))
    lost = _("Lines at its end that are missing: {lines}. The steps themselves were taken.").format(lines=lines)
    hint = _("Make room and go on from the last checkpoint: the steps after it are taken again, and written down.")
    return RunError(sentences(text, lost), hint=hint)
