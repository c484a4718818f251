"""The host as this process may use it.

`psutil` tells what the computer has. A container, a job scheduler or a shell's ulimit may allow much less, and exceeding *that* is
what kills a run. So the limits of every control group above this process are read (cgroup v2 and v1), with the CPU affinity and
quota, and the smallest number wins.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from brim.machine.records import Host

if TYPE_CHECKING:
    from collections.abc import Iterator

# cgroup v1 says "no limit" with the largest page-aligned number; anything near it is no limit either.
_NO_LIMIT = 1 << 60
_MOST_DIGITS = 20


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on the memory of this process: how much, and how much of it is left."""

    total_bytes: int
    available_bytes: int
    source: str


def host(root: Path = Path("/")) -> Host:
    """Look at the host now. `root` is where /proc, /sys and /dev are read: another folder in tests."""
    import psutil

    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    limits = [MemoryLimit(memory.total, memory.available, "physical memory"), *cgroup_memory(root), *_ulimits()]
    smallest = min(limits, key=lambda limit: limit.total_bytes)
    affinity = _affinity()
    quota = cgroup_cpu_quota(root)
    shm_total, shm_free = _shared_memory(root / "dev/shm")
    return Host(
        memory_bytes=smallest.total_bytes,
        available_bytes=max(0, min(limit.available_bytes for limit in limits)),
        memory_limited_by=smallest.source,
        cores=min(float(affinity), quota) if quota else float(affinity),
        affinity_cores=affinity,
        quota_cores=quota,
        physical_cores=psutil.cpu_count(logical=False),
        shm_bytes=shm_total,
        shm_free_bytes=shm_free,
        swap_bytes=swap.total,
        swap_free_bytes=swap.free,
        processor=_processor(root),
    )


def cgroup_memory(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Memory limits of all control groups that hold this process, the innermost first."""
    for version, folder in _cgroups(root, "memory"):
        if version == 2:
            # memory.high throttles long before memory.max kills; a run that is throttled to a crawl is no better.
            limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
            used, cache = _number(folder / "memory.current"), _stat(folder / "memory.stat", "inactive_file")
        else:
            # What the groups above allow is told here too, also where they are not mounted.
            hierarchical = _stat(folder / "memory.stat", "hierarchical_memory_limit") or None
            limits = [_number(folder / "memory.limit_in_bytes"), hierarchical]
            used, cache = (
                _number(folder / "memory.usage_in_bytes"),
                _stat(folder / "memory.stat", "total_inactive_file"),
            )
        known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
        if known:
            total = min(known)
            yield MemoryLimit(total, total - max(0, (used or 0) - cache), f"cgroup v{version} {_name(folder, root)}")


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota, in cores, of all control groups that hold this process; None without one."""
    quotas = []
    for version, folder in _cgroups(root, "cpu"):
        if version == 2:
            words = _text(folder / "cpu.max").split()
            quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "0")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
        if (
            quota.isdecimal()
            and period.isdecimal()
            and len(quota + period) <= 2 * _MOST_DIGITS
            and int(quota) > 0
            and int(period) > 0
        ):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def oom_kills(root: Path = Path("/")) -> int:
    """How often the kernel's OOM killer has struck in this process's control groups since they exist."""
    kills = 0
    for version, folder in _cgroups(root, "memory"):
        kills = max(kills, _stat(folder / ("memory.events" if version == 2 else "memory.oom_control"), "oom_kill"))
    return kills


def cache_folder() -> Path:
    """Where brim keeps what it can compute again: `BRIM_CACHE`, else `$XDG_CACHE_HOME/brim`, else `~/.cache/brim`."""
    own = os.environ.get("BRIM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore a relative path.
    if shared and Path(shared).is_absolute():
        return Path(shared) / "brim"
    return Path.home() / ".cache" / "brim"


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The control groups of this process for one controller, from its own to the mount's root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _colon, rest = line.partition(":")
        controllers, _colon, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            version, mount = 2, root / "sys/fs/cgroup"
            if not (mount / "cgroup.controllers").exists():
                mount = root / "sys/fs/cgroup/unified"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
            if not mount.exists():
                mount = root / "sys/fs/cgroup" / controllers
        else:
            continue
        relative = path.strip("/")
        # Inside a container the path may be the host's and absent here; then the mount's root is the container's own group.
        folder = mount / relative if (mount / relative).is_dir() else mount
        while folder.is_dir():
            yield version, folder
            if folder == mount:
                break
            folder = folder.parent


def _ulimits() -> Iterator[MemoryLimit]:
    try:
        import resource

        import psutil
    except ImportError:  # Windows
        return
    mine = psutil.Process().memory_info()
    for name, used in (("RLIMIT_AS", mine.vms), ("RLIMIT_DATA", getattr(mine, "data", mine.rss))):
        soft, _hard = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(soft, soft - used, name)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _shared_memory(folder: Path) -> tuple[int | None, int | None]:
    if not hasattr(os, "statvfs"):
        return None, None
    try:
        status = os.statvfs(folder)
    except OSError:
        return None, None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail


def _processor(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def multiplies_bf16(root: Path = Path("/")) -> bool:
    """Whether the processor has instructions for bfloat16 products; True where /proc/cpuinfo does not list its features."""
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return features is None or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features[1].split())


def _name(folder: Path, root: Path) -> str:
    return "/" + str(folder.relative_to(root))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _stat(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _space, value = line.partition(" ")
        if name == key and value.strip().isdecimal() and len(value) <= _MOST_DIGITS:
            return int(value)
    return 0
