"""What the charts with two axes share: the frame, curves, dots, levels.

A picture stretches with the page and its words do not: places are percent of the drawing, sizes of letters, dots and strokes are
pixels. Curves cannot be written in percent, so they stand in a box of 1000 x 1000 of their own that is stretched without its strokes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from brim.pictures.markup import Html, join, tag
from brim.pictures.scales import FULL, Scale, smallest_gap

Numbers = Sequence[float | None]
Symbol = Literal["dot", "cross", "diamond", "star", "triangle"]

SYMBOLS: Final[dict[Symbol, str]] = {
    "dot": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "cross": "M-4 -4L4 4M-4 4L4 -4",
    "diamond": "M0 -6L6 0L0 6L-6 0z",
    "star": "M0 -8L2 -2.6L7.6 -2.5L3.2 1L4.7 6.5L0 3.3L-4.7 6.5L-3.2 1L-7.6 -2.5L-2 -2.6z",
    "triangle": "M0 -6L5.5 4L-5.5 4z",
}
_CLOSE: Final = 0.1
"""Two labels nearer than this share of the height would lie on each other."""


@dataclass(frozen=True)
class Axis:
    """One axis as it is drawn."""

    scale: Scale
    ticks: Sequence[float]
    form: Callable[[float], str]
    title: str


@dataclass(frozen=True)
class Level:
    """A line across the whole picture: the limit, what was predicted. Where curves may lie under its words, the legend has them."""

    value: float
    label: str
    look: str


def percent(share: float) -> str:
    """A place on the drawing."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def frame(x: Axis, y: Axis, layers: Iterable[Html | None], *, tall: bool = False) -> Html:
    """The axes, and what is drawn between them."""
    lines, words = [], []
    for tick, word in smallest_gap(y.ticks, y.form):
        at = percent(1 - y.scale.place(tick))
        lines.append(tag("line", x1=0, x2="100%", y1=at, y2=at, class_="grid"))
        words.append(tag("text", word, x=-8, y=at, dy=4, text_anchor="end"))
    for tick, word in smallest_gap(x.ticks, x.form):
        at = percent(x.scale.place(tick))
        lines.append(tag("line", x1=at, x2=at, y1="100%", y2="100%", transform="translate(0 5)", class_="tick"))
        words.append(tag("text", word, x=at, y="100%", dy=20, text_anchor="middle"))
    words.append(tag("text", y.title, x=-56, y=-12, class_="axis"))
    words.append(tag("text", x.title, x="100%", y="100%", dy=38, text_anchor="end", class_="axis"))
    base = tag("line", x1=0, x2="100%", y1="100%", y2="100%", class_="base")
    kind = "plot tall" if tall else "plot"
    return tag("svg", *lines, base, *layers, *words, class_=kind, focusable="false", aria_hidden="true")


def curves(*paths: Html | None) -> Html:
    """The box in which curves are stretched."""
    return tag(
        "svg", *paths, viewbox=f"0 0 {FULL} {FULL}", preserveaspectratio="none", width="100%", height="100%", class_="curves"
    )


def curve(xs: Sequence[float], ys: Numbers, x: Scale, y: Scale, look: str) -> Html:
    """A line through points. It has a gap where a value is missing or not a number."""
    pieces: list[list[str]] = [[]]
    for at, value in zip(xs, ys, strict=True):
        if value is None or not math.isfinite(value) or (y.is_log and value <= 0):
            pieces.append([])
        else:
            pieces[-1].append(f"{x.place(at) * FULL:.4g} {(1 - y.place(value)) * FULL:.4g}")
    # A piece of one point is a dot: a line of no length with round ends.
    drawn = ["M" + "L".join(piece if len(piece) > 1 else piece * 2) for piece in pieces if piece]
    return tag("path", d="".join(drawn), class_=f"line {look}", vector_effect="non-scaling-stroke")


def symbol(kind: Symbol, x: float, y: float, look: str) -> Html:
    """One mark at a place that is given by shares of the drawing."""
    return tag("svg", tag("path", d=SYMBOLS[kind]), x=percent(x), y=percent(1 - y), class_=f"mark {kind} {look}")


def symbols(kind: Symbol, xs: Sequence[float], ys: Numbers, x: Scale, y: Scale, look: str) -> Html:
    """Marks at points."""
    found = zip(xs, ys, strict=True)
    return join(
        symbol(kind, x.place(at), y.place(value), look) for at, value in found if value is not None and math.isfinite(value)
    )


def levels(found: Sequence[Level], y: Scale) -> Html:
    """Lines across, each named at its right end; of two that are close the lower one is named below."""
    drawn = []
    above = math.inf
    for level in sorted(found, key=lambda each: -each.value):
        at = y.place(level.value)
        place = percent(1 - at)
        is_close = above - at < _CLOSE
        drawn.append(tag("line", x1=0, x2="100%", y1=place, y2=place, class_=f"level {level.look}"))
        if not level.label:
            continue
        drawn.append(
            tag("text", level.label, x="100%", y=place, dy=15 if is_close else -6, text_anchor="end", class_=f"said {level.look}")
        )
        above = at
    return join(drawn)


def word(said: str, x: float, y: float, *, above: bool = True, look: str = "") -> Html:
    """A few words beside a mark, turned inwards where the edge is near."""
    anchor = "start" if x < 0.2 else "end" if x > 0.8 else "middle"
    return tag("text", said, x=percent(x), y=percent(1 - y), dy=-12 if above else 22, text_anchor=anchor, class_=f"said {look}")


def tips(xs: Sequence[float], said: Sequence[str], x: Scale) -> str:
    """What the crosshair tells, for the page's script: a place of 0 to 1000, a tab, the words; a line each."""
    return "\n".join(f"{x.place(at) * FULL:.0f}\t{' '.join(words.split())}" for at, words in zip(xs, said, strict=True))
