"""`brim gpus`: the GPU catalogue, and what a `--gpu` would mean."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from brim.cli._command import Size, option, refuse_filters, verb
from brim.cli._output import Column, bar, grid, note, print_json, show, table
from brim.locale import N_, _
from brim.sizes import GIB, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from brim.machine.catalogue import GPUChoice
    from brim.machine.records import GPU


@verb(
    N_(
        'List the GPUs that brim knows, or show one.\n\nNAME is what --gpu takes everywhere: t4, "RTX 3080 20GB", rtx-3080-20gb*2, or a '
        "memory size such as 24GiB. A bare name means the commonest variant."
    )
)
@click.argument("name", required=False)
@option("--vendor", type=click.Choice(["nvidia", "amd", "apple"], case_sensitive=False), help=N_("Only this vendor's GPUs."))
@option("--min-memory", type=Size(), help=N_("Only cards with at least this much usable memory."))
@option("--bf16", is_flag=True, help=N_("Only cards that multiply in bfloat16 natively."))
def command(name: str | None, vendor: str | None, min_memory: int | None, bf16: bool, as_json: bool) -> None:
    """Print the catalogue, filtered, or one entry."""
    from brim.machine.catalogue import find_gpu, gpus

    if name is not None:
        refuse_filters(_("one GPU"), {"--vendor": vendor, "--min-memory": min_memory, "--bf16": bf16})
        _one(find_gpu(name), as_json)
        return
    chosen = [
        gpu
        for gpu in gpus()
        if (vendor is None or gpu.vendor == vendor) and gpu.usable_bytes >= (min_memory or 0) and (gpu.bf16 or not bf16)
    ]
    if as_json:
        print_json({"schema": "brim.gpus/1", "gpus": [dataclasses.asdict(gpu) for gpu in chosen]})
        return
    show(_table(chosen))
    note(_("GPUs shown: {count}. `brim gpus NAME` shows one; --json has all facts.").format(count=len(chosen)))


def _one(choice: GPUChoice, as_json: bool) -> None:
    gpu = choice.gpu
    if as_json:
        entry = {**dataclasses.asdict(gpu), "count": choice.count, "assumption": choice.assumption}
        print_json({"schema": "brim.gpus/1", "gpus": [entry]})
        return
    show(grid(_facts(gpu, choice.count), indent=0))
    if choice.assumption:
        note(choice.assumption)


def gpu_blocks(gpu: GPU) -> list[RenderableType]:
    """The facts of one device model."""
    return [grid(_facts(gpu), indent=0)]


def choice_blocks(choice: GPUChoice) -> list[RenderableType]:
    """The same, with how many and what was assumed."""
    facts = grid(_facts(choice.gpu, choice.count), indent=0)
    return [facts, "", choice.assumption] if choice.assumption else [facts]


def _facts(gpu: GPU, count: int = 1) -> list[tuple[str, str]]:
    measured = _("measured") if gpu.usable_is_measured else _("estimated")
    rows = [
        (_("Name"), gpu.name + (f" x {count}" if count > 1 else "")),
        (_("Device"), gpu.label),
        (_("GPU memory"), format_bytes(gpu.memory_bytes)),
        (_("Usable"), f"{format_bytes(gpu.usable_bytes)} ({measured})"),
    ]
    if gpu.compute_capability or gpu.architecture:
        rows.append((_("Architecture"), gpu.architecture or f"sm_{(gpu.compute_capability or '').replace('.', '')}"))
    if gpu.dense_flops:
        rows.append(
            (
                _("Dense peak"),
                ", ".join(f"{number} {flops / 1e12:g}" for number, flops in gpu.dense_flops.items()) + " TFLOP/s",
            )
        )
    if gpu.bandwidth_bytes_per_second:
        rows.append((_("Memory bandwidth"), f"{gpu.bandwidth_bytes_per_second / 1e9:g} GB/s"))
    if gpu.host_link and gpu.host_bytes_per_second:
        rows.append((_("Link to the host"), f"{gpu.host_link}, {gpu.host_bytes_per_second / 1e9:g} GB/s"))
    if gpu.peer_link and gpu.peer_bytes_per_second:
        rows.append((_("Link between cards"), f"{gpu.peer_link}, {gpu.peer_bytes_per_second / 1e9:g} GB/s"))
    if gpu.watts:
        rows.append((_("Power"), f"{gpu.watts:g} W"))
    if gpu.vendor != "unknown":
        rows.append(("bfloat16", _yes(gpu.bf16)))
        rows.append((_("Flash attention"), _yes(gpu.flash_attention)))
    if gpu.note:
        rows.append((_("Note"), gpu.note))
    return rows


def _table(chosen: list[GPU]) -> Table:
    columns = (
        Column(_("Name")),
        Column(_("Usable"), right=True),
        Column("", rank=5),
        Column(_("Arch."), rank=2),
        Column("fp16 TFLOP/s", rank=1, right=True),
        Column("GB/s", rank=1, right=True),
        Column("bf16", rank=3),
        Column(_("flash"), rank=4),
    )
    largest = max((gpu.usable_bytes for gpu in chosen), default=GIB)
    rows = [
        (
            gpu.name,
            format_bytes(gpu.usable_bytes),
            bar(gpu.usable_bytes / largest, width=12),
            gpu.architecture or f"sm_{(gpu.compute_capability or '').replace('.', '')}",
            _number(gpu.dense_flops.get("fp16") or gpu.dense_flops.get("bf16"), 1e12),
            _number(gpu.bandwidth_bytes_per_second, 1e9),
            _yes(gpu.bf16),
            _yes(gpu.flash_attention),
        )
        for gpu in chosen
    ]
    return table(columns, rows)


def _number(value: Any, unit: float) -> str:
    return f"{value / unit:.0f}" if value else "-"


def _yes(value: bool) -> str:
    return _("yes") if value else _("no")
