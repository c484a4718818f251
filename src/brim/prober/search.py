"""Which size to try next: a pure function of the trials so far.

A prediction says where to begin. A size that ran tells how many bytes it took; with the slope of the prediction, or with a second size,
that is a line, and the line says where the limit is. The search ends when the largest size that ran and the smallest that failed are
neighbours (above a hundred sequences: within one percent), or when the next size is over the limit by more than the line is uncertain.
Whatever the line says, no size is called good that has not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from brim.records import AffineFit, Trial

NOISE: Final = 0.003
"""Of the measured bytes: how far the same size is apart in two runs."""
_FINE_ENOUGH: Final = 100
"""Sizes that differ by less than this part are not told apart any more."""
_FAR_APART: Final = 4
"""Sizes of which one is so many times the other: their middle is the geometric one."""
_STEPS_BACK: Final = (0.94, 0.8)
"""Of the limit: what a prediction may use after one and two sizes that did not fit."""


@dataclass(frozen=True)
class Aim:
    """What is looked for."""

    limit_bytes: int | None
    """What a trial may take; None: not known, so that only failures tell."""
    most: int
    """The largest size that is of use."""
    start: int | None = None
    """The first size to try; None: by the prediction, else 1."""
    predicted: Callable[[int], float] | None = None
    """Bytes of a size; None: no prediction."""
    headroom: float = 0.0
    """What a process is known to take beyond the prediction, as a share."""
    slack: float = 0.0
    """Share of the limit by which a prediction may exceed it and the size is still tried: a caching allocator frees memory when it must."""


def next_size(aim: Aim, trials: Sequence[Trial]) -> int | None:
    """The next size to try; None: the search is over."""
    low, high = bracket(trials, aim.most)
    if high - low <= max(1, low // _FINE_ENOUGH):
        return None
    if not trials:
        return min(aim.most, aim.start or predicted_largest(aim, 1.0) or 1)
    if low == 0:
        return _smaller(aim, trials, high)
    return _larger(aim, trials, low, high)


def bracket(trials: Sequence[Trial], most: int) -> tuple[int, int]:
    """The largest size that ran (0: none), and the smallest above it that failed (else one more than is of use)."""
    low = max((trial.micro_batch for trial in trials if trial.verdict == "ok"), default=0)
    failed = [trial.micro_batch for trial in trials if trial.verdict != "ok" and trial.micro_batch > low]
    return low, min([most + 1, *failed])


def affine(trials: Sequence[Trial]) -> AffineFit | None:
    """Measured bytes as a line, by least squares; None below two sizes."""
    ran = [trial for trial in trials if _is_measured(trial)]
    # Beside gradients of others every size takes more: one line cannot hold both kinds.
    ran = [trial for trial in ran if trial.accumulates] or ran
    ones = [(1, trial.one_sequence_bytes) for trial in ran if trial.one_sequence_bytes is not None]
    points = sorted(dict([*ones, *((trial.micro_batch, trial.peak_device_bytes) for trial in ran)]).items())
    if len(points) < 2:
        return None
    sizes, needed = [float(size) for size, _peak in points], [float(peak or 0) for _size, peak in points]
    mean_size, mean_bytes = sum(sizes) / len(sizes), sum(needed) / len(needed)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = sum((size - mean_size) * (peak - mean_bytes) for size, peak in zip(sizes, needed, strict=True)) / spread
    base = mean_bytes - slope * mean_size
    residual = max(abs(base + slope * size - peak) for size, peak in zip(sizes, needed, strict=True))
    return AffineFit(base_bytes=base, bytes_per_sequence=slope, residual_bytes=residual)


def _is_measured(trial: Trial) -> bool:
    return trial.verdict == "ok" and trial.peak_device_bytes is not None


def predicted_largest(aim: Aim, share: float) -> int | None:
    """The largest size that is predicted to take no more than this share of the limit; None: no prediction."""
    if aim.predicted is None or aim.limit_bytes is None:
        return None
    room = share * aim.limit_bytes / (1 + aim.headroom)
    low, high = 0, 1
    while high <= aim.most and aim.predicted(high) <= room:
        low, high = high, 2 * high
    high = min(high, aim.most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if aim.predicted(middle) <= room:
            low = middle
        else:
            high = middle
    return max(1, low)


def _smaller(aim: Aim, trials: Sequence[Trial], high: int) -> int:
    """Nothing has run yet: a step back from what the first size was predicted to take."""
    if aim.predicted is None or aim.limit_bytes is None or len(trials) > len(_STEPS_BACK):
        return max(1, high // 2)
    first = aim.predicted(trials[0].micro_batch)
    guess = predicted_largest(aim, _STEPS_BACK[len(trials) - 1] * min(1.0, first / aim.limit_bytes))
    return min(high - 1, guess or 1)


def _larger(aim: Aim, trials: Sequence[Trial], low: int, high: int) -> int | None:
    """Something has run, and something larger may."""
    measured = {trial.micro_batch: trial.peak_device_bytes for trial in trials if _is_measured(trial)}
    if aim.limit_bytes is None or low not in measured:
        return min(high - 1, 2 * low) if high == aim.most + 1 else _between(low, high)
    line, uncertainty = _line(aim, trials, low)
    if line(low + 1) - uncertainty(low + 1) > (1 + aim.slack) * aim.limit_bytes:
        return None
    failed = [trial.micro_batch for trial in trials if trial.verdict != "ok" and trial.micro_batch > low]
    wrong = sum(line(size) <= aim.limit_bytes for size in failed)
    if wrong > 2 or len(failed) > 3 or (wrong and high > 2 * low):
        # The line has been wrong: halves need no line.
        return _between(low, high)
    # What failed so near may have been noise: the line gets one more chance, and less room.
    room = aim.limit_bytes * (1 - NOISE * wrong)
    next_apart = min(high - 1, low + max(1, low // _FINE_ENOUGH))
    return _largest_below(line, room, next_apart, high)


def _between(low: int, high: int) -> int:
    """The middle; far apart, the geometric one."""
    return max(low + 1, math.isqrt(low * high)) if high > _FAR_APART * low else (low + high) // 2


def _largest_below(line: Callable[[int], float], room: float, first: int, high: int) -> int:
    """The largest size from the first on that the line allows; the first, if it allows none."""
    last = high - 1
    while first < last:
        middle = (first + last + 1) // 2
        if line(middle) <= room:
            first = middle
        else:
            last = middle - 1
    return first


def _line(aim: Aim, trials: Sequence[Trial], low: int) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Bytes of larger sizes, and how uncertain that is."""
    peaks = {trial.micro_batch: float(trial.peak_device_bytes or 0) for trial in trials if _is_measured(trial)}
    peak, noise = peaks[low], NOISE * peaks[low]
    below = [size for size in peaks if (low - size) * 4 >= low]
    if below:
        near = max(below)
        slope = (peak - peaks[near]) / (low - near)
        fit = affine(trials)
        residual = fit.residual_bytes if fit is not None else 0.0
        return lambda size: peak + slope * (size - low), lambda size: noise + min(residual, slope * (size - low))
    if aim.predicted is not None:
        predicted = aim.predicted
        level = predicted(low)
        off = abs(peak / level - 1) if level else 1.0
        return (
            lambda size: peak + predicted(size) - level,
            lambda size: noise + off * (predicted(size) - level),
        )
    one = next((trial.one_sequence_bytes for trial in trials if _is_measured(trial) and trial.one_sequence_bytes), None)
    if one is not None and low > 1:
        slope = (peak - one) / (low - 1)
        return lambda size: peak + slope * (size - low), lambda size: noise + 0.1 * slope * (size - low)
    # One size and no prediction: what it took divided by its size is more than each sequence takes, so this many surely fit.
    return lambda size: peak / low * size, lambda size: peak / low * size
