"""From a setup and a target to peaks: a few layers traced, made deep, and replayed through the allocator.

`trace_deep` gives the stream of births and deaths of the whole model; `predict` says what that stream takes: the bytes alive at the peak by
kind and by phase, the blocks that the caching allocator hands out, the segments that it takes from the device, and the smallest limit
under which the step survives. On the CPU there is no caching allocator, and reserved equals allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from brim.memory.allocator import Replay, replay, smallest_surviving_limit
from brim.memory.building import build_model
from brim.memory.layers import NotRepeatedError, deepen
from brim.memory.reference import Traced, trace_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.memory.setup import Setup, Target
    from brim.memory.stream import Trace

# How config files call the depth of a stack of layers; an encoder-decoder has one name of each kind.
_ONE_STACK = ("num_hidden_layers", "n_layer", "n_layers")
_TWO_STACKS = (("num_layers", "num_decoder_layers"), ("encoder_layers", "decoder_layers"))
_SHALLOW = 4
_TEMPLATE = 1


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
    reduced, stacks = shallow(setup)
    if not any(stacks):
        return trace_step(setup, target)
    traced = trace_step(reduced, target)
    trace, template, layers = traced.trace, _TEMPLATE, traced.layers
    try:
        for extra in stacks:
            trace = deepen(trace, template, extra)
            template += _SHALLOW + extra
    except NotRepeatedError:
        return trace_step(setup, target)
    counts = _deep_counts(setup)
    return Traced(trace, traced.kernels, counts[0], counts[1], layers + sum(stacks))


def shallow(setup: Setup) -> tuple[Setup, tuple[int, ...]]:
    """The setup with at most four layers a stack, and how many were taken out of each stack."""
    keys = _depth_keys(setup.config)
    if not keys:
        return setup, ()
    depths = [int(setup.config[key]) for key in keys]
    removed = tuple(max(0, depth - _SHALLOW) for depth in depths)
    config: dict[str, Any] = dict(setup.config)
    for key, depth, fewer in zip(keys, depths, removed, strict=True):
        config[key] = depth - fewer
    # What is listed layer by layer is cut with them.
    for key, value in setup.config.items():
        if isinstance(value, list | tuple) and len(keys) == 1 and len(value) == depths[0]:
            config[key] = list(value[: config[keys[0]]])
    return replace(setup, config=config), removed


def _depth_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    for pair in _TWO_STACKS:
        if all(isinstance(config.get(key), int) for key in pair):
            return pair
    return next(((key,) for key in _ONE_STACK if isinstance(config.get(key), int)), ())


def _deep_counts(setup: Setup) -> tuple[int, int]:
    """Parameters of the deep model, all and trainable: counted on a module that takes no memory."""
    model = build_model(setup)
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return sum(parameter.numel() for parameter in parameters), trainable


def _first_of_second_step(trace: Trace) -> int:
    """Rounds count micro-batches over both steps: the second half is the steady state."""
    rounds = max(place.round for place in trace.places) + 1
    return rounds // 2
