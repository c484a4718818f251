"""Memory of a GPU that other processes hold. Shorter sequences do not fix an out-of-memory error that another process causes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from brim.locale import _
from brim.machine import nvml
from brim.sizes import MIB, format_bytes

_CONTEXT_BYTES = 700 * MIB
"""Upper bound for the CUDA context and library workspaces of this process, used if NVML does not list it."""
_MAX_NAMED = 3


@dataclass(frozen=True)
class Others:
    """Memory of one GPU that other processes hold."""

    used_bytes: int = 0
    processes: tuple[nvml.Process, ...] = ()
    """Largest first; empty if NVML does not list them, as in many containers."""
    is_exact: bool = False
    """Whether NVML lists this process too, and reports the memory of every process."""

    def __str__(self) -> str:
        if not self.used_bytes:
            return ""
        if not self.processes:
            return _("Other processes hold about {size} of this GPU.").format(size=format_bytes(self.used_bytes))
        names = [str(process) for process in self.processes[:_MAX_NAMED]]
        if len(self.processes) > _MAX_NAMED:
            names.append(_("{count} more").format(count=len(self.processes) - _MAX_NAMED))
        text = _("Other processes hold {size} of this GPU: {names}.")
        return text.format(size=format_bytes(self.used_bytes), names=", ".join(names))


def others_of_card(index: int, own_bytes: int | None = None) -> Others:
    """Memory that others hold on the card with this physical number. `own_bytes` is reserved by this process; None: it has no context."""
    listed = nvml.processes(index)
    others = tuple(process for process in listed if process.pid != os.getpid())
    # In a container NVML may list processes by their pid on the host, or not at all. Then no process is named.
    is_listed = len(others) < len(listed)
    if own_bytes is None or is_listed:
        used = sum(process.used_bytes or 0 for process in others)
        is_exact = is_listed and all(process.used_bytes is not None for process in listed)
        return Others(used, tuple(sorted(others, key=lambda process: -(process.used_bytes or 0))) if used else (), is_exact)
    card = next((card for card in nvml.cards() if card.index == index), None)
    if card is None:
        return Others()
    return Others(max(0, card.total_bytes - card.free_bytes - own_bytes - _CONTEXT_BYTES))


def own_bytes(index: int) -> int:
    """Memory of this process on the card `cuda:index`, its context included; 0 if NVML does not list it."""
    physical = nvml.physical_index(index)
    listed = nvml.processes(physical) if physical is not None else ()
    return sum(process.used_bytes or 0 for process in listed if process.pid == os.getpid())


def others_here(index: int) -> Others:
    """Memory that others hold on the card `cuda:index`, for a caller that does not use the card itself."""
    physical = nvml.physical_index(index)
    return others_of_card(physical) if physical is not None else Others()


def others_on(device: Any) -> Others:
    """Memory that others hold on a device; nothing for devices that do not report it (the CPU, a recording)."""
    query = getattr(device, "others", None)
    others = query() if query is not None else None
    return others if isinstance(others, Others) else Others()
