"""Memory of this process, as the operating system counts it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def data_bytes() -> int:
    """Private writable memory of this process, which RLIMIT_DATA limits. Linux only."""
    data = _status_bytes("VmData")
    assert data is not None
    return data


def peak_data_bytes() -> int:
    """Approximate peak of private writable memory since this process was forked. Linux keeps the peak of all mapped memory only; the other
    mappings (code, files) hardly change after imports, so their current size is subtracted.
    """
    peak, size, data = (_status_bytes(field) for field in ("VmPeak", "VmSize", "VmData"))
    assert peak is not None
    assert size is not None
    assert data is not None
    return max(data, peak - (size - data))


def swapped_bytes() -> int:
    """Memory of this process that is in swap now."""
    return _status_bytes("VmSwap") or 0


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    resident = _status_bytes("VmRSS")
    if resident is None:
        import psutil

        resident = int(psutil.Process().memory_info().rss)
    return resident


def file_bytes() -> int:
    """The part of resident memory that is mapped from files, mostly code of libraries. 0 if the system does not report it."""
    return (_status_bytes("RssFile") or 0) + (_status_bytes("RssShmem") or 0)


def peak_resident_bytes() -> int | None:
    """Peak resident memory of this process since its start, or since `forget_peak`."""
    high_water = _status_bytes("VmHWM")
    if high_water is not None:
        return high_water
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Restart the count of `peak_resident_bytes`. Linux only; has no effect elsewhere."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
