"""One structure, many shapes: the sizes of a trace as functions of micro-batch and length.

Within one structural configuration the same operators run in the same order whatever the shape, and every storage is a product of its
dimensions: a constant, times a power of the batch, times a power of the length. Four small traces tell the powers (three decide, the
fourth confirms), and any other shape is then a matter of multiplication: hundreds of configurations from a handful of traces. The few
small storages that are no product (labels with one token more) are straight lines between the four.

Only one of the four must be whole. Clipping and the optimizer see parameters and no tokens, and what runs after the first micro-batch is
its forward and backward again, which the whole trace shows; so the others may stop after the first backward.

Where the events are not the same at all four points, or more than a hundredth of the bytes is unexplained, the shape must be traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from brim.memory.allocator import MIN_BLOCK_BYTES, Requests
from brim.memory.columns import Columns, Ints
from brim.memory.layers import Address, addresses_of, deepen_columns

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.memory.stream import Trace

SEVERAL = (2, 3)
"""A batch of one is a family of its own: what is broadcast or copied for several rows is not for one."""
ONE = (1,)
_POWERS = (2, 1, 0)
_MOST_UNEXPLAINED = 0.01


class NotAProductError(Exception):
    """The structure changes with the shape, or a size is no product of batch and length."""


class _NotPeriodicError(Exception):
    """The second step is not the first again."""


@dataclass(frozen=True)
class ShapedTrace:
    """A trace whose sizes follow the shape."""

    base: Columns
    """The trace of the first batch and the first length."""
    batches: tuple[int, ...]
    lengths: tuple[int, int]
    """The shapes that were traced."""
    batch_powers: Ints
    length_powers: Ints
    corners: Ints
    """Sizes at those shapes, for the few storages that are no product: [storages, batches, lengths]."""
    between: Ints
    """Which storages those are. Their sizes are straight lines in batch and length (labels with one token more)."""

    def deepened(self, template: int, extra: int) -> ShapedTrace:
        """The same family of shapes with `extra` more layers like `template`."""
        base, sources = deepen_columns(self.base, template, extra)
        row = np.full(len(self.base.sizes), -1)
        row[self.between] = np.arange(len(self.between))
        between = np.flatnonzero(row[sources] >= 0)
        return replace(
            self,
            base=base,
            batch_powers=self.batch_powers[sources],
            length_powers=self.length_powers[sources],
            corners=self.corners[row[sources[between]]],
            between=between,
        )

    def sizes(self, batch: int, length: int) -> Ints:
        """Bytes of every storage at this shape."""
        taller, longer = Fraction(batch, self.batches[0]), Fraction(length, self.lengths[0])
        over = _table(taller.numerator)[self.batch_powers] * _table(longer.numerator)[self.length_powers]
        under = _table(taller.denominator)[self.batch_powers] * _table(longer.denominator)[self.length_powers]
        sizes: Ints = self.base.sizes * over // under
        if len(self.between):
            short, long = self.lengths
            share = (length - short) / (long - short) if long > short else 0.0
            lines = self.corners[:, :, 0] + share * (self.corners[:, :, 1] - self.corners[:, :, 0])
            if len(self.batches) > 1:
                few, many = self.batches
                lines[:, 0] += (batch - few) / (many - few) * (lines[:, 1] - lines[:, 0])
            sizes[self.between] = np.rint(lines[:, 0]).astype(np.int64)
        return sizes

    def at(self, batch: int, length: int) -> Trace:
        """The trace of this shape."""
        return self.base.trace(self.sizes(batch, length))

    def requests(self, batch: int, length: int) -> Requests:
        """This shape, ready for the caching allocator."""
        return Requests.of(self.base.events, self.sizes(batch, length))

    def live_peak_bytes(self, batch: int, length: int) -> int:
        """Most bytes alive at once at this shape, without building the trace."""
        return int(self.base.live(self.sizes(batch, length)).max())

    def least_allocated_bytes(self, batch: int, length: int) -> int:
        """The same in blocks of 512 bytes: the caching allocator hands out at least this much (a large block's rest may be more)."""
        sizes = self.sizes(batch, length)
        return int(self.base.live(-(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES).max())


def fit(
    trace: Callable[[int, int], Trace],
    lengths: tuple[int, int],
    batches: tuple[int, ...] = SEVERAL,
    *,
    first: Trace | None = None,
    begin: Callable[[int, int], Trace] | None = None,
) -> ShapedTrace:
    """Find how each storage grows, from traces of all pairs of these batches and lengths.

    `trace(batch, length)` is a whole trace; `begin(batch, length)` its beginning up to the end of the first step's backward, where that
    is cheaper. `first` is the trace of the first batch and length, if it is there already. Two lengths that are the same one mean that the
    fit holds for that length only.
    """
    base = Columns.of(first or trace(batches[0], lengths[0]))
    others = [(batch, length) for batch in batches for length in dict.fromkeys(lengths)][1:]
    sizes = None
    if begin is not None and others:
        try:
            sizes = _continued(base, [begin(*shape) for shape in others])
        except _NotPeriodicError:
            sizes = None
    if sizes is None:
        sizes = [_same_events(base, trace(*shape)) for shape in others]
    corners = np.stack([base.sizes, *sizes], axis=1).reshape(-1, len(batches), len(set(lengths)))
    if lengths[0] == lengths[1]:
        corners = np.repeat(corners, 2, axis=2)
    return _understand(base, lengths, batches, corners)


def _understand(base: Columns, lengths: tuple[int, int], batches: tuple[int, ...], corners: Ints) -> ShapedTrace:
    """The powers that explain the corners."""
    start = corners[:, 0, 0]
    batch_powers = _powers(start, corners[:, -1, 0], batches[0], batches[-1])
    length_powers = _powers(start, corners[:, 0, 1], *lengths)
    unknown = (batch_powers < 0) | (length_powers < 0)
    batch_powers[unknown] = length_powers[unknown] = 0
    taller, longer = Fraction(batches[-1], batches[0]), Fraction(lengths[1], lengths[0])
    over = _table(taller.numerator)[batch_powers] * _table(longer.numerator)[length_powers]
    under = _table(taller.denominator)[batch_powers] * _table(longer.denominator)[length_powers]
    between = np.flatnonzero(unknown | (start * over != corners[:, -1, 1] * under))
    batch_powers[between] = length_powers[between] = 0
    # Lines through four corners are believed for small things only: a large storage that is no product is not understood.
    if corners[between].sum() > _MOST_UNEXPLAINED * corners.sum():
        raise NotAProductError
    return ShapedTrace(base, batches, lengths, batch_powers, length_powers, corners[between], between)


def _same_events(base: Columns, other: Trace) -> Ints:
    if other.events != base.events.tolist():
        raise NotAProductError
    return Columns.of(other).sizes


def _continued(base: Columns, beginnings: list[Trace]) -> list[Ints]:
    """The sizes of whole traces at other shapes, from their beginnings."""
    for beginning in beginnings:
        if beginning.events != base.events[: len(beginning.events)].tolist():
            raise NotAProductError
    sizes = [Columns.of(beginning).sizes for beginning in beginnings]
    sources = _first_micro_batch(base, np.stack(sizes, axis=1))
    return [np.where(sources < 0, base.sizes, each[sources]) for each in sizes]


def _first_micro_batch(base: Columns, grown: Ints) -> Ints:
    """For every storage the one of the first micro-batch that it repeats, or grows like; -1 in clipping and the optimizer.

    `grown` are the sizes of those at the other shapes. The second step repeats the first, storage by storage, and so does the second
    micro-batch, but for places where it adds to gradients: there storages are known by their operator and size, and where that is not
    enough to say how they grow, nothing is said.
    """
    addresses, known = addresses_of(base), len(grown)
    number_of = {address: number for number, address in enumerate(addresses)}
    rounds = (max(address.round for address in addresses) + 1) // 2
    looks = list(zip(base.operators.tolist(), base.sizes.tolist(), strict=True))
    same = _by_place(addresses, looks)
    alike = _alike(addresses[:known], looks, grown)
    sources = list(range(known))
    for number in range(known, len(addresses)):
        address = addresses[number]
        if address.phase in {"clip", "optimizer"}:
            sources.append(-1)
            continue
        if address.phase not in {"forward", "backward"}:
            raise _NotPeriodicError
        twin = number_of.get(address._replace(round=max(0, address.round - rounds)))
        if address.round < rounds and same.get(address[:3]) != same.get((address.phase, 0, address.layer)):
            twin = alike.get((address.phase, *looks[number]), -1)
        source = sources[twin] if twin is not None and 0 <= twin < number else -1
        if source < 0 or looks[source] != looks[number]:
            raise _NotPeriodicError
        sources.append(source)
    return np.array(sources, dtype=np.int64)


def _by_place(addresses: list[Address], looks: list[tuple[int, int]]) -> dict[tuple[object, ...], list[tuple[int, int]]]:
    """What is born in each place, in order."""
    found: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for address, look in zip(addresses, looks, strict=True):
        found.setdefault(address[:3], []).append(look)
    return found


def _alike(addresses: list[Address], looks: list[tuple[int, int]], grown: Ints) -> dict[tuple[str, int, int], int]:
    """A storage for every operator and size of the first micro-batch; -1 where storages that look the same grow differently."""
    found: dict[tuple[str, int, int], int] = {}
    for number, address in enumerate(addresses):
        key = address.phase, *looks[number]
        before = found.setdefault(key, number)
        if before >= 0 and (grown[before] != grown[number]).any():
            found[key] = -1
    return found


def _powers(start: Ints, grown: Ints, low: int, high: int) -> Ints:
    """The power of a dimension that grew from `low` to `high`, for every storage; -1 for none."""
    powers = np.full(len(start), -1, dtype=np.int64)
    for power in _POWERS:
        powers[grown * low**power == start * high**power] = power
    return powers


def _table(base: int) -> Ints:
    return np.array([base**power for power in sorted(_POWERS)], dtype=np.int64)
