"""What `brim emulate` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.cli._output import Column, bar, grid, table
from brim.locale import _
from brim.machine.catalogue import find_gpu
from brim.pictures.emulation_words import hint_of, moment_of, printable, reason_of, shapes_of, short_path, verdict_of
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from brim.records.emulations import DevicePeak, Emulation

_OWNERS: Final = 8
_BAR: Final = 16


def blocks_of(emulation: Emulation) -> Iterator[RenderableType]:
    """The answer first, then the figures behind it."""
    yield ""
    yield grid(_facts(emulation), indent=0)
    if emulation.devices:
        yield ""
        yield table(_columns(), [_row(emulation, device) for device in emulation.devices])
        highest = max(emulation.devices, key=lambda device: device.peak_allocated_bytes)
        if highest.owners:
            yield ""
            where = _("Allocated at the peak of rank {rank} ({moment})").format(rank=highest.rank, moment=moment_of(highest))
            yield where
            columns = (Column(_("Bytes"), right=True), Column(_("Python line")), Column(_("Called from"), rank=1))
            yield table(columns, _owners(highest))
    for reason in emulation.reasons:
        yield ""
        yield _("Note: {text}").format(text=reason_of(reason))
    hint = hint_of(emulation)
    if hint:
        yield ""
        yield hint


def _facts(emulation: Emulation) -> list[tuple[str, str]]:
    label = find_gpu(emulation.gpu).gpu.label if not emulation.gpu.startswith("gpu-") else emulation.gpu
    count = f"{emulation.gpus} x " if emulation.gpus > 1 else ""
    card = _("{label}, {size}, emulated").format(label=count + label, size=format_bytes(emulation.memory_bytes))
    rows = [(_("Card"), card), (_("Verdict"), verdict_of(emulation))]
    if emulation.shapes:
        rows.append((_("Micro-batches"), shapes_of(emulation)))
    if emulation.steps:
        rows.append(
            (_("Optimizer steps"), _("{steps}, in {seconds:.0f} s").format(steps=emulation.steps, seconds=emulation.seconds))
        )
    if emulation.cards:
        rows.append((_("Fits on"), _cards(emulation)))
    if emulation.written:
        text = _("redirected to a temporary folder and discarded; files: {count}").format(count=len(emulation.written))
        rows.append((_("Writes"), text))
    if emulation.uncomputed:
        rows.append(
            (_("Not computed"), ", ".join(emulation.uncomputed[:12]) + (" ..." if len(emulation.uncomputed) > 12 else ""))
        )
    return rows


def _columns() -> tuple[Column, ...]:
    return (
        Column(_("Rank"), right=True),
        Column(_("Card"), right=True, rank=3),
        Column(_("Allocated"), right=True),
        Column(_("Reserved"), right=True),
        Column(_("Device"), right=True),
        Column(_("of the card"), right=True),
        Column("", rank=2),
        Column(_("Peak")),
        Column(_("Retries"), right=True, rank=1),
    )


def _row(emulation: Emulation, device: DevicePeak) -> tuple[str, ...]:
    share = device.peak_device_bytes / emulation.memory_bytes
    return (
        str(device.rank),
        str(device.device),
        format_bytes(device.peak_allocated_bytes),
        format_bytes(device.peak_reserved_bytes),
        format_bytes(device.peak_device_bytes),
        f"{share:.0%}",
        bar(min(share, 1.0), width=_BAR),
        moment_of(device),
        str(device.retries),
    )


def _owners(device: DevicePeak) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for owner in device.owners[:_OWNERS]:
        line = f"{short_path(owner.where)} {printable(owner.function)}" if owner.where else _("no Python line")
        rows.append((format_bytes(owner.bytes), line, short_path(owner.caller)))
    rest = device.peak_allocated_bytes - sum(owner.bytes for owner in device.owners[:_OWNERS])
    if rest > 0:
        rows.append((format_bytes(rest), _("the rest"), ""))
    return rows


def _cards(emulation: Emulation) -> str:
    """How many cards of the catalogue hold the peak, and the smallest of them."""
    holding = [card for card in emulation.cards if card.holds]
    if not holding:
        return _("no card of the catalogue")
    smallest = [card.gpu for card in holding[:4]]
    alike = sum(card.same_capability for card in holding)
    text = _("{count} of {total} cards, the smallest {names}; {alike} of them have the compute capability that was emulated")
    return text.format(count=len(holding), total=len(emulation.cards), names=", ".join(smallest), alike=alike)
