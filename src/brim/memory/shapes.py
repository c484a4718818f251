"""One structure, many shapes: the sizes of a trace as functions of micro-batch and length.

Within one structural configuration the same operators run in the same order whatever the shape, and every storage is a product of its
dimensions: a constant, times a power of the batch, times a power of the length. Four small traces tell the powers (three decide, the
fourth confirms), and any other shape is then a matter of multiplication: hundreds of configurations from a handful of traces. The few
small storages that are no product (labels with one token more) are straight lines between the four.

Where the events are not the same at all four points, or more than a hundredth of the bytes is unexplained, the shape must be traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from brim.memory.layers import deepen_with_sources
from brim.memory.stream import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Sizes = NDArray[np.int64]

# A batch of one is left out: what is broadcast or copied for several rows is not for one.
_BATCHES = (2, 3)
_MOST_UNEXPLAINED = 0.01


class NotAProductError(Exception):
    """The structure changes with the shape, or a size is no product of batch and length."""


@dataclass(frozen=True)
class ShapedTrace:
    """A trace whose sizes follow the shape."""

    base: Trace
    base_batch: int
    base_length: int
    batch_powers: Sizes
    length_powers: Sizes
    corners: Sizes
    """Sizes at the four shapes that were traced, for the few storages that are no product: [storages, 2 batches, 2 lengths]."""
    between: Sizes
    """Which storages those are. Their sizes are straight lines in batch and length (labels with one token more)."""

    def deepened(self, template: int, extra: int) -> ShapedTrace:
        """The same family of shapes with `extra` more layers like `template`."""
        base, sources = deepen_with_sources(self.base, template, extra)
        places = {number: index for index, number in enumerate(self.between.tolist())}
        between = [(index, places[source]) for index, source in enumerate(sources) if source in places]
        corners = self.corners[[place for _index, place in between]] if between else self.corners[:0]
        return replace(
            self,
            base=base,
            batch_powers=self.batch_powers[sources],
            length_powers=self.length_powers[sources],
            corners=corners,
            between=np.array([index for index, _place in between], dtype=np.int64),
        )

    def sizes(self, batch: int, length: int) -> Sizes:
        """Bytes of every storage at this shape."""
        base = np.array([birth.size for birth in self.base.births], dtype=np.int64)
        grown = base * batch**self.batch_powers * length**self.length_powers
        sizes: Sizes = grown // (self.base_batch**self.batch_powers * self.base_length**self.length_powers)
        if len(self.between):
            few, many = _BATCHES
            across = (batch - few) / (many - few)
            along = (length - self.base_length) / self.base_length
            at_length = self.corners[:, :, 0] + along * (self.corners[:, :, 1] - self.corners[:, :, 0])
            sizes[self.between] = np.rint(at_length[:, 0] + across * (at_length[:, 1] - at_length[:, 0])).astype(np.int64)
        return sizes

    def at(self, batch: int, length: int) -> Trace:
        """The trace of this shape."""
        sizes = self.sizes(batch, length).tolist()
        births = [replace(birth, size=size) for birth, size in zip(self.base.births, sizes, strict=True)]
        return replace(self.base, births=births)

    def live_peak_bytes(self, batch: int, length: int) -> int:
        """Most bytes alive at once at this shape, without building the trace."""
        events = np.array(self.base.events, dtype=np.int64)
        is_birth = events >= 0
        sizes = self.sizes(batch, length)[np.where(is_birth, events, ~events)]
        return int(np.cumsum(np.where(is_birth, sizes, -sizes)).max())


def fit(trace: Callable[[int, int], Trace], length: int) -> ShapedTrace:
    """Trace four shapes, of `length` and twice that, and find how each storage grows."""
    few, many = _BATCHES
    small, wide = trace(few, length), trace(many, length)
    long, both = trace(few, 2 * length), trace(many, 2 * length)
    if any(other.events != small.events for other in (wide, long, both)):
        raise NotAProductError
    corners = np.stack([_sizes(each) for each in (small, long, wide, both)], axis=1).reshape(-1, 2, 2)
    batch_powers = _powers(corners[:, 0, 0], corners[:, 1, 0], few, many)
    length_powers = _powers(corners[:, 0, 0], corners[:, 0, 1], 1, 2)
    unknown = (batch_powers < 0) | (length_powers < 0)
    batch_powers[unknown] = length_powers[unknown] = 0
    expected = corners[:, 0, 0] * many**batch_powers // few**batch_powers * 2**length_powers
    between = np.flatnonzero(unknown | (expected != corners[:, 1, 1]))
    batch_powers[between] = length_powers[between] = 0
    # Lines through four corners are believed for small things only: a large storage that is no product is not understood.
    if corners[between].sum() > _MOST_UNEXPLAINED * corners.sum():
        raise NotAProductError
    return ShapedTrace(small, few, length, batch_powers, length_powers, corners[between], between)


def _sizes(trace: Trace) -> Sizes:
    return np.array([birth.size for birth in trace.births], dtype=np.int64)


def _powers(start: Sizes, grown: Sizes, low: int, high: int) -> Sizes:
    """The power of a dimension that grew from `low` to `high`, for every storage; -1 for none."""
    powers = np.full(len(start), -1, dtype=np.int64)
    for power in (2, 1, 0):
        powers[grown * low**power == start * high**power] = power
    return powers
