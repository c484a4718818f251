"""A global batch cut for all ranks together, where forward and backward are collective: FSDP2, ZeRO-3.

There every micro-batch is a *round*: all ranks run it, and each waits for the slowest. So all have equally many, and what is to be least is
the sum over rounds of the longest of the ranks' seconds. Sorted by length, a round is a stretch of the batch, and each rank takes the next
piece of it: `ranks` times `rounds` pieces, all with little padding, which is more than one rank could have by itself.

A round that may last T seconds reaches as far as it can if every rank takes as much as it can run in T and hold. So for some forty
values of T it is asked how far a round gets from every place, and how long it really lasts; what is best from each place to the end then
follows from the end, as in `slicing.py`.

Sequences that some ranks cannot hold even alone come first, on ranks that can, while the others take what fits them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from brim.step.budget import who_can_hold
from brim.step.slicing import IntArray, cut_stack, sort_stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.step.budget import BoolArray, Budget, Cost, FloatArray

Round = list[IntArray]
"""`[rank]`: places in the global batch."""

# Only products and sums make these, so that no machine rounds them otherwise.
_RATIOS: Final = (1.0625, 1.125, 1.25, 1.5, 2.0, 4.0)
_MOST_RATIOS: Final = 24
_LINEAR: Final = 12
_OUTLIERS_AT_ONCE: Final = (1, 2, 4, 8)
"""Of sequences that not all ranks can hold, how many the first rank takes in a round: the best of these."""


def cut_together(columns: Sequence[IntArray], budgets: Sequence[Budget]) -> list[list[IntArray]]:
    """`[rank][round]`: places in the global batch whose lengths are in `columns`, the costliest round first.

    Every rank has equally many rounds. None of its micro-batches is over its own limit, unless one sequence alone is over that of every
    rank. Empty ones come last.
    """
    order = sort_stack([column[None] for column in columns])[0]
    batch = _Sorted([column[order] for column in columns])
    has_one_budget = all(budget is budgets[0] for budget in budgets)
    rounds = _alike(batch, budgets) if has_one_budget else _unlike(batch, budgets)
    filled = [_without_needless_gaps(each, batch, budgets) for each in rounds]
    # However micro-batches are put into rounds, the sum is least where each rank's costliest meet, then the next ones.
    ranks = [
        sorted(mine, key=lambda part: -batch.together(budget.seconds, part))
        for mine, budget in zip(zip(*filled, strict=True), budgets, strict=True)
    ]
    return [[order[part] for part in mine] for mine in ranks]


def _alike(batch: _Sorted, budgets: Sequence[Budget]) -> list[Round]:
    """Ranks with one budget: whatever the round in which a micro-batch was found, those that last equally long run together."""
    budget, every = budgets[0], np.arange(batch.n)
    found = [every[start:end] for pieces in _Best(batch, budgets).rounds(0) for start, end in pieces if start < end]
    rounds = _side_by_side(found, batch, budgets)
    if len(batch.columns) == 1:
        return rounds
    # With targets, neighbours in length may differ much in seconds, and the micro-batches of one rank alone may fit each other better.
    cuts = cut_stack([column[None] for column in batch.columns], budget.cost, budget.seconds, budget.limit)
    others = _side_by_side(np.split(every, cuts.first[1:]), batch, budgets)
    return min(rounds, others, key=lambda each: sum(_lasts(one, batch, budgets) for one in each))


def _side_by_side(parts: list[IntArray], batch: _Sorted, budgets: Sequence[Budget]) -> list[Round]:
    parts = sorted(parts, key=lambda part: -batch.together(budgets[0].seconds, part))
    ranks = len(budgets)
    return [
        [*parts[first : first + ranks], *[parts[0][:0]] * (first + ranks - len(parts))] for first in range(0, len(parts), ranks)
    ]


def _unlike(batch: _Sorted, budgets: Sequence[Budget]) -> list[Round]:
    able = who_can_hold(batch.columns, budgets)
    ranks = _in_order(batch, budgets, able)
    outliers, common = np.flatnonzero(~able.all(axis=0)), np.flatnonzero(able.all(axis=0))
    rest = _Best(_Sorted([column[common] for column in batch.columns]), [budgets[rank] for rank in ranks])
    ways = [_with_outliers(batch, budgets, ranks, able, outliers, common, count) for count in _OUTLIERS_AT_ONCE[: len(outliers)]]
    rounds, used, _seconds = min(ways, key=lambda way: way[2] + float(rest.seconds[way[1]]), default=([], 0, 0.0))
    for pieces in rest.rounds(used):
        place_of = dict(zip(ranks, pieces, strict=True))
        rounds.append([common[slice(*place_of[rank])] for rank in range(len(budgets))])
    return rounds


class _Sorted:
    """A global batch in the order in which it is cut."""

    def __init__(self, columns: list[IntArray]) -> None:
        self.columns = columns
        self.n = len(columns[0])
        self._halvings = [_halvings(column) for column in columns] if len(columns) > 1 else []

    def longest(self, first: IntArray, count: IntArray) -> list[IntArray]:
        """Of each column, the longest of `count` sequences from there. One column falls: the first is the longest."""
        if not self._halvings:
            return [self.columns[0][first]]
        level = np.frexp(count)[1] - 1
        last = first + count - (1 << level)
        return [np.maximum(table[level, first], table[level, last]) for table in self._halvings]

    def alone(self, cost: Cost) -> FloatArray:
        """What each sequence costs by itself."""
        return np.broadcast_to(np.asarray(cost(np.ones(1, np.int64), *self.columns), np.float64), (self.n,))

    def together(self, cost: Cost, places: IntArray) -> float:
        """What these cost as one micro-batch."""
        if not len(places):
            return 0.0
        return float(cost(np.array([len(places)]), *(column[places].max(keepdims=True) for column in self.columns))[0])


def _halvings(column: IntArray) -> IntArray:
    """`[level, first]`: the longest of 2**level sequences from there, as far as there are any."""
    levels = [column]
    for level in range(len(column).bit_length() - 1):
        before = levels[-1]
        step = 1 << level
        levels.append(np.concatenate([np.maximum(before[:-step], before[step:]), before[-step:]]))
    return np.stack(levels)


def _in_order(batch: _Sorted, budgets: Sequence[Budget], able: BoolArray) -> list[int]:
    """Ranks as they take from a round, whose longest come first: who can hold most, then the fastest."""
    middle = [column[[batch.n // 2]] for column in batch.columns]
    alone = [float(budget.seconds(np.ones(1, np.int64), *middle)[0]) for budget in budgets]
    return sorted(range(len(budgets)), key=lambda rank: (-int(able[rank].sum()), alone[rank], rank))


class _Reach(NamedTuple):
    """How much of the batch one rank takes from each place, `[T, first]`, and how long it runs."""

    sequences: IntArray
    seconds: FloatArray


class _Best:
    """The best rounds from every place to the end of a batch that all ranks can hold."""

    def __init__(self, batch: _Sorted, budgets: Sequence[Budget]) -> None:
        self._batch, self._budgets = batch, budgets
        n = batch.n
        self.seconds = np.zeros(n + 1)
        """From each place to the end."""
        if not n:
            return
        distinct = list(dict.fromkeys(map(id, budgets)))
        by_id = {id(budget): budget for budget in budgets}
        most = {key: _most_that_fit(batch, by_id[key]) for key in distinct}
        durations = _durations(batch, [(by_id[key], most[key]) for key in distinct])
        reach = {key: _reach(batch, by_id[key], most[key], durations) for key in distinct}
        self._reaches = [reach[id(budget)] for budget in budgets]
        self._follow(len(durations), n)

    def _follow(self, durations: int, n: int) -> None:
        rows = np.arange(durations)[:, None]
        end = np.broadcast_to(np.arange(n), (durations, n))
        lasts = np.zeros((durations, n))
        ends = []
        for turn, reach in enumerate(self._reaches):
            count = reach.sequences[rows, end]
            if turn == 0:
                count = np.maximum(count, 1)  # so that a round gets on
            lasts = np.maximum(lasts, np.where(count > 0, reach.seconds[rows, end], 0.0))
            end = end + count
            ends.append(end)
        self._ends = ends
        self._take = np.zeros(n, np.int64)
        ends_from, lasts_from, best = np.ascontiguousarray(end.T), np.ascontiguousarray(lasts.T), self.seconds
        for first in range(n - 1, -1, -1):
            total = lasts_from[first] + best[ends_from[first]]
            taken = int(total.argmin())
            self._take[first] = taken
            best[first] = total[taken]

    def rounds(self, first: int) -> list[list[tuple[int, int]]]:
        """`[round][rank]`: where each rank's piece begins and ends, from this place on."""
        found = []
        while first < self._batch.n:
            ends = [int(end[self._take[first], first]) for end in self._ends]
            found.append(list(zip([first, *ends[:-1]], ends, strict=True)))
            first = ends[-1]
        return found


