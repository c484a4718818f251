"""The records' words in the reader's language, and numbers with their units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from brim.locale import _
from brim.pictures.scales import plain
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from brim.machine.records import Machine
    from brim.workload.words import Kind

KINDS: Final[tuple[Kind, ...]] = (
    "parameters", "buffers", "workspace", "optimizer", "gradients", "communication", "activations", "logits", "temporary",
    "fragmentation", "context",
)  # fmt: skip
"""What stays lies below what comes and goes; what the allocator and the device add lies on top."""

_MINUTE: Final = 60
_HOUR: Final = 3600
_NONE: Final = "–"


def kind(name: str) -> str:
    """What a byte is used for."""
    return {
        "parameters": _("parameters"),
        "gradients": _("gradients"),
        "optimizer": _("optimizer state"),
        "activations": _("activations"),
        "logits": _("logits"),
        "temporary": _("temporary"),
        "buffers": _("buffers"),
        "communication": _("communication"),
        "workspace": _("workspace"),
        "context": _("device context"),
        "fragmentation": _("fragmentation"),
    }.get(name, name)


def phase(name: str) -> str:
    """A part of the step."""
    return {
        "forward": _("forward"),
        "backward": _("backward"),
        "optimizer": _("optimizer"),
        "evaluation": _("evaluation"),
        "saving": _("saving"),
    }.get(name, name)


def verdict(name: str) -> str:
    """How a trial ended."""
    return {
        "ok": _("ran"),
        "out-of-memory": _("out of memory"),
        "thrashing": _("thrashing"),
        "crash": _("crashed"),
        "killed": _("killed"),
        "timeout": _("took too long"),
    }.get(name, name)


def severity(name: str) -> str:
    """How bad a finding is."""
    return {"high": _("high"), "medium": _("medium"), "low": _("low")}.get(name, name)


def proof(name: str) -> str:
    """A law that a model was put to."""
    return {
        "causality": _("a later token changes no earlier logit"),
        "batch": _("a row alone equals the row in a batch"),
        "pad": _("padding changes nothing for real tokens"),
        "pack": _("packed sequences equal each alone"),
        "accumulation": _("slices have the gradient of one batch"),
    }.get(name, name)


def proof_verdict(name: str) -> str:
    """What came out."""
    return {
        "pass": _("✓ holds"),
        "fail": _("✗ does not hold"),
        "not-applicable": _("– does not apply"),
        "error": _("! could not be run"),
    }.get(name, name)


def strategy(name: str) -> str:
    """How sequences come into micro-batches."""
    return {
        "shuffled": _("in random order"),
        "grouped": _("grouped by length across steps"),
        "sliced": _("sliced by brim inside the step"),
    }.get(name, name)


def size(count: float | None) -> str:
    """Bytes."""
    return _NONE if count is None else format_bytes(round(count))


def number(value: float | None) -> str:
    """A plain number of any size."""
    return _NONE if value is None else plain(value)


def count(value: float | None) -> str:
    """A whole number."""
    return _NONE if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A share of 1 in percent."""
    return _NONE if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """A duration: 0.42 s, 12.5 s, 3 min 20 s, 2 h 5 min."""
    if value is None or not math.isfinite(value):
        return _NONE
    if value < _MINUTE:
        return _("{seconds} s").format(seconds=f"{value:.3g}")
    if value < _HOUR:
        minutes, rest = divmod(round(value), _MINUTE)
        return _("{minutes} min {seconds} s").format(minutes=minutes, seconds=rest)
    hours, rest = divmod(round(value / _MINUTE), _MINUTE)
    return _("{hours} h {minutes} min").format(hours=f"{hours:,}", minutes=rest)


def speed(tokens_per_second: float | None) -> str:
    """Tokens per second."""
    return _NONE if tokens_per_second is None else _("{count} tokens/s").format(count=f"{tokens_per_second:,.0f}")


def moment(iso: str) -> str:
    """A date and a time, with a blank between them at which a narrow page may break the line."""
    return iso.replace("T", " ", 1)


def where(machine: Machine) -> str:
    """The machine in a few words."""
    if not machine.accelerators:
        processor = machine.host.processor if machine.host is not None else ""
        return _("the CPU ({processor})").format(processor=processor) if processor else _("the CPU")
    label = machine.accelerators[0].gpu.label
    return label if machine.world_size == 1 else f"{machine.world_size} × {label}"
