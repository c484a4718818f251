"""A machine in a few rows, for bare `brim`, `brim env` and `brim demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.cli._output import grid
from brim.locale import _
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from brim.machine.records import Accelerator, Host, Machine


def machine_blocks(machine: Machine) -> list[Table]:
    """The rows as a grid."""
    return [grid(machine_rows(machine), indent=0)]


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """Label and value, the accelerators first."""
    rows = [(_("GPU {index}").format(index=device.index), _accelerator(device)) for device in machine.accelerators]
    if not rows:
        rows = [(_("GPU"), _("none found"))]
    if machine.host is not None:
        rows += _host_rows(machine.host)
    return rows + [("", text) for text in machine.notes]


def _accelerator(device: Accelerator) -> str:
    parts = [device.gpu.label, format_bytes(device.total_bytes)]
    if device.free_bytes is not None:
        parts.append(_("{size} free").format(size=format_bytes(device.free_bytes)))
    if device.gpu.compute_capability:
        parts.append(f"sm_{device.gpu.compute_capability.replace('.', '')}")
    if not device.gpu.bf16:
        parts.append(_("no bfloat16"))
    if device.physical_index is not None and device.physical_index != device.index:
        parts.append(_("physical GPU {index}").format(index=device.physical_index))
    return ", ".join(parts)


def _host_rows(host: Host) -> list[tuple[str, str]]:
    cores = _("{processor}, {cores:g} cores usable").format(processor=host.processor, cores=host.cores)
    if host.quota_cores is not None and host.quota_cores < host.affinity_cores:
        cores += _(" (container quota)")
    memory = _("{free} available of {total}").format(
        free=format_bytes(host.available_bytes), total=format_bytes(host.memory_bytes)
    )
    if host.memory_limited_by != "physical memory":
        memory += _(", limited by {source}").format(source=host.memory_limited_by)
    rows = [(_("CPU"), cores), (_("Memory"), memory)]
    if host.shm_bytes is not None:
        rows.append(("/dev/shm", format_bytes(host.shm_bytes)))
    swap = format_bytes(host.swap_bytes) if host.swap_bytes else _("none")
    return [*rows, (_("Swap"), swap)]
