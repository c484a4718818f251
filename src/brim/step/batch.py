"""Which sequences every optimizer step takes, and how each rank cuts its share of them: from lengths alone, before any data is read.

The state of a run is one number. Seed, lengths and effective batch give the global batch of every step, on any machine and from any step
on; how many ranks there are and what a micro-batch may cost only decide how it is divided, and may change in the middle of a run.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from brim.errors import UsageError
from brim.locale import _
from brim.step.arguments import whole
from brim.step.budget import Budget
from brim.step.rounds import cut_together
from brim.step.shares import share_out
from brim.step.slicing import IntArray, Order, cut_stack, deal_stack, even_shares, order_of, sort_stack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Slices = list[list[IntArray]]
"""`[rank][micro-batch]`: the dataset ids of one optimizer step."""

_SEQUENCES_AT_ONCE: Final = 1 << 14
"""Global batches of so many sequences are sliced together: enough to hide numpy's start, few enough for the processor's cache."""
_MOST_TOKENS: Final = np.iinfo(np.int32).max


class BatchPlan:
    """The order of a whole run, as indices."""

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        effective_batch: int,
        seed: int = 0,
        drop_last: bool = False,
        ranks: int = 1,
        together: bool = False,
    ) -> None:
        """`lengths` are tokens, `[n]`, or `[n, 2]` with the targets' beside them. An epoch's last global batch may be short, or dropped.

        `together`: for engines whose forward and backward are collective. All ranks then have equally many micro-batches in a step.
        """
        for name, size in (("effective_batch", effective_batch), ("ranks", ranks)):
            whole(name, size)
        whole("seed", seed, least=0)
        self._lengths = _checked(lengths)
        self.n = len(self._lengths)
        self.effective_batch = effective_batch
        self.seed = seed
        self.drop_last = drop_last
        self.ranks = ranks
        self.together = together
        self.steps_per_epoch = self.n // effective_batch if drop_last else -(-self.n // effective_batch)
        if not self.steps_per_epoch:
            text = _(
                "{n} sequences are fewer than one effective batch of {effective_batch}, so drop_last leaves nothing to train on."
            )
            raise UsageError(
                text.format(n=self.n, effective_batch=effective_batch),
                hint=_("Keep the last batch (drop_last=False), or take a smaller effective batch."),
            )
        self._order: tuple[int, Order] | None = None

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Epoch, and place in it, of the run's optimizer step; both count from 0, as the step does."""
        assert step >= 0
        return divmod(step, self.steps_per_epoch)

    def global_batch(self, step: int) -> IntArray:
        """The dataset ids of this step, in the epoch's order."""
        epoch, place = self.epoch_of(step)
        start = place * self.effective_batch
        return self._order_of(epoch)[start : start + self.effective_batch].astype(np.int64)

    def slices(self, step: int, budget: Budget | Sequence[Budget]) -> Slices:
        """Every rank's micro-batches of this step, the same whoever asks; on each rank the costliest runs first.

        `budget` is that of every rank, or a sequence with one for each. None of a rank's micro-batches is over its budget, unless one
        sequence alone is. A rank for which nothing is left has no micro-batches; `together`, all have equally many, the last of
        which may be empty.
        """
        return self._sliced(self.global_batch(step)[None], budget)[0]

    def epoch(self, epoch: int, budget: Budget | Sequence[Budget]) -> Iterator[Slices]:
        """`slices` of all steps of this epoch, many at a time."""
        order = self._order_of(epoch)
        size = self.effective_batch
        whole = self.n // size * size
        at_once = max(1, _SEQUENCES_AT_ONCE // size) * size
        for start in range(0, whole, at_once):
            batches = order[start : min(start + at_once, whole)].reshape(-1, size)
            yield from self._sliced(batches.astype(np.int64), budget)
        if whole < self.n and not self.drop_last:
            yield from self._sliced(order[None, whole:].astype(np.int64), budget)

    def cut(self, ids: IntArray, budget: Budget) -> list[IntArray]:
        """One rank's share in micro-batches of this budget, the costliest first."""
        return self._cut(ids[None], 1, budget)[0][0]

    def fingerprint(self) -> str:
        """What must be equal for a run to be continued: the data's lengths, the effective batch, the seed; not the ranks."""
        settings = [*self._lengths.shape, self.effective_batch, self.seed, int(self.drop_last)]
        found = hashlib.sha256(repr(settings).encode())
        found.update(self._lengths.astype("<i4", copy=False).data.cast("B"))
        return found.hexdigest()[:16]

    def first(self, count: int) -> IntArray:
        """The first sequences of the first epoch, `count` of them if there are so many."""
        return self._order_of(0)[:count].astype(np.int64)

    @property
    def longest(self) -> tuple[int, ...]:
        """Tokens of the longest sequence; of the longest target beside it."""
        return tuple(np.atleast_1d(self._lengths.max(axis=0)).tolist())

    def lengths_of(self, ids: npt.ArrayLike) -> IntArray:
        """Tokens of these sequences, in the shape in which all lengths came."""
        return self._lengths[np.asarray(ids, np.int64)].astype(np.int64)

    def _order_of(self, epoch: int) -> Order:
        """An epoch's order is kept until another one is asked for; the two are never held together."""
        kept = self._order
        if kept is None or kept[0] != epoch:
            kept = self._order = None
            kept = self._order = (epoch, order_of(self.n, self.seed, epoch))
        return kept[1]

    def _sliced(self, batches: IntArray, budget: Budget | Sequence[Budget]) -> list[Slices]:
        """Global batches of equal size, `[batch, sequence]` of dataset ids, sliced at once."""
        budgets = self._of_ranks(budget)
        if self.together and self.ranks > 1:
            return [self._in_rounds(ids, budgets) for ids in batches]
        if any(each is not budgets[0] for each in budgets):
            return [self._by_cost(ids, budgets) for ids in batches]
        return self._evenly(batches, budgets[0])

    def _of_ranks(self, budget: Budget | Sequence[Budget]) -> list[Budget]:
        """One for each rank; the same object where they are equal."""
        if isinstance(budget, Budget):
            return [budget] * self.ranks
        if len(budget) != self.ranks:
            text = _("There are {budgets} budgets for {ranks} ranks.")
            raise UsageError(text.format(budgets=len(budget), ranks=self.ranks))
        return [next(other for other in budget if other is each or other == each) for each in budget]

    def _in_rounds(self, ids: IntArray, budgets: Sequence[Budget]) -> Slices:
        return [[ids[places] for places in rank] for rank in cut_together(self._columns_of(ids), budgets)]

    def _by_cost(self, ids: IntArray, budgets: Sequence[Budget]) -> Slices:
        """Ranks that differ: shares that take them equally long, as each cuts its own."""
        return [[ids[places] for places in rank] for rank in share_out(self._columns_of(ids), budgets)]

    def _evenly(self, batches: IntArray, budget: Budget) -> list[Slices]:
        """Ranks with one budget: shares that differ by one sequence at most."""
        shares = even_shares(batches.shape[1], self.ranks)
        dealt = _taken(batches, deal_stack(self._columns_of(batches), shares, budget.seconds))
        larger = shares.count(shares[0])
        more, others = np.split(dealt, [larger * shares[0]], axis=1)
        both = zip(self._cut(more, larger, budget), self._cut(others, self.ranks - larger, budget), strict=True)
        return [first + last for first, last in both]

    def _cut(self, dealt: IntArray, ranks: int, budget: Budget) -> list[Slices]:
        """Micro-batches of so many ranks with equally large shares, which stand side by side in each row of `dealt`."""
        if not dealt.size:
            return [[[] for _rank in range(ranks)] for _batch in dealt]
        stack = dealt.reshape(len(dealt) * ranks, -1)
        ids = _taken(stack, sort_stack(self._columns_of(stack)))
        columns = self._columns_of(ids)
        cuts = cut_stack(columns, budget.cost, budget.seconds, budget.limit)
        starts = cuts.share * stack.shape[1] + cuts.first
        longest = [np.maximum.reduceat(column.ravel(), starts) for column in columns]
        costliest_first = np.lexsort((-budget.cost(cuts.size, *longest), cuts.share))
        starts, ends = starts[costliest_first], (starts + cuts.size)[costliest_first]
        flat = ids.ravel()
        micro_batches = [flat[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        share_ends = np.cumsum(np.bincount(cuts.share)).tolist()
        shares = [micro_batches[start:end] for start, end in pairwise([0, *share_ends])]
        return [shares[first : first + ranks] for first in range(0, len(shares), ranks)]

    def _columns_of(self, ids: IntArray) -> list[IntArray]:
        lengths = self.lengths_of(ids)
        return [lengths] if self._lengths.ndim == 1 else [lengths[..., 0], lengths[..., 1]]


def _taken(ids: IntArray, places: IntArray) -> IntArray:
    return np.take_along_axis(ids, places, axis=1)


def _checked(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Lengths as they are kept: four bytes each, and a copy, so that a plan never changes."""
    found = np.asarray(lengths)
    if not found.size:
        raise UsageError(
            _("There are no sequences to train on."),
            hint=_("Look at the data file: it may be empty, or all of it filtered away."),
        )
    if found.dtype.kind not in "iu" or found.ndim not in (1, 2) or (found.ndim == 2 and found.shape[1] != 2):
        text = _(
            "Lengths must be whole numbers, one a sequence, or two with the target's beside it; these are {dtype} of shape {shape}."
        )
        raise UsageError(text.format(dtype=found.dtype, shape=list(found.shape)))
    shortest, longest = int(found.min()), int(found.max())
    if shortest < 0 or longest > _MOST_TOKENS:
        text = _("A sequence cannot have {tokens} tokens.")
        raise UsageError(text.format(tokens=shortest if shortest < 0 else longest))
    return np.array(found, np.int32, order="C")
