"""What the machine did between two looks: who computed, who waited for the disk, what went to swap.

Two numbers of the step itself, its seconds and the seconds in which it waited for data, say that a loader is too slow, and not why. Workers
that are busy all the time need company; workers that are idle while the disk blocks them need a faster disk; a training process without
workers loads between steps. So a few counters of the system are read beside them, at most once a second, for a fraction of a millisecond.

This file is also loaded by its path, inside interpreters that have no brim: it imports the standard library only and runs on Python 3.9.

    meter = PulseMeter(workers=lambda: [worker.pid for worker in loader_workers])
    ...
    meter.read()      # {"seconds": 1.2, "workers": 4, "worker_cpu": 0.98, ...}: the fields of brim.records.Pulse

Everything counts from the look before; the first counts from the meter's making. What this system does not tell is None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_STATE_AT = 2
"""Place of the process's state in /proc/PID/stat (proc(5), which counts from 1); what follows the name is split from there on."""
_CPU_AT = (14 - 1 - _STATE_AT, 15 - 1 - _STATE_AT)
_BLOCKED_AT = 42 - 1 - _STATE_AT
_LARGEST_FILE = 1 << 15

Pids = Callable[[], Iterable[int]]


class PulseMeter:
    """Reads the counters of this process and of the loader's workers.

    `workers` gives their process ids at the moment; `utilisation` the share of time in which the device computed (0 to 1); `retries` how
    often its allocator has had to give its cache back since the process began. Each may return None; what they raise counts as None.

    A look costs less than 0.1 ms, and 0.03 ms for each worker.
    """

    def __init__(
        self,
        workers: Pids | None = None,
        utilisation: Callable[[], Any] | None = None,
        retries: Callable[[], Any] | None = None,
    ) -> None:
        self._workers = workers
        self._utilisation = utilisation
        self._retries = retries
        self._disk_waits_are_counted = _disk_waits_are_counted()
        self._before = self._look()

    def read(self) -> dict[str, Any]:
        """What happened since the last call."""
        before, now = self._before, self._look()
        self._before = now
        seconds = max(now["time"] - before["time"], 1e-9)
        stayed = [pid for pid in now["pids"] if pid in before["processes"] and pid in now["processes"]]
        utilisation = _asked(self._utilisation)
        return {
            "seconds": seconds,
            "device_utilisation": None if utilisation is None else min(max(float(utilisation), 0.0), 1.0),
            "workers": None if self._workers is None else len(now["pids"]),
            "worker_cpu": _mean([_grown(before, now, pid, "cpu") for pid in stayed], seconds),
            "main_cpu": max(now["cpu"] - before["cpu"], 0.0) / seconds,
            "read_bytes": _sum([_grown(before, now, pid, "read_bytes") for pid in [os.getpid(), *stayed]]),
            "blocked_seconds": self._blocked(before, now, [os.getpid(), *stayed], seconds),
            "retries": _difference(before["retries"], now["retries"]),
            "swapped_bytes": _swapped(before, now),
        }

    def _look(self) -> dict[str, Any]:
        pids = _asked(lambda: [int(pid) for pid in self._workers()] if self._workers is not None else []) or []
        in_swap = _in_swap()
        return {
            "time": time.monotonic(),
            "cpu": time.process_time(),
            "pids": pids,
            "processes": {pid: _process(pid) for pid in [os.getpid(), *pids]},
            "stalled_seconds": None if self._disk_waits_are_counted else _stalled_seconds(),
            "retries": _asked(self._retries),
            "in_swap": in_swap,
            "swapped_bytes": _swapped_bytes() if in_swap else None,
        }

    def _blocked(self, before: dict[str, Any], now: dict[str, Any], pids: list[int], seconds: float) -> float | None:
        if self._disk_waits_are_counted:
            blocked: float | None = _sum([_grown(before, now, pid, "blocked_seconds") for pid in pids])
            return blocked
        # Of the whole machine: the time in which somebody waited. Never more than passed.
        stalled: float | None = _difference(before["stalled_seconds"], now["stalled_seconds"])
        return None if stalled is None else min(stalled, seconds)


def _swapped(before: dict[str, Any], now: dict[str, Any]) -> int | None:
    """Nothing while this process has nothing there: what others swap does not slow it down."""
    if not now["in_swap"]:
        return None if now["in_swap"] is None else 0
    written: int | None = _difference(before["swapped_bytes"], now["swapped_bytes"])
    return written


def _process(pid: int) -> dict[str, Any]:
    """The counters of one process since it began; those that it hides are missing."""
    found: dict[str, Any] = {}
    text = _text(f"/proc/{pid}/stat")
    # The name stands in parentheses and may hold anything, blanks and parentheses too.
    words = text[text.rfind(b")") + 1 :].split()
    if len(words) > _BLOCKED_AT:
        found["cpu"] = sum(int(words[place]) for place in _CPU_AT) / _TICKS_PER_SECOND
        found["blocked_seconds"] = int(words[_BLOCKED_AT]) / _TICKS_PER_SECOND
    for line in _text(f"/proc/{pid}/io").splitlines():
        if line.startswith(b"read_bytes:"):
            found["read_bytes"] = int(line.split()[1])
    return found


def _disk_waits_are_counted() -> bool:
    """Linux counts them always before 5.14, and since then only where that is switched on."""
    switch = _text("/proc/sys/kernel/task_delayacct").strip()
    return switch != b"0" and bool(_text("/proc/self/stat"))


def _stalled_seconds() -> float | None:
    """The time in which some process of this machine waited for a disk (pressure stall information)."""
    for line in _text("/proc/pressure/io").splitlines():
        if line.startswith(b"some"):
            return int(line.rpartition(b"total=")[2]) / 1e6
    return None


def _in_swap() -> bool | None:
    for line in _text("/proc/self/status").splitlines():
        if line.startswith(b"VmSwap:"):
            return int(line.split()[1]) > 0
    return None


def _swapped_bytes() -> int | None:
    """What the machine has written to swap since it started: pages that go out and come back again and again are seen here."""
    for line in _text("/proc/vmstat").splitlines():
        if line.startswith(b"pswpout "):
            return int(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _grown(before: dict[str, Any], now: dict[str, Any], pid: int, name: str) -> Any:
    return _difference(before["processes"].get(pid, {}).get(name), now["processes"].get(pid, {}).get(name))


def _difference(before: Any, now: Any) -> Any:
    """None where one of them is not known; never below 0, which a process id that was given anew would cause."""
    return None if before is None or now is None else max(now - before, 0)


def _sum(values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: list[Any], seconds: float) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) / seconds if known else None


def _asked(question: Callable[[], Any] | None) -> Any:
    if question is None:
        return None
    try:
        return question()
    except Exception:  # noqa: BLE001 (a pulse that cannot be felt may not stop a run)
        return None


def _text(path: str) -> bytes:
    """The whole of a small file of the system; nothing where it cannot be read. Descriptors, for half the cost of a stream."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _LARGEST_FILE)
    except OSError:  # a process that has ended meanwhile
        return b""
    finally:
        os.close(descriptor)
