"""Whether the process that writes a ledger still lives: it holds a lock on the file as long as it does, and the system tells whose."""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FLOCK: Final = "hhqqi"
"""Linux's `struct flock`: kind, whence, start, length, process (fcntl(2))."""
_LOCAL: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems of which every writer is on this machine, so that no lock means no writer. Of others (NFS, SMB, FUSE) that is not known."""


@dataclass(frozen=True)
class Life:
    """Who writes the ledger."""

    is_alive: bool | None
    """None: cannot be told from here."""
    process: int | None = None
    """Known where it runs on this machine, and not in another container."""


def life_of(ledger: Path) -> Life:
    """Ask the system who holds the ledger's lock."""
    if sys.platform != "linux":
        return Life(None)
    import fcntl

    try:
        with ledger.open("rb") as stream:
            asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            kind, _whence, _start, _length, process = struct.unpack(_FLOCK, fcntl.fcntl(stream, fcntl.F_GETLK, asked))
            device = os.fstat(stream.fileno()).st_dev
    except (OSError, struct.error):
        return Life(None)
    if kind != fcntl.F_UNLCK:
        return Life(True, process if process > 0 else None)
    return Life(False if _is_local(device, ledger) else None)


def _is_local(device: int, path: Path) -> bool:
    """Whether the file system is one that no other machine writes to."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        # proc(5): number, parent, major:minor, root, mount point, options, optional fields, a dash, type, source, options.
        before, _dash, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0] in _LOCAL
    # Some file systems (btrfs, overlay) number their files otherwise than their mounts: the longest mount point above the file decides.
    mounts = [(line.split()[4], line.partition(" - ")[2].split()[0]) for line in lines]
    above = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return bool(above) and max(above)[1] in _LOCAL


def environment_of(process: int) -> dict[str, str]:
    """The variables that a process was started with; none where that may not be seen."""
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (word.decode("utf-8", "replace").partition("=") for word in words if word)
    return {name: value for name, _sign, value in pairs}
