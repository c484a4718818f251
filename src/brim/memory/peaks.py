"""What a stream of births and deaths takes: blocks, segments, and the moment when most is held.

On a GPU every request goes through the caching allocator (`brim.memory.allocator`), and kinds and phases are counted in the blocks that it
hands out, so that they add up to what torch's counters show. On the CPU there is no caching allocator: a request is its own block,
and reserved equals allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from brim.memory.allocator import Block, CachingAllocator
from brim.memory.stream import Birth, Place, Trace

if TYPE_CHECKING:
    from brim.memory.outside import Outside

_PHASES = {"clip": "optimizer", "build": "forward"}
"""Phases of the trace that the outside world does not tell apart: clipping is a part of the optimizer's step."""


@dataclass(frozen=True)
class Walk:
    """A stream from its first event to its last."""

    trace: Trace
    blocks: NDArray[np.int64]
    """Bytes of the block that each storage got."""
    allocated: NDArray[np.int64]
    """After each event."""
    reserved: NDArray[np.int64]

    def peak_event(self) -> int:
        """The first event of the second step, the steady state, at which most is allocated."""
        return int(np.argmax(np.where(self._steady(), self.allocated, -1)))

    def peak_bytes(self) -> int:
        """Most that is allocated in steady state."""
        return int(self.allocated[self.peak_event()])

    def peak_phase(self) -> str:
        """The phase of that event."""
        return phase_of(self.trace.places[self.trace.event_places[self.peak_event()]])

    def by_kind(self, event: int) -> dict[str, int]:
        """Bytes in use after an event, by kind, the largest first."""
        found: dict[str, int] = {}
        for number in np.flatnonzero(self._alive(event)).tolist():
            kind = self.trace.births[number].kind
            found[kind] = found.get(kind, 0) + int(self.blocks[number])
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def largest(self, event: int, count: int) -> list[tuple[Birth, int]]:
        """The largest storages alive after an event, with their blocks."""
        alive = np.flatnonzero(self._alive(event))
        order = alive[np.argsort(-self.blocks[alive], kind="stable")][:count]
        return [(self.trace.births[number], int(self.blocks[number])) for number in order.tolist()]

    def by_phase(self) -> dict[str, int]:
        """Most bytes allocated in each phase, in steady state: the second step, when the optimizer's state exists."""
        places = np.array(self.trace.event_places, dtype=np.int64)
        first = first_round_of_second_step(self.trace)
        found: dict[str, int] = {}
        for index, place in enumerate(self.trace.places):
            if place.phase == "build" or place.round < first:
                continue
            here = self.allocated[places == index]
            if len(here):
                name = phase_of(place)
                found[name] = max(found.get(name, 0), int(here.max()))
        order = ("forward", "backward", "optimizer", "evaluation")
        return {name: found[name] for name in order if name in found}

    def _steady(self) -> NDArray[np.bool_]:
        first = first_round_of_second_step(self.trace)
        is_steady = np.array([place.phase != "build" and place.round >= first for place in self.trace.places])
        steady: NDArray[np.bool_] = is_steady[np.array(self.trace.event_places, dtype=np.int64)]
        return steady

    def _alive(self, event: int) -> NDArray[np.bool_]:
        events = np.array(self.trace.events[: event + 1], dtype=np.int64)
        alive = np.zeros(len(self.blocks), dtype=bool)
        alive[events[events >= 0]] = True
        alive[~events[events < 0]] = False
        return alive


def phase_of(place: Place) -> str:
    """The phase as people and records name it."""
    return _PHASES.get(place.phase, place.phase)


def first_round_of_second_step(trace: Trace) -> int:
    """Rounds count micro-batches over both steps: the second half is the steady state."""
    return (max(place.round for place in trace.places) + 1) // 2


def walk_plain(trace: Trace) -> Walk:
    """Every request its own block: the CPU, and the bytes that were asked for anywhere."""
    sizes = np.array([birth.size for birth in trace.births], dtype=np.int64)
    events = np.array(trace.events, dtype=np.int64)
    is_birth = events >= 0
    changes = sizes[np.where(is_birth, events, ~events)]
    allocated = np.cumsum(np.where(is_birth, changes, -changes))
    return Walk(trace, sizes, allocated, np.maximum.accumulate(allocated))


def walk_allocator(trace: Trace) -> Walk:
    """Every request through the caching allocator, which may take as much as it likes."""
    allocator = CachingAllocator()
    blocks: list[Block | None] = [None] * len(trace.births)
    sizes = [0] * len(trace.births)
    reserved = []
    allocated = []
    for event in trace.events:
        if event >= 0:
            block = allocator.allocate(trace.births[event].size)
            blocks[event] = block
            sizes[event] = block.size
        else:
            freed = blocks[~event]
            assert freed is not None
            allocator.release(freed)
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Walk(trace, np.array(sizes, np.int64), np.array(allocated, np.int64), np.array(reserved, np.int64))


def with_workspaces(trace: Trace, around: Outside) -> Trace:
    """The stream with cuBLAS's workspaces in it: made at the first product of forward and of backward, and never given back."""
    births, events, places = list(trace.births), list(trace.events), list(trace.event_places)
    for phase in ("backward", "forward")[-around.workspaces :]:
        position = next((at for at, place in enumerate(places) if trace.places[place].phase == phase), None)
        if position is not None:
            births.append(Birth(around.workspace_bytes, "cublas", places[position], "workspace"))
            events.insert(position, len(births) - 1)
            places.insert(position, places[position])
    return replace(trace, births=births, events=events, event_places=places)


def requests_of(trace: Trace) -> list[tuple[int, ...]]:
    """The stream as the allocator's requests: `(id, bytes)` asks, `(-1 - id,)` frees."""
    return [(event, trace.births[event].size) if event >= 0 else (event,) for event in trace.events]
