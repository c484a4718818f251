"""Seconds of one optimizer step: micro-batches, the sums of their gradients, what ranks send each other, and the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from brim.memory.work import Floats
from brim.speed.communication import Busy, Traffic
from brim.speed.roofline import Roofline

if TYPE_CHECKING:
    from collections.abc import Sequence

_KNOTS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Shares of the longest length between which a micro-batch's seconds are straight lines; shorter ones count as the shortest."""


@dataclass(frozen=True)
class StepParts:
    """Where the seconds of a step go, on the rank that all wait for."""

    compute_seconds: float
    """Forward, backward, sums of gradients and the update."""
    exposed_seconds: float
    """Communication that nothing hides."""
    busy: Busy
    """Links, hidden or not."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_seconds + self.exposed_seconds


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
        return self.step_parts(slices).seconds

    def step_parts(self, slices: Sequence[Sequence[int]]) -> StepParts:
        """The same, taken apart."""
        return self._step([[(size, float(self.longest)) for size in rank] for rank in dict.fromkeys(map(tuple, slices))])

    def mean_step_seconds(self, batches: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> float:
        """Over sampled global batches: of each, the (sequences, padded length) of the micro-batches of each rank."""
        return self.mean_step_parts(batches).seconds

    def mean_step_parts(self, batches: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> StepParts:
        """The same, taken apart."""
        parts = [self._step(ranks) for ranks in batches]
        return StepParts(
            float(np.mean([each.compute_seconds for each in parts])),
            float(np.mean([each.exposed_seconds for each in parts])),
            sum((each.busy for each in parts), Busy()) * (1 / len(parts)),
        )

    def micro_batch_seconds(self, size: int) -> float:
        """What one more micro-batch at the longest length adds to a step."""
        return sum(self._micro_batches([(size, float(self.longest))])) + self._add_seconds()

    def _step(self, ranks: Sequence[Sequence[tuple[int, float]]]) -> StepParts:
        """The slowest rank is waited for; where weights are gathered, in every micro-batch."""
        traffic = self.traffic
        computed, waited = max((self._micro_batches(rank) for rank in ranks), key=sum)
        rounds = max(len(rank) for rank in ranks)
        optimizer = self.roofline.optimizer_seconds() * traffic.optimizer_share
        last = self._seconds(*ranks[0][-1]) if ranks[0] else 0.0
        sent = self._left(traffic.step_seconds, behind=last)
        return StepParts(
            computed + (rounds - 1) * self._add_seconds() + optimizer,
            waited + sent + traffic.exposed_seconds,
            traffic.micro_batch_busy * rounds + traffic.step_busy,
        )

    def _micro_batches(self, rank: Sequence[tuple[int, float]]) -> tuple[float, float]:
        """Seconds of computing, and of communication that does not hide behind it."""
        computed = waited = 0.0
        for size, length in rank:
            seconds = self._seconds(size, length) if size else 0.0
            computed += seconds
            waited += self._left(self.traffic.micro_batch_seconds, behind=seconds)
        return computed, waited

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

    def _left(self, seconds: float, *, behind: float) -> float:
        """Of a transfer, what does not hide behind this much computation."""
        return max(seconds - behind, (1 - self.traffic.overlap) * seconds) if seconds else 0.0
