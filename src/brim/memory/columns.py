"""A trace as arrays: one row a storage, one row an event. What is done to thousands of events at once is done here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from brim.memory.stream import Birth, Place, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """The same as `Trace`, column by column."""

    sizes: Ints
    """Bytes of each storage."""
    operators: Ints
    """Of each storage: index into `names`; so are `kinds`."""
    kinds: Ints
    birth_places: Ints
    """Of each storage: index into `places`."""
    events: Ints
    """`k` for the birth of storage `k`, `~k` for its death."""
    event_places: Ints
    names: tuple[str, ...]
    places: tuple[Place, ...] = field(repr=False)

    @classmethod
    def of(cls, trace: Trace) -> Columns:
        """The columns of a trace."""
        numbers: dict[str, int] = {}

        def number(name: str) -> int:
            return numbers.setdefault(name, len(numbers))

        births = trace.births
        return cls(
            sizes=_column(birth.size for birth in births),
            operators=_column(number(birth.operator) for birth in births),
            kinds=_column(number(birth.kind) for birth in births),
            birth_places=_column(birth.place for birth in births),
            events=_column(trace.events),
            event_places=_column(trace.event_places),
            names=tuple(numbers),
            places=tuple(trace.places),
        )

    def trace(self, sizes: Ints | None = None) -> Trace:
        """As a trace again, with other sizes if they are given."""
        names = self.names
        rows = zip(
            (self.sizes if sizes is None else sizes).tolist(),
            self.operators.tolist(),
            self.birth_places.tolist(),
            self.kinds.tolist(),
            strict=True,
        )
        births = [Birth(size, names[operator], place, names[kind]) for size, operator, place, kind in rows]
        return Trace(births, self.events.tolist(), self.event_places.tolist(), list(self.places))

    def storages(self) -> Ints:
        """The storage of each event."""
        return np.where(self.events >= 0, self.events, ~self.events)

    def live(self, sizes: Ints) -> Ints:
        """Bytes alive after each event, if storages have these sizes."""
        changes = sizes[self.storages()]
        live: Ints = np.cumsum(np.where(self.events >= 0, changes, -changes))
        return live


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
