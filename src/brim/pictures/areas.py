"""The memory of one step over its events: areas by kind, one upon the other, under the line of what is reserved and the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from brim.pictures.charts import Drawing, byte_axis
from brim.pictures.markup import Html, join, tag
from brim.pictures.plot import Axis, Level, curve, curves, frame, levels, percent, tips
from brim.pictures.scales import FULL, Scale

_NAMED: Final = 0.09
"""Share of the height from which on an area has room for its name."""
_WIDE: Final = 0.12
"""Share of the width from which on a phase has room for its name."""
_WIDE_ON_A_TELEPHONE: Final = 0.26
_AT_THE_EDGE: Final = 0.2
"""Names so near to the edge of the picture are turned inwards."""


@dataclass(frozen=True)
class Areas:
    """Columns of equal length, one entry a point."""

    phases: Sequence[str]
    kinds: Mapping[str, Sequence[float]]
    """In the order in which they are stacked: what stays lies below what comes and goes."""
    reserved: Sequence[float]


def area_chart(
    areas: Areas,
    *,
    across: Sequence[Level],
    titles: tuple[str, str],
    kind_name: Callable[[str], str],
    phase_name: Callable[[str], str],
    said: Sequence[str],
) -> Drawing:
    """The two names say a kind and a phase in the reader's language; `said` is what the crosshair tells of each point."""
    count = len(areas.phases)
    x = Scale(0.0, float(max(1, count - 1)))
    tallest = [*areas.reserved, *(level.value for level in across)]
    y_axis = byte_axis(tallest, titles[1])
    y = y_axis.scale
    below = [0.0] * count
    shapes, names = [], []
    for kind, sizes in areas.kinds.items():
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        shapes.append(_area(below, above, x, y, f"area {kind}"))
        names.append(_name(kind_name(kind), below, above, x, y))
        below = above
    line = curve(range(count), list(areas.reserved), x, y, "reserved")
    x_axis = Axis(x, [], str, titles[0])
    layers = [curves(*shapes, line), *_phases(areas.phases, x, phase_name), *names, levels(across, y)]
    return Drawing(frame(x_axis, y_axis, layers, tall=True), tips(range(count), said, x))


def _area(below: Sequence[float], above: Sequence[float], x: Scale, y: Scale, look: str) -> Html:
    """In steps: each point holds until the next, so that a peak of one point has a width, and is seen on a telephone too."""

    def height(value: float) -> str:
        return f"{(1 - y.place(value)) * FULL:.4g}"

    def steps(values: Sequence[float], places: Sequence[int], side: float) -> str:
        return "".join(f"H{x.place(at + side) * FULL:.4g}V{height(values[at])}" for at in places)

    forth = range(len(above))
    end = f"H{FULL}V{height(below[-1])}"
    return tag("path", d=f"M0 {height(above[0])}{steps(above, forth, -0.5)}{end}{steps(below, forth[::-1], 0.5)}H0z", class_=look)


def _name(said: str, below: Sequence[float], above: Sequence[float], x: Scale, y: Scale) -> Html | None:
    """Where the area is thickest, if it is thick enough."""
    heights = [y.place(high) - y.place(low) for low, high in zip(below, above, strict=True)]
    at = max(range(len(heights)), key=heights.__getitem__, default=0)
    if not heights or heights[at] < _NAMED:
        return None
    share = min(0.98, max(0.02, x.place(at)))
    middle = (y.place(below[at]) + y.place(above[at])) / 2
    anchor = "start" if share < _AT_THE_EDGE else "end" if share > 1 - _AT_THE_EDGE else "middle"
    return tag("text", said, x=percent(share), y=percent(1 - middle), dy=4, text_anchor=anchor, class_="said on")


def _phases(phases: Sequence[str], x: Scale, name: Callable[[str], str]) -> list[Html]:
    drawn, start = [], 0
    for phase, group in groupby(phases):
        count = len(list(group))
        left, right = x.place(start), x.place(start + count)
        line = tag("line", x1=percent(left), x2=percent(left), y1=0, y2="100%", class_="phase") if start else None
        has_room = right - left > _WIDE
        place = percent((left + right) / 2)
        look = "spare" if right - left < _WIDE_ON_A_TELEPHONE else None
        said = tag("text", name(phase), x=place, y="100%", dy=18, text_anchor="middle", class_=look) if has_room else None
        drawn.append(join([line, said]))
        start += count
    return drawn
