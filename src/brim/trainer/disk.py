"""What a disk still takes, why it took no more, and how what was written reaches it."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Final

from brim.locale import _

if TYPE_CHECKING:
    from pathlib import Path

_DISK_ERRORS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
_DISK_WORDS: Final = tuple(f"os error {number}" for number in sorted(_DISK_ERRORS))
"""How Rust, and so safetensors, writes an errno."""
_TORCH_WORDS: Final = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")
"""torch's writer of zip files says no errno: its stream failed, or it is not where it should be after a write."""


def free_bytes(folder: Path) -> int:
    """What may still be written there; the folder need not be there yet."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def is_of_missing_file(error: BaseException | None) -> bool:
    """Whether a file or a folder was not where it had been."""
    while error is not None:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def sync(path: Path) -> None:
    """Bring a file or a folder to the disk.

    Without this a power cut can leave an empty file under a final name: names reach the disk before what is in them.
    """
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
