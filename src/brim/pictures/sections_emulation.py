"""An emulation on the page: the peak of each process against the card, the lines that own it, the cards that hold it."""

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

_MOST_PROCESSES: Final = 16


def emulation_section(found: Emulation) -> Section:
    """Bars, owners, facts."""
    parts = [_bars(found), _owners(found), facts(_facts(found)), _failures(found), _cards(found)]
    notes = listed(reason_of(reason) for reason in found.reasons)
    return Section("emulation", _("Emulated run"), join([part for part in (*parts, notes) if part]))


def _bars(found: Emulation) -> Html | None:
    if not found.devices:
        return None
    bars, rows = [], []
    for device in found.devices[:_MOST_PROCESSES]:
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
    text = _("limit {size}").format(size=words.size(found.memory_bytes))
    far = _("limit {size}, far to the right").format(size=words.size(found.memory_bytes))
    svg = stacked_bars(
        bars, ticks=lambda scale: byte_ticks(scale, 4), form=bytes_short, limit=(float(found.memory_bytes), text, far)
    )
    heads = [_("process"), _("allocated"), _("reserved"), _("device"), _("peak of allocated memory"), _("retries")]
    legend = [
        Key(_("allocated by tensors"), "activations", "field"),
        Key(_("cached by the allocator"), "fragmentation", "field"),
        Key(_("context and communicators"), "context", "field"),
    ]
    says = _("The highest peak is {size} of {limit}.").format(
        size=words.size(found.peak_device_bytes), limit=words.size(found.memory_bytes)
    )
    data = Table(heads, rows, left=frozenset({0, 4}))
    return figure("emulated-memory", _("Peak memory on the emulated card"), says, svg, data, legend=legend)


def _owners(found: Emulation) -> Html | None:
    highest = max(found.devices, key=lambda device: device.peak_allocated_bytes, default=None)
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
    heads = [_("bytes"), _("blocks"), _("Python line"), _("called from")]
    title = _("Allocated at the peak of rank {rank} ({moment})").format(rank=highest.rank, moment=moment_of(highest))
    return join([tag("h3", title), table(Table(heads, rows, left=frozenset({2, 3})), title)])


def _facts(found: Emulation) -> list[tuple[str, object]]:
    return [
        (_("card"), f"{found.gpus} x {found.gpu}" if found.gpus > 1 else found.gpu),
        (_("capacity of the card"), words.size(found.memory_bytes)),
        (_("assumed for a context"), words.size(found.context_bytes)),
        (_("optimizer steps"), str(found.steps)),
        (_("micro-batches"), shapes_of(found)),
        (_("command"), " ".join(found.command)),
        (_("versions"), ", ".join(f"{name} {version}" for name, version in found.versions.items())),
    ]


def _failures(found: Emulation) -> Html | None:
    if not found.out_of_memory:
        return None
    rows = [
        [
            str(each.rank),
            str(each.step),
            phase_of(each.phase),
            words.size(each.asked_bytes),
            words.size(each.free_bytes),
            short_path(each.where),
        ]
        for each in found.out_of_memory[:50]
    ]
    title = _("Out-of-memory errors")
    heads = [_("rank"), _("step"), _("phase"), _("requested"), _("free"), _("Python line")]
    return join([tag("h3", title), table(Table(heads, rows, left=frozenset({2, 5})), title)])


def _cards(found: Emulation) -> Html | None:
    if not found.cards:
        return None
    rows = [
        [
            card.gpu,
            words.size(card.usable_bytes),
            _("yes") if card.holds else _("no"),
            _("yes") if card.same_capability else _("no"),
        ]
        for card in found.cards
    ]
    heads = [_("card"), _("usable"), _("holds the peak"), _("same compute capability")]
    note = _("Another compute capability may choose other kernels: emulate that card before you rely on it.")
    title = _("Cards of the catalogue against this peak")
    return folded(title, table(Table(heads, rows, left=frozenset({0, 2, 3}), note=note), title))