def _most_that_fit(batch: _Sorted, budget: Budget) -> IntArray:
    """From each place, how many sequences are within the limit; one always is."""
    first = np.arange(batch.n)
    return np.maximum(1, _most(batch, first, batch.n - first, budget.cost, np.float64(budget.limit)))


def _most(batch: _Sorted, first: IntArray, at_most: IntArray, cost: Cost, limit: FloatArray | np.float64) -> IntArray:
    """The most sequences from each place, up to `at_most`, whose cost is within the limit: found by halving, for costs do not fall."""
    shape = np.broadcast_shapes(first.shape, np.shape(limit))
    low, high = np.zeros(shape, np.int64), np.broadcast_to(at_most, shape)
    for _halving in range(int(at_most.max(initial=0)).bit_length()):
        middle = (low + high + 1) >> 1
        count = np.maximum(middle, 1)
        fits = cost(count, *batch.longest(first, count)) <= limit
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low


def _durations(batch: _Sorted, budgets: Sequence[tuple[Budget, IntArray]]) -> FloatArray:
    """What a round may last: from the shortest sequence alone to the costliest micro-batch."""
    least = min(float(batch.alone(budget.seconds).min()) for budget, _most in budgets)
    first = np.arange(batch.n)
    longest = max(float(np.max(budget.seconds(most, *batch.longest(first, most)))) for budget, most in budgets)
    for ratio in _RATIOS:
        found = [longest]
        while found[-1] > least and len(found) <= _MOST_RATIOS:
            found.append(found[-1] / ratio)
        if found[-1] <= least or ratio == _RATIOS[-1]:
            break
    found += [least + (longest - least) * (part / _LINEAR) for part in range(1, _LINEAR)]
    return np.array(sorted(set(found)))


