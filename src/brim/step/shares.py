"""A global batch shared out to ranks that differ in memory or in speed, so that all finish at about the same time.

How long a share takes is known only when it is cut: a rank with little memory pays the fixed cost of a micro-batch more often. So shares
are dealt by an estimate of what each sequence takes on each rank, cut as they will be cut, the estimates corrected by what came out, and
dealt again. Then single sequences move from the rank that finishes last to one that finishes early, as long as that helps. A sequence goes
only to ranks that can hold it alone, if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from brim.step.budget import who_can_hold
from brim.step.slicing import PAIRS_AT_ONCE, IntArray, longest_run, seconds_of_runs, sort_stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.step.budget import Budget, FloatArray

_LIKELY_SEQUENCES: Final = 8
"""In a micro-batch, where the limit allows so many: over these its fixed cost is spread in the first estimate."""
_DEALS: Final = 4
_GOOD_ENOUGH: Final = 0.03
"""Of the time of the rank that finishes last, by which another may finish earlier."""
_TRIES: Final = 3
"""Sequences of the last rank that are tried on another before the next one is asked."""
_MOST_MOVES: Final = 32


def share_out(columns: Sequence[IntArray], budgets: Sequence[Budget]) -> list[list[IntArray]]:
    """`[rank][micro-batch]`: places in the global batch whose lengths are in `columns`; on each rank the costliest first."""
    batch = _Batch(columns, budgets)
    found = batch.dealt([1.0] * len(budgets))
    best, corrections = found, [1.0] * len(budgets)
    for _deal in range(_DEALS - 1):
        if batch.is_even(best):
            break
        corrections = [
            share.seconds / share.estimate * correction if share.estimate > 0 else correction
            for share, correction in zip(found, corrections, strict=True)
        ]
        found = batch.dealt(corrections)
        best = min(best, found, key=_latest)
    best = batch.levelled(best)
    return [share.micro_batches(budget) for share, budget in zip(best, budgets, strict=True)]


@dataclass(frozen=True)
class _Share:
    """What one rank gets, and how long it takes when it is cut."""

    places: IntArray
    """Sorted as they are cut."""
    columns: list[IntArray]
    ends: tuple[int, ...] = ()
    """Of its micro-batches."""
    seconds: float = 0.0
    costliest: float = 0.0
    """Seconds of its costliest micro-batch."""
    estimate: float = 0.0

    def micro_batches(self, budget: Budget) -> list[IntArray]:
        """The costliest first."""
        if not len(self.places):
            return []
        starts = np.array([0, *self.ends[:-1]])
        longest = [np.maximum.reduceat(column, starts) for column in self.columns]
        order = np.argsort(-budget.cost(np.diff([*starts, len(self.places)]), *longest), kind="stable")
        parts = np.split(self.places, self.ends[:-1])
        return [parts[index] for index in order.tolist()]


class _Batch:
    """One global batch, and what each of its sequences is estimated to take on each rank."""

    def __init__(self, columns: Sequence[IntArray], budgets: Sequence[Budget]) -> None:
        self._columns, self._budgets = list(columns), budgets
        self._able = who_can_hold(columns, budgets)
        self._each = np.stack([self._estimate(budget) for budget in budgets])

    def _alone(self, found: FloatArray) -> FloatArray:
        return np.broadcast_to(np.asarray(found, np.float64), self._columns[0].shape)

    def _estimate(self, budget: Budget) -> FloatArray:
        """What a sequence takes among others of its length, as many as are likely and fit."""
        best = np.ones(len(self._columns[0]), np.int64)
        for count in range(2, _LIKELY_SEQUENCES + 1):
            fits = self._alone(budget.cost(np.array([count]), *self._columns)) <= budget.limit
            best = np.where(fits, count, best)
        return self._alone(budget.seconds(best, *self._columns)) / best

    def dealt(self, corrections: Sequence[float]) -> list[_Share]:
        """The costliest first, each to the rank that would be done with it first."""
        each = self._each * np.array(corrections)[:, None]
        takes = np.where(self._able, each, np.inf).T
        order = np.argsort(-each.min(axis=0), kind="stable").tolist()
        loads = [0.0] * len(self._budgets)
        mine: list[list[int]] = [[] for _budget in self._budgets]
        rows = takes.tolist()
        ranks = range(len(loads))
        for place in order:
            row = rows[place]
            done = [load + seconds for load, seconds in zip(loads, row, strict=True)]
            rank = min(ranks, key=done.__getitem__)
            loads[rank] = done[rank]
            mine[rank].append(place)
        return [self._cut(rank, np.array(sorted(places), np.int64), corrections[rank]) for rank, places in enumerate(mine)]

    def _cut(self, rank: int, places: IntArray, correction: float = 1.0) -> _Share:
        if not len(places):
            return _Share(places, [column[places] for column in self._columns])
        order = sort_stack([column[places][None] for column in self._columns])[0]
        places = places[order]
        columns = [column[places] for column in self._columns]
        ends, seconds, costliest = _cut_one(columns, self._budgets[rank])
        return _Share(places, columns, ends, seconds, costliest, float(np.cumsum(self._each[rank, places])[-1]) * correction)

    def is_even(self, shares: Sequence[_Share]) -> bool:
        """Whether nobody is idle for long: neither a good part of the step nor longer than a micro-batch."""
        last = max(shares, key=lambda share: share.seconds)
        idle = last.seconds - min(share.seconds for share in shares)
        return idle <= _GOOD_ENOUGH * last.seconds and idle <= last.costliest

    def levelled(self, shares: list[_Share]) -> list[_Share]:
        """Sequence by sequence from the rank that finishes last, while that helps."""
        shares = list(shares)
        for _move in range(_MOST_MOVES):
            if self.is_even(shares) or not self._move(shares):
                break
        return shares

    def _move(self, shares: list[_Share]) -> bool:
        last = max(range(len(shares)), key=lambda rank: shares[rank].seconds)
        others = sorted((rank for rank in range(len(shares)) if rank != last), key=lambda rank: shares[rank].seconds)
        giver = shares[last]
        for rank in others:
            taker = shares[rank]
            for index in self._worth_trying(giver, taker, last, rank):
                left = self._cut(last, np.sort(np.delete(giver.places, index)))
                more = self._cut(rank, np.sort(np.append(taker.places, giver.places[index])))
                if max(left.seconds, more.seconds) < giver.seconds:
                    shares[last], shares[rank] = left, more
                    return True
        return False

    def _worth_trying(self, giver: _Share, taker: _Share, last: int, rank: int) -> list[int]:
        """Of the giver's sequences, those after whose move both would be done at the most equal times, and the shortest."""
        idle = giver.seconds - taker.seconds
        able = np.flatnonzero(self._able[rank, giver.places])
        if not len(able):
            return []
        places = giver.places[able]
        moved = self._each[last, places] + self._each[rank, places]
        nearest = np.argsort(np.abs(idle - moved), kind="stable")[: _TRIES - 1]
        shortest = int(np.argmin(self._each[rank, places]))
        return list(dict.fromkeys([*able[nearest].tolist(), int(able[shortest])]))


