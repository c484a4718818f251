"""What makes a checkpoint whole, told by its files alone. Neither torch nor transformers is imported, and nothing is loaded.

    RUN/.saving/checkpoint-N                    being written, or on its way out; the next start removes all that is here
    RUN/checkpoint-N                            complete
    RUN/checkpoint-N/brim_checkpoint.json       its manifest, `brim.checkpoint/2`: the size and the checksum of every file
    RUN/brim_model.json                         the same for the trained model in the run's folder

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
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from brim.errors import RecordError, UsageError
from brim.locale import _
from brim.machine.screen import say as say_on_screen
from brim.record import STRICT, Bytes, Count, Record
from brim.records import FileDamage
from brim.sizes import MIB
from brim.trainer.disk import sync

SAVING: Final = ".saving"
MANIFEST: Final = "brim_checkpoint.json"
MODEL_MANIFEST: Final = "brim_model.json"
STATE: Final = "trainer_state.json"
"""The Trainer's own state, the last file that it writes."""
_NAME: Final = "checkpoint-"
_BLOCK_BYTES: Final = MIB
_ENDS_OF_FILES_ABOVE: Final = 64 * MIB
"""`brim.checkpoint/1` has sums of the first and the last MiB of larger files."""
_EXCHANGE: Final = 2
"""RENAME_EXCHANGE of renameat2(2)."""
_HERE: Final = -100
"""AT_FDCWD."""


Progress = Callable[[str, int, int], None]
"""`progress(name, done, total)`: bytes of a checkpoint, or of the model, that were read so far."""


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """One file as it was written."""

    __pydantic_config__ = STRICT

    size_bytes: Bytes
    crc32: Count
    """Of all its bytes."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """Everything that belongs to a checkpoint, or to the trained model."""

    schema: ClassVar[str] = "brim.checkpoint/2"

    step: Count
    files: dict[str, FileSum]
    """By their paths in the folder, with slashes."""


class _FirstManifest(Manifest):
    """The first version: of files above 64 MiB, the sum is of the first and the last MiB."""

    schema: ClassVar[str] = "brim.checkpoint/1"


@dataclass(frozen=True)
class Check:
    """What a look at the files of a checkpoint, or of the model, has shown."""

    damages: tuple[FileDamage, ...] = ()
    unverified: tuple[str, ...] = ()
    """Files of which not every byte is covered by a sum: they were written by an older brim, or not by brim."""
    size_bytes: int = 0


# Finding one.


def last_checkpoint(
    folder: str | Path,
    *,
    say: Callable[[str], None] | None = None,
    none_is_error: bool = True,
    with_sums: bool = True,
    is_of_brim: bool = True,
    progress: Progress | None = None,
) -> Path | None:
    """The checkpoint of the highest step that is whole; None where there is none at all.

    Damaged ones are passed over, each with a sentence on the screen (of the first rank, or to `say`). Where all are damaged, that
    is an error, for to start anew in silence would be worse; with `none_is_error=False` the answer is None then too. `with_sums` reads
    every byte of it; without, only the sizes of files are compared. `is_of_brim`: written by `brim train`, and so with a manifest.
    """
    tell = say or _say_once
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        check = check_files(path, with_sums=with_sums, progress=progress)
        if not check.damages:
            if with_sums and check.unverified and (is_of_brim or (path / MANIFEST).exists()):
                tell(not_fully_verified(path))
            return path
        damaged.append(f"{path.name}: {words_of(check.damages[0])}")
        text = _("brim: {path} is damaged and is not used: {damage}")
        tell(text.format(path=path, damage=words_of(check.damages[0])))
    if damaged and none_is_error:
        raise UsageError(
            _("Every checkpoint in {folder} is damaged. {damages}").format(folder=folder, damages=" ".join(damaged)),
            hint=_("Restore the named files from a backup, or start again with another output folder."),
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
    """The first thing that is wrong with a checkpoint, as a sentence; None if it is whole."""
    damages = check_files(path, with_sums=with_sums).damages
    return words_of(damages[0]) if damages else None


def check_files(path: Path, *, name: str = MANIFEST, with_sums: bool = True, progress: Progress | None = None) -> Check:
    """Compare the files in a folder with its manifest. Without sums, sizes must do.

    A checkpoint without a manifest was written by the Trainer alone: its files are looked at for what they say of themselves.
    """
    try:
        if not path.is_dir():
            return Check((FileDamage(file="", problem="not-a-folder"),))
        if not (path / name).exists():
            return _by_its_files(path)
        return _against_manifest(path, name, with_sums=with_sums, progress=progress)
    except OSError as error:
        return Check((FileDamage(file="", problem="unreadable", detail=error.strerror or str(error)),))


def check_model_without_manifest(folder: Path) -> Check:
    """The trained model of a run of an older brim: its files are looked at for what they say of themselves."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix in {".json", ".safetensors"}]
    found = [file for file in files if file.suffix == ".safetensors" or file.name.endswith(("config.json", ".index.json"))]
    return _check_by_themselves(folder, found)


