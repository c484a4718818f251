"""The section of an emulation: the peaks of its processes, the lines that own the memory, the cards that it fits on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.locale import _
from brim.pictures import words
from brim.pictures.bars import Bar, stacked_bars
from brim.pictures.emulation_words import moment_of, phase_of, printable, reason_of, shapes_of, short_path
from brim.pictures.markup import Html, join, tag
from brim.pictures.parts import Key, Section, Table, facts, figure, folded, listed, table
from brim.pictures.scales import byte_ticks, bytes_short

if TYPE_CHECKING:
    from brim.records.emulations import Emulation

_MAX_PROCESSES: Final = 16


def emulation_section(emulation: Emulation) -> Section:
    """Build the section from a record."""
    parts = [_bars(emulation), _owners(emulation), facts(_facts(emulation)), _failures(emulation), _cards(emulation)]
    notes = listed(reason_of(reason) for reason in emulation.reasons)
    return Section("emulation", _("Emulated run"), join([part for part in (*parts, notes) if part]))


def _bars(emulation: Emulation) -> Html | None:
    if not emulation.devices:
        return None
    bars, rows = [], []
    for device in emulation.devices[:_MAX_PROCESSES]:
        outside = max(0, device.peak_device_bytes - device.peak_reserved_bytes)
        cached = max(0, device.peak_reserved_bytes - device.peak_allocated_bytes)
        segments = [
            ("activations", float(device.peak_allocated_bytes)),
            ("fragmentation", float(cached)),
            ("context", float(outside)),
        ]
        label = _("rank {rank}, card {card}").format(rank=device.rank, card=device.device)
        bars.append(Bar(label, words.size(device.peak_device_bytes), segments))
        sizes = (device.peak_allocated_bytes, device.peak_reserved_bytes, device.peak_device_bytes)
        rows.append([label, *(words.size(size) for size in sizes), moment_of(device), str(device.retries)])
    text = _("limit {size}").format(size=words.size(emulation.memory_bytes))
    far = _("limit {size}, far to the right").format(size=words.size(emulation.memory_bytes))
    svg = stacked_bars(
        bars, ticks=lambda scale: byte_ticks(scale, 4), form=bytes_short, limit=(float(emulation.memory_bytes), text, far)
    )
    headers = [_("process"), _("allocated"), _("reserved"), _("device"), _("peak of allocated memory"), _("retries")]
    legend = [
        Key(_("allocated by tensors"), "activations", "field"),
        Key(_("cached by the allocator"), "fragmentation", "field"),
        Key(_("context and communicators"), "context", "field"),
    ]
    caption = _("The highest peak is {size} of {limit}.").format(
        size=words.size(emulation.peak_device_bytes), limit=words.size(emulation.memory_bytes)
    )
    data = Table(headers, rows, left=frozenset({0, 4}))
    return figure("emulated-memory", _("Peak memory on the emulated card"), caption, svg, data, legend=legend)


def _owners(emulation: Emulation) -> Html | None:
    highest = max(emulation.devices, key=lambda device: device.peak_allocated_bytes, default=None)
    if highest is None or not highest.owners:
        return None
    rows = [
        [
            words.size(owner.bytes),
            str(owner.blocks),
            f"{short_path(owner.where)} {printable(owner.function)}",
            short_path(owner.caller),
        ]
        for owner in highest.owners
    ]
    headers = [_("bytes"), _("blocks"), _("Python line"), _("called from")]
    title = _("Allocated at the peak of rank {rank} ({moment})").format(rank=highest.rank, moment=moment_of(highest))
    return join([tag("h3", title), table(Table(headers, rows, left=frozenset({2, 3})), title)])


def _facts(emulation: Emulation) -> list[tuple[str, object]]:
    return [
        (_("card"), f"{emulation.gpus} x {emulation.gpu}" if emulation.gpus > 1 else emulation.gpu),
        (_("capacity of the card"), words.size(emulation.memory_bytes)),
        (_("assumed for a context"), words.size(emulation.context_bytes)),
        (_("optimizer steps"), str(emulation.steps)),
        (_("micro-batches"), shapes_of(emulation)),
        (_("command"), " ".join(emulation.command)),
        (_("versions"), ", ".join(f"{name} {version}" for name, version in emulation.versions.items())),
    ]


def _failures(emulation: Emulation) -> Html | None:
    if not emulation.out_of_memory:
        return None
    rows = [
        [
            str(failure.rank),
            str(failure.step),
            phase_of(failure.phase),
            words.size(failure.asked_bytes),
            words.size(failure.free_bytes),
            short_path(failure.where),
        ]
        for failure in emulation.out_of_memory[:50]
    ]
    title = _("Out-of-memory errors")
    headers = [_("rank"), _("step"), _("phase"), _("requested"), _("free"), _("Python line")]
    return join([tag("h3", title), table(Table(headers, rows, left=frozenset({2, 5})), title)])


def _cards(emulation: Emulation) -> Html | None:
    if not emulation.cards:
        return None
    rows = [
        [
            card.gpu,
            words.size(card.usable_bytes),
            _("yes") if card.holds else _("no"),
            _("yes") if card.same_capability else _("no"),
        ]
        for card in emulation.cards
    ]
    headers = [_("card"), _("usable"), _("holds the peak"), _("same compute capability")]
    note = _("Another compute capability may choose other kernels: emulate that card before you rely on it.")
    title = _("Cards of the catalogue against this peak")
    return folded(title, table(Table(headers, rows, left=frozenset({0, 2, 3}), note=note), title))
