"""Peaks of the caching allocator, and the Python lines that own the memory at the highest one.

The script can reset torch's counters, so they are read at every change of phase and before every reset. The owners are found by walking
torch's memory history backwards, from the blocks that are live now to the moment of the peak.
"""

# ruff: noqa: PTH100, PTH120 (no pathlib in the user's interpreter)

from __future__ import annotations

import functools
import os
from typing import Any

_OWNERS = 12
_HISTORY = 400_000
"""Number of events that are kept. A step of a large model has some tens of thousands."""


class DevicePeaks:
    """The peaks of one device in this process."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self.step = 0
        self.phase = "loading"
        self.owners: list[dict[str, Any]] = []
        self.unaccounted = 0
        """Bytes live at the peak whose allocation is older than the history."""
        self.is_new = False
        """Whether the peak has risen since its owners were last computed."""


class Peaks:
    """The peaks of all devices of this process."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.devices: dict[int, DevicePeaks] = {}
        self.where: tuple[int, str] = (0, "loading")
        """Current step and phase, for a reset in the middle of a phase."""
        self.backward_line = ""
        """`file:line` of the last call of backward: gradients are allocated in threads without Python frames."""

    def keep_before_resets(self) -> None:
        """Read the counters before the script resets them. All reset functions of torch call one of these."""
        native = self._torch._C  # noqa: SLF001
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            reset = getattr(native, name, None)
            if reset is not None:
                setattr(native, name, self._reading_first(reset))

    def _reading_first(self, reset: Any) -> Any:
        @functools.wraps(reset)
        def call(*given: Any) -> Any:
            self.read(*self.where)
            return reset(*given)

        return call

    def record(self) -> None:
        """Start torch's history of allocations."""
        self._torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=_HISTORY)  # noqa: SLF001

    def read(self, step: int, phase: str) -> None:
        """Read torch's counters. A new maximum is attributed to `step` and `phase`, the phase that ends now."""
        if not self._torch.cuda.is_initialized():
            return
        for index in range(self._torch.cuda.device_count()):
            statistics = self._statistics(index)
            if not statistics or (not statistics["reserved_bytes"]["all"]["peak"] and index not in self.devices):
                continue
            device = self.devices.setdefault(index, DevicePeaks())
            device.reserved = max(device.reserved, statistics["reserved_bytes"]["all"]["peak"])
            if statistics["allocated_bytes"]["all"]["peak"] > device.allocated:
                device.allocated = statistics["allocated_bytes"]["all"]["peak"]
                device.step, device.phase, device.is_new = step, phase, True

    def _statistics(self, index: int) -> dict[str, Any]:
        try:
            statistics: dict[str, Any] = self._torch._C._cuda_memoryStats(index)  # noqa: SLF001
        except Exception:  # noqa: BLE001 (a device that this process may not use)
            return {}
        return statistics

    def counts(self, index: int) -> tuple[int, int]:
        """Allocator retries and out-of-memory errors."""
        statistics = self._statistics(index)
        return int(statistics.get("num_alloc_retries", 0)), int(statistics.get("num_ooms", 0))

    def find_owners(self) -> None:
        """Compute the owners of peaks that have risen, then start a new history."""
        risen = [index for index, device in self.devices.items() if device.is_new]
        if risen:
            snapshot = self._torch.cuda.memory._snapshot()  # noqa: SLF001
            for index in risen:
                self._find_owners_of(index, snapshot)
        if self.devices:
            self._torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
            self.record()

    def _find_owners_of(self, index: int, snapshot: dict[str, Any]) -> None:
        device = self.devices[index]
        device.is_new = False
        traces = snapshot["device_traces"]
        plumbing = (os.path.dirname(self._torch.__file__), os.path.dirname(os.path.abspath(__file__)))
        live, frames = live_at_peak(snapshot["segments"], traces[index] if index < len(traces) else [], index)
        owners: dict[tuple[str, str, str], dict[str, Any]] = {}
        for address, size in live.items():
            where, function, caller = owner_of(frames.get(address, []), self.backward_line, plumbing)
            entry = owners.setdefault(
                (where, function, caller), {"where": where, "function": function, "caller": caller, "bytes": 0, "blocks": 0}
            )
            entry["bytes"] += size
            entry["blocks"] += 1
        ranked = sorted(owners.values(), key=lambda entry: -entry["bytes"])
        device.owners = ranked[:_OWNERS]
        device.unaccounted = max(0, device.allocated - sum(entry["bytes"] for entry in device.owners))


def live_at_peak(segments: list[Any], events: list[Any], index: int) -> tuple[dict[int, int], dict[int, list[Any]]]:
    """Blocks (address -> bytes) and their frames at the moment when most bytes were allocated.

    Walks backwards from the blocks that are live at the end: blocks allocated later are removed, blocks freed later are added.
    """
    live: dict[int, int] = {}
    frames: dict[int, list[Any]] = {}
    for segment in segments:
        if segment["device"] != index:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                live[block["address"]] = block["size"]
                frames[block["address"]] = block.get("frames") or []
    total = most = sum(live.values())
    best, changes = len(events), []
    for place in range(len(events) - 1, -1, -1):
        event = events[place]
        if event["action"] == "alloc":
            size = live.pop(event["addr"], _rounded(event["size"]))
            total -= size
            changes.append((place, event["addr"], size))
        elif event["action"] == "free_requested":
            size = _rounded(event["size"])
            live[event["addr"]] = size
            total += size
            changes.append((place, event["addr"], -size))
        if total > most:
            most, best = total, place
    # Walk forward again to the peak, which is just before event `best`.
    for place, address, size in reversed(changes):
        if place >= best:
            break
        if size > 0:
            live[address] = size
        else:
            live.pop(address, None)
    for event in events[:best]:
        if event["action"] == "alloc":
            frames[event["addr"]] = event.get("frames") or []
    return live, frames


def _rounded(size: int) -> int:
    """Rounded to 512 bytes, as the allocator does."""
    return max(512, (size + 511) // 512 * 512)


def owner_of(frames: list[dict[str, Any]], backward_line: str, plumbing: tuple[str, ...]) -> tuple[str, str, str]:
    """The innermost line outside the folders `plumbing`, its function, and the innermost line outside all installed packages."""
    shown = [frame for frame in frames if not _is_plumbing(frame["filename"], plumbing)]
    if not shown:
        return (backward_line, "backward", "") if backward_line else ("", "", "")
    first = shown[0]
    where = f"{first['filename']}:{first['line']}"
    own = next((frame for frame in shown if not any(part in frame["filename"] for part in _INSTALLED)), None)
    caller = f"{own['filename']}:{own['line']}" if own is not None else ""
    return where, str(first["name"]), "" if caller == where else caller


_PLUMBING = tuple(f"{os.sep}{name}" for name in ("contextlib.py", "functools.py", "threading.py", "runpy.py", "importlib"))


_INSTALLED = ("site-packages", "dist-packages")


def _is_plumbing(filename: str, folders: tuple[str, ...]) -> bool:
    """Torch's own code, the agent's and the standard library's wrappers: they are in every stack and do not identify an owner."""
    return filename.startswith(("<", *(folder + os.sep for folder in folders))) or any(part in filename for part in _PLUMBING)
