"""Tokens on disk: flat arrays in `.npy` files, mapped into memory when they are read, and a card beside them.

    ids.npy              int32    tokens of all sequences, one after another
    offsets.npy          int64    where each begins, and where the last one ends
    supervised.npy       bool     which of them are learnt                         (causal-lm)
    targets.npy          int32    tokens of all targets                            (seq2seq)
    target_offsets.npy   int64    where each begins                                (seq2seq)
    classes.npy          int32    the class of each sequence                       (classification)
    largest.npy          int32    the largest number among all tokens
    card.json            the card, `brim.data/1`, written last

A folder is built under another name and gets its own when it is complete. Who comes second to the same folder keeps the first one's. Files
grow while rows are read: only what one chunk of rows holds is ever in memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from brim.errors import RecordError, RunError
from brim.locale import _
from brim.records.runs import DataCard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.workload.words import Task

Arrays = dict[str, npt.NDArray[Any]]

_CARD: Final = "card.json"
_PART: Final = ".part"
_OLD_SECONDS: Final = 24 * 3600
_HEADER_BYTES: Final = 128
_VALUES_AT_ONCE: Final = 1 << 20
_TYPES: Final = {
    "ids": "<i4", "offsets": "<i8", "supervised": "|b1", "targets": "<i4", "target_offsets": "<i8", "classes": "<i4",
    "largest": "<i4",
}  # fmt: skip
_FILES: Final[dict[Task, tuple[str, ...]]] = {
    "causal-lm": ("ids", "offsets", "supervised", "largest"),
    "seq2seq": ("ids", "offsets", "targets", "target_offsets", "largest"),
    "classification": ("ids", "offsets", "classes", "largest"),
}


class Writer:
    """A new folder, as it grows."""

    def __init__(self, folder: Path, task: Task) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._counts = dict.fromkeys(_FILES[task], 0)
        self._largest = 0
        with contextlib.ExitStack() as opened:
            for name in _FILES[task]:
                file = opened.enter_context((folder / f"{name}.npy").open("wb"))
                file.write(bytes(_HEADER_BYTES))
                self._files[name] = file
            self._opened = opened.pop_all()
        for name in self._counts:
            if name.endswith("offsets"):
                self.append(name, np.zeros(1))

    def append(self, name: str, values: npt.ArrayLike) -> None:
        """More of this array."""
        array = np.asarray(values).astype(_TYPES[name], copy=False)
        self._files[name].write(array.tobytes())
        self._counts[name] += len(array)

    def append_parts(self, name: str, offsets: str, parts: list[list[int]]) -> None:
        """More sequences of different lengths."""
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        start = self._counts[name]
        tokens = np.fromiter((token for part in parts for token in part), np.int32, int(lengths.sum()))
        self._largest = max(self._largest, int(tokens.max(initial=0)))
        self.append(name, tokens)
        self.append(offsets, start + np.cumsum(lengths))

    def finish(self) -> None:
        """Say in each file how long it became, and see that it is on the disk."""
        self.append("largest", [self._largest])
        for name, file in self._files.items():
            file.seek(0)
            file.write(_header(_TYPES[name], self._counts[name]))
            file.flush()
            os.fsync(file.fileno())
        self.close()

    def close(self) -> None:
        """Whatever happened."""
        self._opened.close()

    def lengths(self, offsets: str) -> npt.NDArray[np.int64]:
        """Of all sequences, when all are written."""
        found: npt.NDArray[np.int64] = np.diff(np.load(self.folder / f"{offsets}.npy", mmap_mode="r", allow_pickle=False))
        return found

    def rewrite(self, name: str, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> None:
        """Other values for an array, when all are written."""
        array = np.load(self.folder / f"{name}.npy", mmap_mode="r+", allow_pickle=False)
        for start in range(0, len(array), _VALUES_AT_ONCE):
            array[start : start + _VALUES_AT_ONCE] = change(array[start : start + _VALUES_AT_ONCE])
        array.flush()


def _header(dtype: str, count: int) -> bytes:
    """Of numpy's format 1.0, always as long as this: the number of values is known only at the end."""
    start = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({count},), }}"
    return start + text.ljust(_HEADER_BYTES - 11).encode() + b"\n"


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A folder beside this one, which takes its place when all went well, and is gone when not."""
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=_PART, dir=folder.parent))
        yield temporary
        _take_place(temporary, folder)
    except OSError as error:
        text = _("The tokens cannot be written to {folder}: {why}.").format(folder=folder.parent, why=error.strerror or error)
        hint = _("Make room there, or name another folder in BRIM_CACHE.")
        raise RunError(text, hint=hint) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _take_place(temporary: Path, folder: Path) -> None:
    # mkdtemp makes private folders; a cache is as public as what the user creates.
    temporary.chmod(folder.parent.stat().st_mode & 0o777)
    for _attempt in range(3):
        with contextlib.suppress(FileExistsError, OSError):
            temporary.rename(folder)
            return
        if stored(folder) is not None:
            return  # somebody was quicker
        with contextlib.suppress(OSError):
            folder.rename(temporary / "damaged")
            shutil.rmtree(temporary / "damaged", ignore_errors=True)
    temporary.rename(folder)


def _remove_old(parent: Path) -> None:
    """What a killed process left behind a day ago."""
    for part in parent.glob(f".*{_PART}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(part, ignore_errors=True)


def stored(folder: Path) -> DataCard | None:
    """The card of a folder that is whole; None where it is not there or damaged."""
    try:
        card = DataCard.read(folder / _CARD)
    except RecordError:
        return None
    arrays = arrays_of(folder, card) if card.fingerprint == folder.name else None
    return card if arrays is not None and _are_sound(arrays, card) else None


def write_card(card: DataCard, folder: Path) -> None:
    """The last file of a folder."""
    card.write(folder / _CARD)


def arrays_of(folder: Path, card: DataCard) -> Arrays | None:
    """The arrays of a folder, mapped; None where a file is missing, or does not hold what the card says."""
    arrays: Arrays = {}
    for name in _FILES[card.task]:
        path = folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            size_bytes = path.stat().st_size
        except (OSError, ValueError, EOFError):
            return None
        if array.dtype.str != _TYPES[name] or array.ndim != 1 or size_bytes != _HEADER_BYTES + array.nbytes:
            return None
        arrays[name] = array
    return arrays if _agree(arrays, card) else None


def _agree(arrays: Arrays, card: DataCard) -> bool:
    n = card.sequences
    offsets, targets = arrays["offsets"], arrays.get("target_offsets")
    if len(offsets) != n + 1 or (targets is not None and len(targets) != n + 1):
        return False
    sizes = {
        "largest": 1,
        "ids": offsets[-1],
        "supervised": offsets[-1],
        "classes": n,
        "targets": 0 if targets is None else targets[-1],
    }
    return all(len(array) == sizes[name] for name, array in arrays.items() if name in sizes)


def _are_sound(arrays: Arrays, card: DataCard) -> bool:
    """Whether the numbers can be what was written. They are looked at once, before a run, not by each process that maps them."""
    offsets = [arrays[name] for name in ("offsets", "target_offsets") if name in arrays]
    if any(each[0] != 0 or bool((each[1:] < each[:-1]).any()) for each in offsets):
        return False
    # Without signs, a number below 0 is a very large one.
    largest = max(int(arrays[name].view("<u4").max(initial=0)) for name in ("ids", "targets") if name in arrays)
    if largest != arrays["largest"][0]:
        return False
    classes = arrays.get("classes")
    return classes is None or (bool((classes >= 0).all()) and bool((classes < len(card.labels)).all()))