def _reach(batch: _Sorted, budget: Budget, most: IntArray, durations: FloatArray) -> _Reach:
    """With a column more, of the place behind the last sequence, where there is nothing to take."""
    first = np.arange(batch.n)
    count = _most(batch, first, most, budget.seconds, durations[:, None])
    taken = np.maximum(count, 1)
    seconds = np.broadcast_to(budget.seconds(taken, *batch.longest(first, taken)), count.shape)
    return _Reach(np.pad(count, ((0, 0), (0, 1))), np.pad(seconds, ((0, 0), (0, 1))))


def _with_outliers(
    batch: _Sorted,
    budgets: Sequence[Budget],
    ranks: Sequence[int],
    able: BoolArray,
    outliers: IntArray,
    common: IntArray,
    at_once: int,
) -> tuple[list[Round], int, float]:
    """Rounds that take all that not every rank can hold; how much of the common part they take besides; how long they last."""
    found: list[Round] = []
    used, seconds = 0, 0.0
    while len(outliers):
        of_round: Round = [outliers[:0]] * len(budgets)
        able_first = sorted(ranks, key=lambda rank: not able[rank, outliers[0]])
        first = outliers[able[able_first[0], outliers]][:at_once]
        of_round[able_first[0]] = first = first[: _fitting(batch, budgets[able_first[0]], first, np.inf)]
        outliers = outliers[~np.isin(outliers, first)]
        lasts = batch.together(budgets[able_first[0]].seconds, first)
        for rank in able_first[1:]:
            mine = outliers[able[rank, outliers]]
            source = mine if len(mine) else common[used:]
            of_round[rank] = taken = source[: _fitting(batch, budgets[rank], source, lasts)]
            if len(mine):
                outliers = outliers[~np.isin(outliers, taken)]
            else:
                used += len(taken)
        found.append(of_round)
        seconds += lasts
    return found, used, seconds


def _fitting(batch: _Sorted, budget: Budget, places: IntArray, seconds: float) -> int:
    """How many of these, from the first, make a micro-batch within the limit that runs no longer than that."""
    if not len(places):
        return 0
    count = np.arange(1, len(places) + 1)
    longest = [np.maximum.accumulate(column[places]) for column in batch.columns]
    fits = (budget.cost(count, *longest) <= budget.limit) | (count == 1)
    return int(np.count_nonzero(np.logical_and.accumulate(fits & (budget.seconds(count, *longest) <= seconds))))


def _lasts(of_round: Round, batch: _Sorted, budgets: Sequence[Budget]) -> float:
    return max(batch.together(budget.seconds, part) for budget, part in zip(budgets, of_round, strict=True))


def _without_needless_gaps(of_round: Round, batch: _Sorted, budgets: Sequence[Budget]) -> Round:
    """A rank with nothing to do takes a half from another, where that is no longer than the round is."""
    lasts = _lasts(of_round, batch, budgets)
    found = list(of_round)
    for rank, budget in enumerate(budgets):
        if len(found[rank]):
            continue
        giver = max(range(len(found)), key=lambda each: (len(found[each]), -each))
        kept, given = np.split(found[giver], [(len(found[giver]) + 1) // 2])
        if len(given) and _fitting(batch, budget, given, lasts) == len(given) and _holds(batch, budget, given):
            found[giver], found[rank] = kept, given
    return found


def _holds(batch: _Sorted, budget: Budget, places: IntArray) -> bool:
    return batch.together(budget.cost, places) <= budget.limit
