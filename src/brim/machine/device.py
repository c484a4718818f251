"""The outside world as one small object: what every part of brim asks of a device, and nothing more.

`TorchDevice` is any accelerator that torch drives, `CpuDevice` this process's own memory, `RecordedDevice` (recorded.py) readings that
were taken elsewhere. All are public, so that code which watches a device can be tested without one.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from brim.extras import require_train
from brim.machine import child, nvml
from brim.machine.sharing import Others, others_of_card
from brim.record import STRICT


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The state of a device at one moment. None means that this device cannot tell."""

    __pydantic_config__ = STRICT

    total_bytes: int
    free_bytes: int
    """What another allocation could take now, other processes on the device considered."""
    allocated_bytes: int = 0
    """Blocks in use, by this process."""
    reserved_bytes: int = 0
    """Taken from the device by this process's allocator."""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    """Peaks since the last `reset_peak`."""
    allocator_retries: int = 0
    """How often the allocator had to give cached memory back before it could serve a request: the sign of thrashing."""
    swapped_bytes: int = 0
    """Of this process, what lies in the host's swap instead of in memory."""
    busy: float | None = None
    """Share of time in which the device computed, 0 to 1."""
    watts: float | None = None
    celsius: float | None = None


class Device(Protocol):
    """What brim asks of a device."""

    @property
    def name(self) -> str:
        """As torch names it: `cuda:0`, `cpu`."""
        ...

    def read(self) -> Reading:
        """Look at it now."""
        ...

    def reset_peak(self) -> None:
        """Let peaks count from here."""
        ...

    def synchronize(self) -> None:
        """Return when all work that was queued is done."""
        ...

    def give_back(self) -> None:
        """Return cached memory to the device."""
        ...


class TorchDevice:
    """An accelerator through torch: CUDA, ROCm (which torch calls cuda), XPU, MPS. Telemetry of NVIDIA cards through NVML."""

    def __init__(self, backend: str = "cuda", index: int = 0) -> None:
        require_train("brim.TorchDevice", "torch")
        import torch

        self._torch_device = torch.device(backend, index)
        self._module: Any = torch.get_device_module(backend)
        self._is_mps = backend == "mps"
        self._nvml_index = nvml.physical_index(index) if backend == "cuda" and torch.version.hip is None else None

    @property
    def name(self) -> str:
        """As torch names it."""
        return str(self._torch_device)

    def read(self) -> Reading:
        """Allocator statistics and the device's own free memory."""
        if self._is_mps:
            return self._read_mps()
        free, total = self._module.mem_get_info(self._torch_device)
        stats = self._module.memory_stats(self._torch_device)
        telemetry = nvml.telemetry(self._nvml_index) if self._nvml_index is not None else nvml.Telemetry()
        return Reading(
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            allocator_retries=stats.get("num_alloc_retries", 0),
            busy=telemetry.busy,
            watts=telemetry.watts,
            celsius=telemetry.celsius,
        )

    def others(self) -> Others:
        """What other processes hold of it."""
        if self._nvml_index is None:
            return Others()
        return others_of_card(self._nvml_index, self._module.memory_reserved(self._torch_device))

    def _read_mps(self) -> Reading:
        """Apple's backend counts no peaks, so the present is reported in their place."""
        total = self._module.recommended_max_memory()
        allocated, reserved = self._module.current_allocated_memory(), self._module.driver_allocated_memory()
        return Reading(
            total_bytes=total,
            free_bytes=max(0, total - reserved),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
        )

    def reset_peak(self) -> None:
        """Let peaks count from here."""
        if not self._is_mps:
            self._module.reset_peak_memory_stats(self._torch_device)

    def synchronize(self) -> None:
        """Return when all queued work is done."""
        self._module.synchronize() if self._is_mps else self._module.synchronize(self._torch_device)

    def give_back(self) -> None:
        """Empty the allocator's cache."""
        self._module.empty_cache()


@dataclass(frozen=True)
class OwnFootprint:
    """What a process holds before its work begins: imports, thread pools."""

    data_bytes: int
    own_bytes: int
    """In RAM, without the pages of files."""


class CpuDevice:
    """This process's own memory. Under a budget, `total_bytes` is the budget's limit; else what the host allows."""

    process_bytes: ClassVar[int] = 0
    """Under a hard limit: what the limit leaves to the process on top of the memory of its work. No part of `total_bytes`."""
    footprint: ClassVar[OwnFootprint | None] = None
    """Where the process has said what it held before its work began: bytes count from there, as predictions and probes count them."""

    @classmethod
    def count_from_here(cls, but_bytes: int = 0) -> OwnFootprint | None:
        """Take what this process holds now, but for so many bytes of it, as no part of its work. Linux only; elsewhere all of it counts."""
        gc.collect()
        if child.HAS_DATA_LIMIT:
            before = cls.footprint or OwnFootprint(0, 0)
            # Before free heap is given back: the pages come again when the heap is used again, within what it has mapped already.
            own_bytes = child.resident_bytes() - child.file_bytes()
            child.give_back_memory()
            held = child.data_bytes(), own_bytes
            cls.footprint = OwnFootprint(max(before.data_bytes, held[0] - but_bytes), max(before.own_bytes, held[1] - but_bytes))
        return cls.footprint

    @property
    def name(self) -> str:
        """As torch names it."""
        return "cpu"

    def read(self) -> Reading:
        """Private writable memory, which is what a budget counts; resident memory where that cannot be seen."""
        from brim.machine.host import host

        state = host()
        limited = state.memory_limited_by == "RLIMIT_DATA"
        own = self.footprint or OwnFootprint(0, 0)
        # Code that a library loads while it works is no part of the work. Without a footprint, all that the process holds counts.
        files = child.file_bytes() if self.footprint is not None else 0
        held = own.data_bytes if limited else own.own_bytes
        used = max(0, (child.data_bytes() if limited else child.resident_bytes() - files) - held)
        total = max(0, state.memory_bytes - held - (self.process_bytes if limited else 0))
        peak = (child.peak_resident_bytes() or 0) - files - own.own_bytes
        if limited:
            # Pages that are touched again count as resident twice, and a limit counts what is mapped: no peak was above that.
            peak = min(peak, child.peak_data_bytes() - held)
            used = min(used, total)
        peak = max(used, min(peak, total) if limited else peak)
        return Reading(
            total_bytes=total,
            free_bytes=state.available_bytes,
            allocated_bytes=used,
            reserved_bytes=used,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            swapped_bytes=child.swapped_bytes(),
        )

    def reset_peak(self) -> None:
        """Linux lets a process forget its peak (5 in clear_refs); elsewhere the peak stays the process's own."""
        child.forget_peak()

    def synchronize(self) -> None:
        """The CPU has no queue."""

    def give_back(self) -> None:
        """Return freed memory to the system."""
        child.give_back_memory()
