"""NVIDIA's management library, as far as brim needs it: which cards there are, and how they do. Thin, and never an error.

A machine without the driver has no cards; a card that refuses a question answers None. NVML counts physical cards in PCI order, torch
counts the ones that CUDA_VISIBLE_DEVICES leaves, so `visible` translates.
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
    """How a card does now."""

    busy: float | None = None
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a card."""

    pid: int
    used_bytes: int | None = None
    name: str = ""
    """Empty where it cannot be read: another user's, or of another container."""

    def __str__(self) -> str:
        who = f"{self.name} (pid {self.pid})" if self.name else f"pid {self.pid}"
        return who if self.used_bytes is None else f"{who} {format_bytes(self.used_bytes)}"


def cards() -> tuple[Card, ...]:
    """All physical cards, in NVML's order; none where there is no driver."""
    nvml = _library()
    if nvml is None:
        return ()
    count = _ask(nvml.nvmlDeviceGetCount) or 0
    found = (_card(nvml, index) for index in range(count))
    return tuple(card for card in found if card is not None)


def visible(cards_: tuple[Card, ...], wanted: str | None) -> tuple[Card, ...]:
    """The cards that CUDA shows a process under this value of CUDA_VISIBLE_DEVICES, in its order.

    As CUDA does it: indices or prefixes of a UUID; the list ends at the first entry that names no card; a repeated card voids it.
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
    """The physical number of the card that torch calls `cuda:index` in this process."""
    shown = visible(cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return shown[index].index if index < len(shown) else None


def alone(index: int) -> dict[str, str]:
    """The environment of a process that sees only the card that CUDA shows here as this number; empty where there is no other.

    By its UUID: CUDA may number cards in another order than NVML.
    """
    shown = visible(cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if len(shown) < 2 or index >= len(shown) or not shown[index].uuid:
        return {}
    return {"CUDA_VISIBLE_DEVICES": shown[index].uuid}


def telemetry(index: int) -> Telemetry:
    """How the card of this physical number does now."""
    nvml = _library()
    handle = _ask(nvml.nvmlDeviceGetHandleByIndex, index) if nvml is not None else None
    if nvml is None or handle is None:
        return Telemetry()
    rates = _ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _ask(nvml.nvmlDeviceGetPowerUsage, handle)
    celsius = _ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    return Telemetry(
        busy=rates.gpu / 100 if rates is not None else None,
        watts=milliwatts / 1000 if milliwatts is not None else None,
        celsius=float(celsius) if celsius is not None else None,
    )


def processes(index: int) -> tuple[Process, ...]:
    """Processes with a context on the card of this physical number, as far as NVML lists them."""
    nvml = _library()
    handle = _ask(nvml.nvmlDeviceGetHandleByIndex, index) if nvml is not None else None
    if nvml is None or handle is None:
        return ()
    found: dict[int, int | None] = {}
    for question in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(question, handle) or ():
            used = process.usedGpuMemory
            found[process.pid] = max(found.get(process.pid) or 0, used) if used is not None else found.get(process.pid)
    return tuple(Process(pid, used, _name(pid)) for pid, used in found.items())


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
    except Exception:  # noqa: BLE001 (no package, no driver, a driver of another version: all mean that NVML cannot help)
        return None
    return pynvml


def _card(nvml: Any, index: int) -> Card | None:
    handle = _ask(nvml.nvmlDeviceGetHandleByIndex, index)
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle) if handle is not None else None
    if memory is None:
        return None
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Card(
        index=index,
        name=_word(_ask(nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
        uuid=_word(_ask(nvml.nvmlDeviceGetUUID, handle)) or "",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability is not None else None,
        driver=_word(_ask(nvml.nvmlSystemGetDriverVersion)),
    )


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return question(*arguments)
    except Exception:  # noqa: BLE001 (NVMLError_NotSupported and its many siblings: the card does not say)
        return None


def _word(value: Any) -> str | None:
    """Older releases of the binding return bytes."""
    return value.decode() if isinstance(value, bytes) else value
