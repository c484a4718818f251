"""What makes a checkpoint whole, told by its files alone. Neither torch nor transformers is imported, and nothing is loaded.

    RUN/.saving/checkpoint-N                    being written, or on its way out; the next start removes all that is here
    RUN/checkpoint-N                            complete
    RUN/checkpoint-N/brim_checkpoint.json       its manifest, `brim.checkpoint/1`: the size and a sum of every file

A checkpoint is written under `.saving`. When all its files are there, the manifest is written, everything is brought to the disk, and then
the folder is renamed, which a file system does wholly or not at all; the folder above is brought to the disk last. Old ones leave the same
way: renamed into `.saving` first, deleted there. So whatever moment a process is killed in, or the power goes, each folder that has a
final name is complete, and the last good one is there until the next is.

What is read, and how: JSON as JSON, weights as safetensors, and the states of optimizer, schedule, scaler and random numbers by the
Trainer with `weights_only=True`, which builds tensors and plain values and runs no code. `training_args.bin` is a pickle for other
tools; it is written by the Trainer, and never read here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from brim.errors import RecordError, UsageError
from brim.locale import _
from brim.machine.screen import say as say_on_screen
from brim.record import STRICT, Bytes, Count, Record
from brim.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

SAVING: Final = ".saving"
MANIFEST: Final = "brim_checkpoint.json"
STATE: Final = "trainer_state.json"
"""The Trainer's own state, the last file that it writes."""
_NAME: Final = "checkpoint-"
_SUMMED_WHOLE_BYTES: Final = 64 * MIB
"""Of larger files only the ends are summed, so that looking at a checkpoint takes no longer than a moment."""
_END_BYTES: Final = MIB
_EXCHANGE: Final = 2
"""RENAME_EXCHANGE of renameat2(2)."""
_HERE: Final = -100
"""AT_FDCWD."""


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """One file of a checkpoint as it was written."""

    __pydantic_config__ = STRICT

    size_bytes: Bytes
    crc32: Count
    """Of the whole file; of its first and last MiB where it is larger than 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """Everything that belongs to a checkpoint."""

    schema: ClassVar[str] = "brim.checkpoint/1"

    step: Count
    files: dict[str, FileSum]
    """By their paths in the folder, with slashes."""


# Finding one.


def last_checkpoint(folder: str | Path, *, say: Callable[[str], None] | None = None, none_is_error: bool = True) -> Path | None:
    """The checkpoint of the highest step that is whole; None where there is none at all.

    Damaged ones are passed over, each with a sentence on the screen (of the first rank, or to `say`). Where all are damaged, that
    is an error, for to start anew in silence would be worse; with `none_is_error=False` the answer is None then too.
    """
    tell = say or _say_once
    passed_over: list[str] = []
    for path in reversed(checkpoints(folder)):
        damage = damage_of(path)
        if damage is None:
            return path
        passed_over.append(f"{path.name}: {damage}")
        tell(_("brim: {path} is passed over: {damage}").format(path=path, damage=damage))
    if passed_over and none_is_error:
        raise UsageError(
            _("There is no whole checkpoint in {folder}. {damages}").format(folder=folder, damages=" ".join(passed_over)),
            hint=_("Bring one back from a copy, or move them away and start anew."),
        )
    return None


def checkpoints(folder: str | Path) -> list[Path]:
    """All that have a final name, whole or not, by step."""
    found = [path for path in Path(folder).glob(f"{_NAME}*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    number = path.name.removeprefix(_NAME)
    return int(number) if path.name.startswith(_NAME) and number.isdecimal() and number.isascii() else None


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"{_NAME}{step}"


def damage_of(path: Path, *, with_sums: bool = True) -> str | None:
    """What is wrong with a checkpoint, as a sentence; None if it is whole. Without sums, sizes must do.

    One without a manifest was written by the Trainer alone: its files are looked at for what they say of themselves.
    """
    try:
        if not path.is_dir():
            return _("It is not a folder.")
        if (path / MANIFEST).exists():
            return _against_manifest(path, with_sums=with_sums)
        return _by_its_files(path)
    except OSError as error:
        return _("It cannot be read: {why}.").format(why=error.strerror or error)


def _against_manifest(path: Path, *, with_sums: bool) -> str | None:
    try:
        manifest = Manifest.read(path / MANIFEST)
    except RecordError as error:
        return error.message
    for name, wanted in manifest.files.items():
        file = path / name
        if not file.is_file():
            return _("{name} is missing.").format(name=name)
        size = file.stat().st_size
        if size != wanted.size_bytes:
            return _("{name} has {found} bytes, and {wanted} were written.").format(
                name=name, found=size, wanted=wanted.size_bytes
            )
        if with_sums and sum_of(file).crc32 != wanted.crc32:
            return _("{name} is not as it was written.").format(name=name)
    return None


def _by_its_files(path: Path) -> str | None:
    if not (path / STATE).is_file():
        return _("{name} is missing.").format(name=STATE)
    for file in sorted(path.rglob("*")):
        if not _says_it_is_whole(file):
            return _("{name} is damaged, or was not written to its end.").format(name=file.relative_to(path).as_posix())
    return None


def _says_it_is_whole(file: Path) -> bool:
    if not file.is_file():
        return True
    if file.name == STATE or file.name.endswith("config.json"):
        return isinstance(_json(file), dict)
    if file.name.endswith(".index.json"):
        index = _json(file)
        shards = index.get("weight_map", {}) if isinstance(index, dict) else None
        return isinstance(shards, dict) and all((file.parent / str(shard)).is_file() for shard in set(shards.values()))
    if file.suffix == ".safetensors":
        return _is_whole_safetensors(file)
    # What torch.save writes is a zip file, whose directory is its end.
    return file.suffix not in {".pt", ".pth"} or zipfile.is_zipfile(file)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None


def _is_whole_safetensors(file: Path) -> bool:
    """Its header says where the last tensor ends, and there the file must end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            return False
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            return False
    return 8 + length + max(ends, default=0) == size


