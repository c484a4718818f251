"""How often each length occurs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from brim.pictures.charts import Drawing
from brim.pictures.markup import Html, join, tag
from brim.pictures.plot import Axis, frame, percent, tips
from brim.pictures.scales import Scale, spanning, whole_ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BARS: Final = 40
Bin = tuple[int, int, int]
"""From so many tokens, to so many, both included: how many sequences."""


def bins_of(lengths: Sequence[tuple[int, int]], most: int = MOST_BARS) -> list[Bin]:
    """Lengths and how often they occur, in bars of one width: 1, 2, 5, 10, 20, 50, ... tokens. Empty ones between are kept."""
    if not lengths:
        return []
    shortest, longest = min(length for length, _count in lengths), max(length for length, _count in lengths)
    width = next(
        size
        for power in range(12)
        for size in (10**power, 2 * 10**power, 5 * 10**power)
        if longest // size - shortest // size < most
    )
    counts = [0] * (longest // width - shortest // width + 1)
    for length, count in lengths:
        counts[length // width - shortest // width] += count
    first = shortest // width * width
    return [(first + place * width, first + (place + 1) * width - 1, count) for place, count in enumerate(counts)]


def histogram(
    bins: Sequence[Bin], marks: Sequence[tuple[float, str]], *, x_title: str, y_title: str, said: Sequence[str]
) -> Drawing:
    """Bars that stand; marks are lines from the top to the bottom with a word each. `said` is what the crosshair tells of each bar."""
    low, high = bins[0][0], bins[-1][1] + 1
    x = Scale(low, max([high, *(at for at, _word in marks)]))
    y = spanning([count for _low, _high, count in bins], from_zero=True, room=0.15)
    bars = join(_bar(each, x, y) for each in bins)
    lines = join(_mark(at, word, x, place) for place, (at, word) in enumerate(marks))
    x_axis = Axis(x, whole_ticks(x, 4), lambda value: f"{value:,.0f}", x_title)
    y_axis = Axis(y, whole_ticks(y, 4), lambda value: f"{value:,.0f}", y_title)
    places = [(start + end + 1) / 2 for start, end, _count in bins]
    return Drawing(frame(x_axis, y_axis, [bars, lines]), tips(places, said, x))


def _bar(each: Bin, x: Scale, y: Scale) -> Html | None:
    start, end, count = each
    if not count:
        return None
    left, right, height = x.place(start), x.place(end + 1), y.place(count)
    gap = min(0.002, (right - left) / 5)
    return tag(
        "rect", x=percent(left + gap), y=percent(1 - height), width=percent(right - left - 2 * gap), height=percent(height),
        class_="part s1-fill",
    )  # fmt: skip


def _mark(at: float, word: str, x: Scale, place: int) -> Html:
    share = x.place(at)
    anchor = "end" if share > 0.6 else "start"
    return join(
        [
            tag("line", x1=percent(share), x2=percent(share), y1=0, y2="100%", class_="level predicted"),
            tag(
                "text",
                word,
                x=percent(share),
                dx=-5 if anchor == "end" else 5,
                y=10 + 17 * place,
                text_anchor=anchor,
                class_="said",
            ),
        ]
    )


def middle(lengths: Sequence[tuple[int, int]], share: float) -> int:
    """The length below or at which this share of the sequences lies."""
    total = sum(count for _length, count in lengths)
    seen = 0
    for length, count in sorted(lengths):
        seen += count
        if seen >= math.ceil(share * total):
            return length
    return 0
