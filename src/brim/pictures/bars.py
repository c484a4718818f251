"""Stacked bars that lie: what a step's memory is used for, one bar a candidate, against the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from brim.pictures.markup import Html, tag
from brim.pictures.plot import percent
from brim.pictures.scales import Scale, is_far, smallest_gap

_TOP: Final = 22
_ROW: Final = 52
_BAR: Final = 22
_WORDS: Final = 16
_EDGE: Final = 0.97
_FROM_THE_LINE: Final = 8
"""Words beside the limit keep so far from its line."""


@dataclass(frozen=True)
class Bar:
    """One bar. The words on its right are its sum, or whatever says it best."""

    label: str
    said: str
    segments: Sequence[tuple[str, float]]
    """Name of a class in the style, and size."""
    is_best: bool = False


def stacked_bars(
    bars: Sequence[Bar],
    *,
    ticks: Callable[[Scale], list[float]],
    form: Callable[[float], str],
    limit: tuple[float, str, str] | None = None,
) -> Html:
    """One below the other on one axis from zero; a line down through all of them is the limit.

    It has two texts: the second is for a limit so far away that the axis ends before it.
    """
    lengths = [sum(size for _name, size in bar.segments) for bar in bars]
    is_beyond = limit is not None and is_far(limit[0], lengths)
    has_line = limit is not None and not is_beyond
    longest = max([*lengths, *([limit[0]] if limit is not None and has_line else [])], default=1.0)
    scale = Scale(0.0, longest or 1.0)
    is_at_the_edge = limit is not None and has_line and scale.place(limit[0]) > _EDGE
    height = _TOP + _ROW * len(bars)
    parts: list[Html] = []
    for tick, word in smallest_gap(ticks(scale), form):
        share = scale.place(tick)
        at, anchor = percent(share), "start" if share < 0.01 else "end" if share > 0.97 else "middle"
        parts.append(tag("line", x1=at, x2=at, y1=_TOP, y2=height, class_="grid"))
        parts.append(tag("text", word, x=at, y=height, dy=18, text_anchor=anchor))
    for place, bar in enumerate(bars):
        parts += _bar(bar, _TOP + _ROW * place, scale)
    if limit is not None and is_beyond:
        parts.append(tag("text", limit[2], x="100%", y=_TOP - 10, text_anchor="end", class_="said limit"))
    elif limit is not None:
        edge = scale.place(limit[0])
        parts.append(tag("line", x1=percent(edge), x2=percent(edge), y1=_TOP - 4, y2=height, class_="level limit"))
        parts.append(
            tag("text", limit[1], x=percent(edge), y=_TOP - 10, text_anchor="end" if edge > 0.5 else "start", class_="said limit")
        )
    parts += [word for place, bar in enumerate(bars) for word in _said(bar, _TOP + _ROW * place, beside_line=is_at_the_edge)]
    return tag("svg", *parts, class_="bars", height=height, focusable="false", aria_hidden="true")


def _said(bar: Bar, top: int, *, beside_line: bool) -> list[Html]:
    look = "row best" if bar.is_best else "row"
    return [
        tag("text", bar.label, x=0, y=top + _WORDS, class_=look),
        tag(
            "text",
            bar.said,
            x="100%",
            y=top + _WORDS,
            dx=-_FROM_THE_LINE if beside_line else None,
            text_anchor="end",
            class_=look,
        ),
    ]


def _bar(bar: Bar, top: int, scale: Scale) -> list[Html]:
    parts: list[Html] = []
    start = 0.0
    for name, size in bar.segments:
        if size > 0:
            width = scale.place(size)
            parts.append(
                tag("rect", x=percent(start), y=top + _WORDS + 8, width=percent(width), height=_BAR, class_=f"part {name}")
            )
            start += width
    return parts
