"""The charts of one value or several over steps or sizes: from plain numbers to SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from brim.pictures.markup import Html, join
from brim.pictures.plot import Axis, Level, Numbers, Symbol, curve, curves, frame, levels, symbol, symbols, tips, word
from brim.pictures.scales import Scale, byte_ticks, bytes_short, plain, spanning, whole_ticks

MOST_TIPS: Final = 400
_WILD: Final = 30
"""Largest value over the middle one from which on a linear axis would show nothing but the peak."""


@dataclass(frozen=True)
class Line:
    """One series: `look` is its class in the style (`raw`, `s1`, `s2`, ...)."""

    name: str
    xs: Sequence[float]
    ys: Numbers
    look: str
    symbol: Symbol | None = None
    """Marks at its points."""
    is_drawn: bool = True
    """Whether a line joins them."""


@dataclass(frozen=True)
class Note:
    """A point with words of its own; without, where the legend has them."""

    x: float
    y: float
    said: str
    symbol: Symbol
    look: str
    above: bool = True


@dataclass(frozen=True)
class Drawing:
    """A chart, and what its crosshair tells."""

    svg: Html
    tips: str = ""


def number_axis(values: Sequence[float], title: str, *, from_zero: bool = False, may_be_log: bool = False) -> Axis:
    """An axis of plain numbers; logarithmic where a few peaks would press everything else flat."""
    found = sorted(value for value in values if math.isfinite(value))
    is_log = may_be_log and bool(found) and found[0] > 0 and found[-1] > _WILD * found[len(found) // 2]
    scale = spanning(found, from_zero=from_zero, is_log=is_log)
    return Axis(scale, scale.ticks(), plain, title)


def byte_axis(values: Sequence[float], title: str) -> Axis:
    """An axis of bytes, from zero."""
    scale = spanning(values, from_zero=True, room=0.1)
    return Axis(scale, byte_ticks(scale), bytes_short, title)


def count_axis(values: Sequence[float], title: str, *, from_zero: bool = False) -> Axis:
    """An axis of whole numbers: steps, sequences, tokens. Without room at the ends, where a curve begins and ends."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(0.0, low) if from_zero else low
    scale = Scale(low, high) if high > low else Scale(low - 1, low + 1)
    return Axis(scale, whole_ticks(scale, 4), lambda value: f"{value:,.0f}", title)


def xy_chart(
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    *,
    across: Sequence[Level] = (),
    notes: Sequence[Note] = (),
    events: Sequence[float] = (),
    form: Callable[[float], str] | None = None,
) -> Drawing:
    """Lines, marks, levels and, along the lower edge, events. `form` writes a value of y where the axis' own is too coarse."""
    layers = [
        curves(*(curve(line.xs, line.ys, x.scale, y.scale, line.look) for line in lines if line.is_drawn and line.xs)),
        levels(across, y.scale),
        *(symbols(line.symbol, line.xs, line.ys, x.scale, y.scale, line.look) for line in lines if line.symbol),
        join(symbol("triangle", x.scale.place(at), 0.0, "event") for at in events),
        *(_note(note, x.scale, y.scale) for note in notes),
    ]
    return Drawing(frame(x, y, layers), _tips(x, lines, form or y.form))


def _note(note: Note, x: Scale, y: Scale) -> Html:
    at, height = x.place(note.x), y.place(note.y)
    said = word(note.said, at, height, above=note.above, look=note.look) if note.said else None
    return join([symbol(note.symbol, at, height, note.look), said])


def _tips(x: Axis, lines: Sequence[Line], form: Callable[[float], str]) -> str:
    said: dict[float, list[str]] = {}
    for line in lines:
        for at, value in zip(line.xs, line.ys, strict=True):
            if value is not None:
                said.setdefault(at, []).append(f"{line.name} {form(value)}")
    places = sorted(said)
    stride = max(1, math.ceil(len(places) / MOST_TIPS))
    kept = places[::stride]
    return tips(kept, [f"{x.title} {x.form(at)}: {', '.join(said[at])}" for at in kept], x.scale)


def stairs(xs: Sequence[float], ys: Numbers) -> tuple[list[float], list[float | None]]:
    """A series of counts as a line that goes level and then up or down: between two steps there is no half."""
    across: list[float] = list(xs[:1])
    up: list[float | None] = list(ys[:1])
    for (_before, was), (after, now) in pairwise(zip(xs, ys, strict=True)):
        if now != was:
            across.append(after)
            up.append(was)
        across.append(after)
        up.append(now)
    return across, up
