"""Seconds of one optimizer step: micro-batches, the sums of their gradients, what ranks send each other, and the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from brim.memory.work import Floats
from brim.speed import constants
from brim.speed.communication import Traffic
from brim.speed.roofline import Roofline

if TYPE_CHECKING:
    from collections.abc import Sequence

_KNOTS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Shares of the longest length between which a micro-batch's seconds are straight lines; shorter ones count as the shortest."""


@dataclass(frozen=True)
class StepSpeed:
    """One structure on one device of a group."""

    roofline: Roofline
    traffic: Traffic
    gradient_bytes: float
    """Of all that trains."""
    longest: int
    """Tokens: where nothing else is said, every sequence has this many."""
    _at_longest: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    _lines: dict[int, Floats] = field(default_factory=dict, compare=False, repr=False)

    def step_seconds(self, slices: Sequence[Sequence[int]]) -> float:
        """`slices` are the micro-batches of each rank, all at the longest length."""
        return self._step([[(size, float(self.longest)) for size in rank] for rank in slices])

    def mean_step_seconds(self, batches: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> float:
        """Over sampled global batches: of each, the (sequences, padded length) of the micro-batches of each rank."""
        return float(np.mean([self._step(ranks) for ranks in batches]))

    def micro_batch_seconds(self, size: int) -> float:
        """What one more micro-batch at the longest length adds to a step."""
        return self._micro_batches([(size, float(self.longest))]) + self._add_seconds()

    def _step(self, ranks: Sequence[Sequence[tuple[int, float]]]) -> float:
        """The slowest rank is waited for; where weights are gathered, in every micro-batch."""
        slowest = max(self._micro_batches(rank) for rank in ranks)
        rounds = max(len(rank) for rank in ranks)
        optimizer = self.roofline.optimizer_seconds() * self.traffic.optimizer_share
        last = self._seconds(*ranks[0][-1]) if ranks[0] else 0.0
        sent = _left(self.traffic.step_seconds, behind=last)
        return slowest + (rounds - 1) * self._add_seconds() + sent + self.traffic.exposed_seconds + optimizer

    def _micro_batches(self, rank: Sequence[tuple[int, float]]) -> float:
        total = 0.0
        for size, length in rank:
            seconds = self._seconds(size, length) if size else 0.0
            total += seconds + _left(self.traffic.micro_batch_seconds, behind=seconds)
        return total

    def _seconds(self, size: int, length: float) -> float:
        """Forward and backward of one micro-batch."""
        if length == self.longest:
            if size not in self._at_longest:
                self._at_longest[size] = self.roofline.micro_batch_seconds(size, self.longest)
            return self._at_longest[size]
        lengths = np.array([share * self.longest for share in _KNOTS])
        if size not in self._lines:
            self._lines[size] = np.array([self.roofline.micro_batch_seconds(size, each) for each in lengths])
        return float(np.interp(length, lengths, self._lines[size]))

    def _add_seconds(self) -> float:
        """Every micro-batch but the first adds its gradients to those that are there: two reads and a write."""
        moved = 3 * self.gradient_bytes
        rates = self.roofline.rates
        return float(moved / rates.bandwidth_of(np.array([moved]))[0]) * rates.scale


def _left(seconds: float, *, behind: float) -> float:
    """Of a transfer, what does not hide behind this much computation."""
    return max(seconds - behind, (1 - constants.OVERLAP_SHARE) * seconds) if seconds else 0.0