def words_of(damage: FileDamage) -> str:
    """A damage as a sentence."""
    text = {
        "missing": _("{file} is missing."),
        "size": _("{file} has {found} bytes, and {written} were written."),
        "content": _("{file} is not as it was written: its bytes have changed."),
        "incomplete": _("{file} is damaged, or was not written to its end."),
        "manifest": "{detail}",
        "not-a-folder": _("It is not a folder."),
        "lines": _("{file} is damaged in these lines: {lines}."),
        "unreadable": _("{file} cannot be read: {detail}.") if damage.file else _("It cannot be read: {detail}."),
    }[damage.problem]
    return text.format(
        file=damage.file,
        found=damage.found_bytes,
        written=damage.written_bytes,
        detail=damage.detail,
        lines=", ".join(map(str, damage.lines)),
    )


def not_fully_verified(path: Path) -> str:
    """What an older checkpoint cannot show."""
    text = _(
        "brim: {path} is not fully verified: an older brim wrote it, without a checksum of every byte. New checkpoints have one."
    )
    return text.format(path=path)


def read_manifest(file: Path) -> Manifest:
    """Of this version, or of the one before."""
    try:
        return Manifest.read(file)
    except RecordError:
        with contextlib.suppress(RecordError):
            return _FirstManifest.read(file)
        raise


def _against_manifest(path: Path, name: str, *, with_sums: bool, progress: Progress | None) -> Check:
    try:
        manifest = read_manifest(path / name)
    except RecordError as error:
        return Check((FileDamage(file=name, problem="manifest", detail=error.message),))
    has_ends = isinstance(manifest, _FirstManifest)
    total = sum(each.size_bytes for each in manifest.files.values())
    damages, unverified, done = [], [], 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(path.name, done, total)

    for file, wanted in manifest.files.items():
        ends_only = has_ends and wanted.size_bytes > _ENDS_OF_FILES_ABOVE
        if ends_only:
            unverified.append(file)
        damage = _damage_of_file(path, file, wanted, (read if with_sums else None), ends_only=ends_only)
        if damage is not None:
            damages.append(damage)
    return Check(tuple(damages), tuple(unverified), total)


def _damage_of_file(
    folder: Path, name: str, wanted: FileSum, read: Callable[[int], None] | None, *, ends_only: bool
) -> FileDamage | None:
    file = folder / name
    try:
        if not file.is_file():
            return FileDamage(file=name, problem="missing", written_bytes=wanted.size_bytes)
        size = file.stat().st_size
        if size != wanted.size_bytes:
            return FileDamage(file=name, problem="size", found_bytes=size, written_bytes=wanted.size_bytes)
        if read is not None and sum_of(file, read, ends_only=ends_only) != wanted:
            return FileDamage(file=name, problem="content", written_bytes=wanted.size_bytes)
    except OSError as error:
        return FileDamage(file=name, problem="unreadable", detail=error.strerror or str(error))
    return None


def _by_its_files(path: Path) -> Check:
    if not (path / STATE).is_file():
        return Check((FileDamage(file=STATE, problem="missing"),))
    return _check_by_themselves(path, [file for file in sorted(path.rglob("*")) if file.is_file()])


def _check_by_themselves(folder: Path, files: list[Path]) -> Check:
    names = {file: file.relative_to(folder).as_posix() for file in files}
    damages = tuple(FileDamage(file=names[file], problem="incomplete") for file in files if not _says_it_is_whole(file))
    return Check(damages, tuple(names.values()), sum(file.stat().st_size for file in files))


def _says_it_is_whole(file: Path) -> bool:
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


def sum_of(file: Path, read: Callable[[int], None] | None = None, *, ends_only: bool = False) -> FileSum:
    """The size of a file, and the sum of its bytes. `read(count)` is called after each block."""
    size, found = file.stat().st_size, 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with file.open("rb", buffering=0) as stream:
        for start, end in [(0, _BLOCK_BYTES), (size - _BLOCK_BYTES, size)] if ends_only else [(0, size)]:
            stream.seek(start)
            left = end - start
            while left and (count := stream.readinto(block[: min(left, _BLOCK_BYTES)])):
                found = zlib.crc32(block[:count], found)
                left -= count
                if read is not None:
                    read(count)
    return FileSum(size_bytes=size, crc32=found)


# Writing one.


def seal(part: Path, step: int, *, sums: Mapping[str, FileSum] | None = None, name: str = MANIFEST) -> int:
    """Write the manifest of a folder that is complete, and bring everything to the disk. Its bytes.

    `sums` are those that were taken while files were written, by their absolute paths; other files are read.
    """
    files = {file.relative_to(part).as_posix(): file for file in sorted(part.rglob("*")) if file.is_file()}
    files.pop(name, None)
    found = {each: _known_sum(file, sums or {}) or sum_of(file) for each, file in files.items()}
    Manifest(step=step, files=found).write(part / name)
    # What is left of a folder that somebody has deleted meanwhile is no checkpoint: every file that was written must be there.
    for file in {*map(str, files.values()), *(sums or {})}:
        Path(file).stat()
    for path in (*part.rglob("*"), part):
        sync(path)
    return sum(each.size_bytes for each in found.values())


def _known_sum(file: Path, sums: Mapping[str, FileSum]) -> FileSum | None:
    known = sums.get(str(file.absolute()))
    return known if known is not None and known.size_bytes == file.stat().st_size else None


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
    sync(final.parent)


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


def _say_once(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        say_on_screen(sentence)
