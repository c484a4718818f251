"""Who else holds memory of a GPU: an out-of-memory error that another process caused is not fixed by shorter sequences."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from brim.locale import _
from brim.machine import nvml
from brim.sizes import MIB, format_bytes

_CONTEXT_BYTES = 700 * MIB
"""The CUDA context and library workspaces of the own process, at most, where NVML does not list it."""
_SHOWN = 3


@dataclass(frozen=True)
class Others:
    """What other processes hold of one GPU."""

    used_bytes: int = 0
    processes: tuple[nvml.Process, ...] = ()
    """The largest first; empty where NVML does not list them, as in many containers."""
    is_exact: bool = False
    """Whether NVML lists this process too, and what each of them holds."""

    def __str__(self) -> str:
        if not self.used_bytes:
            return ""
        if not self.processes:
            return _("Other processes hold about {size} of this GPU.").format(size=format_bytes(self.used_bytes))
        names = [str(process) for process in self.processes[:_SHOWN]]
        if len(self.processes) > _SHOWN:
            names.append(_("{count} more").format(count=len(self.processes) - _SHOWN))
        text = _("Other processes hold {size} of this GPU: {names}.")
        return text.format(size=format_bytes(self.used_bytes), names=", ".join(names))


def others_of_card(index: int, own_bytes: int | None = None) -> Others:
    """What others hold of the card with this physical number. `own_bytes`: reserved there by this process; None: it has no context."""
    listed = nvml.processes(index)
    others = tuple(process for process in listed if process.pid != os.getpid())
    # In a container NVML may list processes by the numbers of the host, or not at all: then no process is named.
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
    """What this process holds of the card that CUDA shows as this number, its context included; 0 where NVML does not list it."""
    physical = nvml.physical_index(index)
    listed = nvml.processes(physical) if physical is not None else ()
    return sum(process.used_bytes or 0 for process in listed if process.pid == os.getpid())


def others_here(index: int) -> Others:
    """What others hold of the card that CUDA shows as this number, asked from a process that does not use it."""
    physical = nvml.physical_index(index)
    return others_of_card(physical) if physical is not None else Others()


def others_on(device: Any) -> Others:
    """What others hold of a device; nothing where it cannot tell (the CPU, a recording)."""
    ask = getattr(device, "others", None)
    found = ask() if ask is not None else None
    return found if isinstance(found, Others) else Others()
