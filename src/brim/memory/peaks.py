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

from brim.memory.allocator import EMPTY_CACHE_BYTES, Block, CachingAllocator
from brim.memory.scratch import resolve
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
        if trace.births[max(event, ~event)].size == EMPTY_CACHE_BYTES:
            allocator.give_back()
        elif event >= 0:
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


_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


def on_card(trace: Trace, around: Outside) -> Trace:
    """The requests as the card's allocator gets them: with kernel scratch, cuBLAS workspaces and a third step."""
    return with_third_step(with_workspaces(resolve(trace, around.card), around))


def with_workspaces(trace: Trace, around: Outside) -> Trace:
    """Add cuBLAS workspaces: allocated at the first matrix product of forward and of backward, after its result, and never freed."""
    births, events, places = list(trace.births), list(trace.events), list(trace.event_places)
    for phase in ("backward", "forward")[-around.workspaces :]:
        inside = [at for at, place in enumerate(places) if trace.places[place].phase == phase]
        if not inside:
            continue
        first = next((at for at in inside if events[at] >= 0 and births[events[at]].operator in _PRODUCTS), None)
        position = inside[0] if first is None else first + 1
        place = places[inside[0] if first is None else first]
        births.append(Birth(around.workspace_bytes, "cublas", place, "workspace"))
        events.insert(position, len(births) - 1)
        places.insert(position, place)
    return replace(trace, births=births, events=events, event_places=places)


def with_third_step(trace: Trace) -> Trace:
    """Repeat the second step: the first step ran before the optimizer state existed, so the allocator reaches a steady state only later.

    The events of the third step have the places of the second. Storages of the previous step that are freed in it are those that the
    previous step left behind. If the two steps do not correspond, the stream is returned unchanged.
    """
    first = first_round_of_second_step(trace)
    places = [trace.places[place] for place in trace.event_places]
    start = next((at for at, place in enumerate(places) if place.phase == "forward" and place.round >= first), None)
    if start is None:
        return trace
    is_built = [trace.places[birth.place].phase == "build" for birth in trace.births]
    end = next(
        (
            at
            for at in range(start, len(places))
            if places[at].phase == "evaluation" or (trace.events[at] < 0 and is_built[~trace.events[at]])
        ),
        len(places),
    )
    step = trace.events[start:end]
    born = {event for event in step if event >= 0}
    died = {~event for event in step if event < 0}
    left = [event for event in step if event >= 0 and event not in died]
    inherited = [~event for event in step if event < 0 and ~event not in born]
    if len(left) != len(inherited) or any(place.phase == "build" for place in places[start:end]):
        return trace
    births = list(trace.births)
    again = dict(zip(inherited, left, strict=True))
    for number in sorted(born):
        again[number] = len(births)
        births.append(births[number])
    repeated = [again[event] if event >= 0 else ~again[~event] for event in step]
    later = {number: again[number] for number in left}  # storages freed after the steps are those that the third step left behind
    rest = [event if event >= 0 or ~event not in later else ~later[~event] for event in trace.events[end:]]
    where = trace.event_places
    return replace(
        trace,
        births=births,
        events=[*trace.events[:end], *repeated, *rest],
        event_places=[*where[:end], *where[start:end], *where[end:]],
    )


def requests_of(trace: Trace) -> list[tuple[int, ...]]:
    """The stream as the allocator's requests: `(id, bytes)` asks, `(-1 - id,)` frees."""
    return [(event, trace.births[event].size) if event >= 0 else (event,) for event in trace.events]
