"""Memory of this process, as the operating system counts it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def data_bytes() -> int:
    """Private writable memory of this process: what RLIMIT_DATA counts. Linux only."""
    found = _status_bytes("VmData")
    assert found is not None
    return found


def peak_data_bytes() -> int:
    """Largest private writable memory since this process was forked, as nearly as Linux tells: it keeps the peak of all that is mapped, and
    what is mapped besides (code, files) hardly changes after imports.
    """
    found = {field: _status_bytes(field) for field in ("VmPeak", "VmSize", "VmData")}
    peak, size, data = found["VmPeak"], found["VmSize"], found["VmData"]
    assert peak is not None
    assert size is not None
    assert data is not None
    return max(data, peak - (size - data))


def swapped_bytes() -> int:
    """Memory of this process that lies in swap now."""
    return _status_bytes("VmSwap") or 0


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    found = _status_bytes("VmRSS")
    if found is None:
        import psutil

        found = int(psutil.Process().memory_info().rss)
    return found


def file_bytes() -> int:
    """Of what is in RAM, the pages of files: libraries' code above all. 0 where the system does not tell."""
    return (_status_bytes("RssFile") or 0) + (_status_bytes("RssShmem") or 0)


def peak_resident_bytes() -> int | None:
    """Largest resident memory of this process since its start, or since `forget_peak`."""
    found = _status_bytes("VmHWM")
    if found is not None:
        return found
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Linux: let `peak_resident_bytes` count from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
