"""Fewer points, the same picture: a page has no use for more points than a screen has columns."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_POINTS: Final = 1500
"""Of one series."""
MOST_ROWS: Final = 60
"""Of the table beside a chart."""


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Places to keep, in order: of every run of points the lowest and the highest, so that no spike is lost; the first and the last."""
    count = len(values)
    if count <= most:
        return list(range(count))
    runs = max(1, most // 2 - 1)
    kept = {0, count - 1}
    for run in range(runs):
        start, end = run * count // runs, (run + 1) * count // runs
        known = [place for place in range(start, end) if _is_number(values[place])]
        if known:
            kept.add(min(known, key=lambda place: _number(values[place])))
            kept.add(max(known, key=lambda place: _number(values[place])))
        elif end > start:
            # A run without one number is a gap, and a gap is something to see.
            kept.add(start)
    return sorted(kept)


def highest(values: Sequence[float], most: int) -> list[int]:
    """Places to keep of a curve whose peaks matter: the highest of every run."""
    count = len(values)
    if count <= most:
        return list(range(count))
    bounds = [run * count // most for run in range(most + 1)]
    return [max(range(start, end), key=lambda place: values[place]) for start, end in itertools.pairwise(bounds)]


def spread(count: int, most: int = MOST_ROWS) -> list[int]:
    """Places at even distances, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """The mean of the neighbourhood, about a twentieth of the run wide; it does not lag behind. What is not a number is passed over."""
    half = max(1, min(250, len(values) // 40))
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (_number(value) if _is_number(value) else 0.0))
        counts.append(counts[-1] + _is_number(value))
    smoothed: list[float | None] = []
    for place in range(len(values)):
        start, end = max(0, place - half), min(len(values), place + half + 1)
        count = counts[end] - counts[start]
        smoothed.append((sums[end] - sums[start]) / count if count else None)
    return smoothed


def known(values: Sequence[float | None]) -> list[float]:
    """The numbers among them."""
    return [_number(value) for value in values if _is_number(value)]


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float | None) -> float:
    assert value is not None
    return value
