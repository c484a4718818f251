"""Whether a run gets slower: its last third against its first, with how sure that is.

Steps differ in length, loaders stutter, other people use the machine. So work (padded tokens) per second is averaged over blocks of steps,
each third is its median block, and blocks drawn again and again say how far apart the thirds would be by chance. The middle of the slopes
between all pairs of blocks (Theil and Sen) must say the same: a single bad hour at the end is no trend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.run.reading import Columns, Floats, Run

FEWEST_STEPS: Final = 30
SLOWER: Final = 0.9
"""The last third at this share of the first's speed, or less, is worth a word."""
_SURELY: Final = 0.95
_OTHER_DATA: Final = 0.15
"""Sequences that become so much longer or shorter change the speed by themselves."""
_BLOCKS: Final = 240
_DRAWS: Final = 500
_OUTSIDE: Final = 0.025


def per_second(columns: Columns, counts: Floats) -> float | None:
    """Of a whole run; None where no time passed or nothing was counted."""
    seconds, total = float(columns.seconds.sum()), float(counts.sum())
    return total / seconds if seconds > 0 and total > 0 else None


def check(run: Run) -> Iterator[Found]:
    """At most one finding."""
    columns = run.settled
    if len(columns) < FEWEST_STEPS - 3 or not (columns.seconds > 0).all() or not (columns.work > 0).all():
        return
    if _has_other_data(columns):
        return
    ratio, surely = _last_by_first(_blocks(columns.work, columns.seconds))
    if ratio > SLOWER or surely > _SURELY:
        return
    text = _("The last third of the run is {slower:.0%} slower than its first (at least {surely:.0%}).")
    message = sentences(text.format(slower=1 - ratio, surely=1 - surely), _part(columns), _growth(columns))
    yield run.found("run-slowing", message, place=-max(1, len(columns) // 3), until=-1)


def _blocks(work: Floats, seconds: Floats) -> Floats:
    """The logarithm of the speed of each block of steps."""
    edges = np.linspace(0, len(work), min(_BLOCKS, len(work) // 2) + 1).astype(int)[:-1]
    speeds: Floats = np.log(np.add.reduceat(work, edges) / np.add.reduceat(seconds, edges))
    return speeds


def _last_by_first(blocks: Floats) -> tuple[float, float]:
    """The last third's speed by the first's, and what it surely is below."""
    third = max(1, len(blocks) // 3)
    first, last = blocks[:third], blocks[-third:]
    draws = np.random.default_rng(0).integers(0, third, size=(2, _DRAWS, third))
    differences = np.median(last[draws[1]], axis=1) - np.median(first[draws[0]], axis=1)
    trend = _slope(blocks) * (len(blocks) - third)
    ratio = float(np.median(last) - np.median(first))
    if trend > np.log(_SURELY):
        return 1.0, 1.0
    return float(np.exp(ratio)), float(np.exp(np.quantile(differences, 1 - _OUTSIDE)))


def _slope(values: Floats) -> float:
    """The median of the slopes between all pairs."""
    low, high = np.triu_indices(len(values), 1)
    return float(np.median((values[high] - values[low]) / (high - low))) if len(low) else 0.0


def _thirds(columns: Columns, counts: Floats, over: Floats) -> tuple[float, float]:
    third = len(columns) // 3
    return float(counts[:third].sum() / over[:third].sum()), float(counts[-third:].sum() / over[-third:].sum())


def _has_other_data(columns: Columns) -> bool:
    if not (columns.sequences > 0).all():
        return False
    first, last = _thirds(columns, columns.work, columns.sequences)
    return abs(last / first - 1) > _OTHER_DATA


def _part(columns: Columns) -> str:
    """Whether waiting or computing has grown."""
    waited_before, waited_after = _thirds(columns, columns.wait_seconds, columns.work)
    took_before, took_after = _thirds(columns, columns.seconds, columns.work)
    first, last = _thirds(columns, columns.wait_seconds, columns.seconds)
    if waited_after - waited_before > (took_after - took_before) / 2:
        text = _("Waiting for data has grown, from {before:.0%} of the time to {after:.0%}: see what the loader reads later on.")
        return text.format(before=first, after=last)
    return _(
        "Computing itself takes longer for the same work: heat or a power limit, another process on the device, or something "
        "that grows with every step, such as a list of losses that keeps their graphs."
    )


def _growth(columns: Columns) -> str:
    """Memory that creeps up is the sign of such a list."""
    third, peaks = len(columns) // 3, columns.peak_bytes
    if np.isnan(peaks[:third]).any() or np.isnan(peaks[-third:]).any():
        return ""
    before, after = np.median(peaks[:third]), np.median(peaks[-third:])
    if before <= 0 or after < 1.05 * before:
        return ""
    return _("Its memory grew by {share:.0%} in that time.").format(share=after / before - 1)
