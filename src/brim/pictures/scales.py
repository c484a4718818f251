"""From numbers to places, and the round numbers that an axis shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FULL: Final = 1000
"""A curve is drawn in a box of so many units, whatever its size on the screen."""
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_NEARLY: Final = 0.86
"""A few ticks more than asked for are better than half as many."""
_FEW_DECADES: Final = 3
_FAR: Final = 2.0
"""Times what is drawn: a limit beyond that would press the picture flat."""


@dataclass(frozen=True)
class Scale:
    """One axis: `low` is at 0, `high` at 1. Where it is logarithmic, both are above 0."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """From 0 to 1; what lies outside is put on the edge."""
        low, high, at = (math.log10(max(each, 1e-300)) if self.is_log else each for each in (self.low, self.high, value))
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self, count: int = 5, steps: Sequence[float] = _STEPS) -> list[float]:
        """Round numbers within the axis, at most about `count`."""
        if self.is_log:
            return _decades(self.low, self.high)
        step = _round_step((self.high - self.low) / max(1, count), steps)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def spanning(values: Sequence[float], *, from_zero: bool = False, room: float = 0.06, is_log: bool = False) -> Scale:
    """An axis on which all of these have room. NaN and infinities are not looked at."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    low, high = (min(known), max(known)) if known else (1.0, 10.0) if is_log else (0.0, 1.0)
    if is_log:
        return Scale(low / 1.2, high * 1.2, is_log=True)
    low = min(0.0, low) if from_zero else low
    if high == low:
        # One value, or many that are equal: a line needs an axis all the same.
        spread = abs(high) * 0.1 or 1.0
        low, high = (low, high + spread) if from_zero and low == 0 else (low - spread, high + spread)
        return Scale(low, high)
    spread = (high - low) * room
    return Scale(low if low == 0 and from_zero else low - spread, high + spread)


def is_far(limit: float, values: Sequence[float]) -> bool:
    """Whether a limit is so far above all of these that it is better said than drawn."""
    return limit > _FAR * max(values, default=limit)


def byte_ticks(scale: Scale, count: int = 5) -> list[float]:
    """Round numbers of the unit in which the largest is told."""
    unit = 1024.0 ** max(0, min(4, int(math.log(max(abs(scale.high), 1.0), 1024))))
    return [tick * unit for tick in Scale(scale.low / unit, scale.high / unit).ticks(count)]


def whole_ticks(scale: Scale, count: int = 5) -> list[float]:
    """Whole numbers only: steps and sequences are never halved."""
    return sorted({float(round(tick)) for tick in scale.ticks(count) if abs(tick - round(tick)) < 1e-6})


def plain(value: float) -> str:
    """A number of unknown size, short: 0.0003, 1.25, 12,500."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    if size and (size < 1 or size >= 1e9):
        return f"{value:.3g}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def bytes_short(value: float) -> str:
    """Bytes on an axis: `512 MiB`, without zeros behind the point that say nothing."""
    number, _blank, unit = format_bytes(round(value)).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def smallest_gap(ticks: Sequence[float], form: Callable[[float], str]) -> list[tuple[float, str]]:
    """Ticks with their words; where two would read the same, one of them."""
    seen: dict[str, float] = {}
    for tick in ticks:
        seen.setdefault(form(tick), tick)
    return [(tick, word) for word, tick in seen.items()]


def _round_step(rough: float, steps: Sequence[float]) -> float:
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next((step * power for step in steps if step * power >= rough * _NEARLY), 10.0 * power)


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, (last - first) // 6)
    within = [10.0**power for power in range(first, last + 1, stride) if low <= 10.0**power <= high]
    if len(within) >= _FEW_DECADES:
        return within
    return [
        factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5) if low <= factor * 10.0**power <= high
    ]
