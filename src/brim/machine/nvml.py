"""NVIDIA's management library (NVML): the cards of this machine, their load and the processes on them. No function raises.

Without the driver there are no cards; a query that a card does not support returns None. NVML numbers the physical cards in PCI order,
torch numbers those in CUDA_VISIBLE_DEVICES; `visible` translates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Card:
    """One physical card."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    compute_capability: str | None
    driver: str | None


@dataclass(frozen=True)
class Telemetry:
    """Load, power and temperature of a card; None: not supported by the card."""

    busy: float | None = None
    """Utilisation, 0 to 1."""
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a card."""

    pid: int
    used_bytes: int | None = None
    name: str = ""
    """Empty if it cannot be read, as for processes of other containers."""

    def __str__(self) -> str:
        label = f"{self.name} (pid {self.pid})" if self.name else f"pid {self.pid}"
        return label if self.used_bytes is None else f"{label} {format_bytes(self.used_bytes)}"


def cards() -> tuple[Card, ...]:
    """All physical cards, in NVML's order; empty without a driver."""
    nvml = _library()
    if nvml is None:
        return ()
    count = _query(nvml.nvmlDeviceGetCount) or 0
    listed = (_card(nvml, index) for index in range(count))
    return tuple(card for card in listed if card is not None)


def visible(cards_: tuple[Card, ...], wanted: str | None) -> tuple[Card, ...]:
    """The cards that a process sees with this value of CUDA_VISIBLE_DEVICES, in the order of that list.

    As in CUDA, an entry is an index or the prefix of a UUID, and the list ends at the first entry that matches no card. If a card is
    repeated, no card is visible.
    """
    if wanted is None:
        return cards_
    chosen: list[Card] = []
    for word in (part.strip() for part in wanted.split(",")):
        match = [card for card in cards_ if (word and card.uuid.startswith(word)) or word == str(card.index)]
        if len(match) != 1:
            break
        if match[0] in chosen:
            return ()
        chosen.append(match[0])
    return tuple(chosen)


def physical_index(index: int) -> int | None:
    """The physical number of the card that is `cuda:index` in this process."""
    shown = visible(cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return shown[index].index if index < len(shown) else None


def alone(index: int) -> dict[str, str]:
    """Environment variables for a process that is to see only the card `cuda:index`; empty if there is no other card.

    The card is named by its UUID, because CUDA and NVML may number cards in different orders.
    """
    shown = visible(cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if len(shown) < 2 or index >= len(shown) or not shown[index].uuid:
        return {}
    return {"CUDA_VISIBLE_DEVICES": shown[index].uuid}


def telemetry(index: int) -> Telemetry:
    """Load, power and temperature of the card with this physical number, now."""
    nvml = _library()
    handle = _query(nvml.nvmlDeviceGetHandleByIndex, index) if nvml is not None else None
    if nvml is None or handle is None:
        return Telemetry()
    rates = _query(nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _query(nvml.nvmlDeviceGetPowerUsage, handle)
    celsius = _query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    return Telemetry(
        busy=rates.gpu / 100 if rates is not None else None,
        watts=milliwatts / 1000 if milliwatts is not None else None,
        celsius=float(celsius) if celsius is not None else None,
    )


def processes(index: int) -> tuple[Process, ...]:
    """Processes with a context on the card with this physical number, if NVML lists them."""
    nvml = _library()
    handle = _query(nvml.nvmlDeviceGetHandleByIndex, index) if nvml is not None else None
    if nvml is None or handle is None:
        return ()
    used_bytes: dict[int, int | None] = {}
    for query in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _query(query, handle) or ():
            used, known = process.usedGpuMemory, used_bytes.get(process.pid)
            used_bytes[process.pid] = max(known or 0, used) if used is not None else known
    return tuple(Process(pid, used, _name(pid)) for pid, used in used_bytes.items())


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@cache
def _library() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 (no package, no driver, a driver of another version: NVML cannot be used)
        return None
    return pynvml


def _card(nvml: Any, index: int) -> Card | None:
    handle = _query(nvml.nvmlDeviceGetHandleByIndex, index)
    memory = _query(nvml.nvmlDeviceGetMemoryInfo, handle) if handle is not None else None
    if memory is None:
        return None
    capability = _query(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Card(
        index=index,
        name=_text(_query(nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
        uuid=_text(_query(nvml.nvmlDeviceGetUUID, handle)) or "",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
        driver=_text(_query(nvml.nvmlSystemGetDriverVersion)),
    )


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:  # noqa: BLE001 (NVMLError_NotSupported and similar errors: the card does not report this value)
        return None


def _text(value: Any) -> str | None:
    """A string of NVML. Older releases of the binding return bytes."""
    return value.decode() if isinstance(value, bytes) else value