def sum_of(file: Path) -> FileSum:
    """The size of a file, and a sum of what is in it."""
    size = file.stat().st_size
    found = 0
    with file.open("rb") as stream:
        for start, end in [(0, size)] if size <= _SUMMED_WHOLE_BYTES else [(0, _END_BYTES), (size - _END_BYTES, size)]:
            stream.seek(start)
            left = end - start
            while left and (block := stream.read(min(left, _END_BYTES))):
                found = zlib.crc32(block, found)
                left -= len(block)
    return FileSum(size_bytes=size, crc32=found)


# Writing one.


def seal(part: Path, step: int) -> int:
    """Write the manifest of a checkpoint that is complete, and bring everything to the disk. Its bytes."""
    files = {file.relative_to(part).as_posix(): file for file in sorted(part.rglob("*")) if file.is_file()}
    sums = {name: sum_of(file) for name, file in files.items() if name != MANIFEST}
    Manifest(step=step, files=sums).write(part / MANIFEST)
    for path in (*part.rglob("*"), part):
        _sync(path)
    return sum(each.size_bytes for each in sums.values())


def put_in_place(part: Path, final: Path) -> None:
    """Give a sealed checkpoint its name. One of the same name makes way in the same moment, and is left where the new one was."""
    if not final.exists():
        part.rename(final)
    elif not _exchange(part, final):
        # Two acts where the system cannot do it in one. The new one is complete by then, and those of earlier steps are there.
        aside = part.with_name(f"{part.name}-replaced")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        part.rename(final)
    _sync(final.parent)


def take_away(path: Path) -> None:
    """Delete a checkpoint without leaving a half of it under its name."""
    attic = path.parent / SAVING / f"{path.name}-old"
    attic.parent.mkdir(exist_ok=True)
    shutil.rmtree(attic, ignore_errors=True)
    path.rename(attic)
    shutil.rmtree(attic, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove what was being written, or being deleted, when a process ended."""
    shutil.rmtree(folder / SAVING, ignore_errors=True)


def rotate(folder: Path, *, keep: int, newest: Path, best: str | None) -> None:
    """Take old checkpoints away, once the newest is in place. Those of later steps are of another run of this folder, and are left."""
    protected = {newest.resolve()} | ({Path(best).resolve()} if best else set())
    mine = [path for path in checkpoints(folder) if (step_of(path) or 0) <= (step_of(newest) or 0)]
    # A damaged one goes before any that is whole.
    mine.sort(key=lambda path: (damage_of(path, with_sums=False) is None, step_of(path)))
    surplus = [path for path in mine if path.resolve() not in protected][: max(0, len(mine) - keep)]
    for path in surplus:
        with contextlib.suppress(OSError):
            take_away(path)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one act, where the system and the file system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return bool(call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _sync(path: Path) -> None:
    """Without this a power cut can leave an empty file under a final name: names reach the disk before what is in them."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():  # Windows opens no folders
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # file systems that have nothing to bring to a disk
            raise
    finally:
        os.close(descriptor)


def _say_once(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        say_on_screen(sentence)


# Room.

_DISK_ERRORS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
_DISK_WORDS: Final = tuple(f"os error {number}" for number in sorted(_DISK_ERRORS))
"""How Rust, and so safetensors, writes an errno."""
_TORCH_WORDS: Final = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")
"""torch's writer of zip files says no errno: its stream failed, or it is not where it should be after a write."""


def free_bytes(folder: Path) -> int:
    """What may still be written there."""
    return shutil.disk_usage(folder).free


def disk_trouble(error: BaseException) -> str | None:
    """Why the disk did not take what was written, or None where an error is about something else."""
    current: BaseException | None = error
    while current is not None:
        words = str(current)
        if isinstance(current, OSError) and current.errno in _DISK_ERRORS:
            return current.strerror or words
        if type(current).__name__ == "SafetensorError" and any(word in words for word in _DISK_WORDS):
            return words.rpartition("I/O error: ")[2]
        if isinstance(current, RuntimeError) and any(word in words for word in _TORCH_WORDS):
            return _("the file could not be written to its end")
        current = current.__cause__
    return None