def _latest(shares: Sequence[_Share]) -> float:
    return max(share.seconds for share in shares)


def _cut_one(columns: Sequence[IntArray], budget: Budget) -> tuple[tuple[int, ...], float, float]:
    """`slicing.cut_stack` for one share, with less around it: ends of micro-batches, seconds of all, seconds of the costliest."""
    stacked = [column[None] for column in columns]
    n = len(columns[0])
    run = longest_run(stacked, budget.cost, budget.limit)
    best = np.full(n + 1 + run, np.inf)
    best[n] = 0.0
    take, alone = [0] * n, [0.0] * n
    rows = max(1, PAIRS_AT_ONCE // run)
    for end in range(n, 0, -rows):
        start = max(0, end - rows)
        block = seconds_of_runs(stacked, start, end, run, budget.cost, budget.seconds, budget.limit)[0]
        for first in range(end - 1, start - 1, -1):
            seconds = block[first - start]
            total = seconds + best[first + 1 : first + 1 + run]
            size = int(total.argmin())
            take[first], alone[first] = size + 1, float(seconds[size])
            best[first] = total[size]
    ends, place, costliest = [], 0, 0.0
    while place < n:
        costliest = max(costliest, alone[place])
        place += take[place]
        ends.append(place)
    return tuple(ends), float(best[0]), costliest
