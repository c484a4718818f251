"""From a setup and a target to peaks: a few layers traced, made deep, and replayed through the allocator.

`trace_deep` gives the stream of births and deaths of the whole model; `predict` says what that stream takes: the bytes alive at the peak by
kind and by phase, the blocks that the caching allocator hands out, the segments that it takes from the device, and the smallest limit
under which the step survives. On the CPU there is no caching allocator, and reserved equals allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from brim.memory.allocator import Replay, replay, smallest_surviving_limit
from brim.memory.depth import deep_facts, inserted_layers, shallow
from brim.memory.layers import NotRepeatedError, deepen
from brim.memory.reference import Traced, trace_step

if TYPE_CHECKING:
    from brim.memory.setup import Setup, Target
    from brim.memory.stream import Trace


@dataclass(frozen=True)
class Peaks:
    """What a step takes."""

    live_bytes: int
    """Most bytes of tensors alive at once, as they were asked for."""
    allocated_bytes: int
    reserved_bytes: int
    surviving_limit_bytes: int
    """The smallest limit of the device under which the allocator serves every request."""
    phase: str
    """Where the peak is."""
    by_phase: dict[str, int]
    """Live bytes, in the second step."""
    by_kind: dict[str, int]
    """Live bytes at the peak."""


def predict(traced: Traced, target: Target) -> Peaks:
    """The peaks of a step in steady state: its second run, when the optimizer's state exists."""
    trace = traced.trace
    first = _first_of_second_step(trace)
    by_phase: dict[str, int] = {}
    for place, live in trace.peaks().items():
        if place.phase != "build" and place.round >= first:
            by_phase[place.phase] = max(by_phase.get(place.phase, 0), live)
    phase = max(by_phase, key=lambda name: by_phase[name])
    kinds = trace.alive_at_peak([phase], first_round=first)
    live = by_phase[phase]
    if target.backend == "cpu":
        return Peaks(live, live, live, live, phase, by_phase, dict(kinds))
    requests = requests_of(trace)
    taken: Replay = replay(requests)
    limit = smallest_surviving_limit(requests)
    return Peaks(live, taken.peak_allocated_bytes, taken.peak_reserved_bytes, limit, phase, by_phase, dict(kinds))


def requests_of(trace: Trace) -> list[tuple[int, ...]]:
    """The trace as the allocator's requests: `(id, bytes)` asks, `(-1 - id,)` frees."""
    return [(event, trace.births[event].size) if event >= 0 else (event,) for event in trace.events]


def trace_deep(setup: Setup, target: Target) -> Traced:
    """Trace a model by a few of its layers, and repeat them; whole, where its layers do not all do the same."""
    reduced, removed = shallow(setup)
    if not any(removed):
        return trace_step(setup, target)
    traced = trace_step(reduced, target)
    trace = traced.trace
    try:
        inserted = inserted_layers(reduced, removed, traced)
        for template, extra in inserted:
            trace = deepen(trace, template, extra)
    except NotRepeatedError:
        return trace_step(setup, target)
    total, trainable, layers = deep_facts(traced, inserted)
    return replace(
        traced, trace=trace, total_parameters=total, trainable_parameters=trainable, layers=layers, layer_parameters=()
    )


def _first_of_second_step(trace: Trace) -> int:
    """Rounds count micro-batches over both steps: the second half is the steady state."""
    rounds = max(place.round for place in trace.places) + 1
    return rounds // 2
