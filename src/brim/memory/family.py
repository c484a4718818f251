"""A family of configurations that differ in micro-batch and length only: traced once, by four layers and a few small shapes.

What is kept is the shallow fit, a few thousand rows; the full depth is made from it in hundredths of a second and any shape of it in
milliseconds. No torch here but in `trace_family`: a family that was traced once is read back without it.

A fit holds for lengths of one class. Kernels pad to 128, so lengths are multiples of that; and a sliding window, a chunk of attention, the
end of the positions, or a step in a CPU kernel's choice of blocks matters from some length on: a family stays on one side of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.memory.columns import Columns
from brim.memory.layers import NotRepeatedError, check_repeated
from brim.memory.shapes import ONE, SEVERAL, NotAProductError, ShapedTrace, fit
from brim.memory.stream import Place
from brim.memory.work import Work, work_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from brim.memory.allocator import Requests
    from brim.memory.setup import Setup, Target
    from brim.memory.stream import Trace

MULTIPLE = 128
"""Of which lengths must be multiples."""
_CPU_STEPS = (191, 511, 767)
"""aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: the last lengths before larger blocks are taken."""
_FORMAT = 2
_COLUMNS = ("sizes", "operators", "kinds", "birth_places", "events", "event_places")
_POWERS = ("batch_powers", "length_powers", "corners", "between")
_KEPT_BEGINNINGS = 32


@dataclass(frozen=True)
class Facts:
    """What does not change within a family."""

    kernels: tuple[str, ...]
    attention: str | None
    total_parameters: int
    trainable_parameters: int
    layers: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One structure: all but micro-batch and length."""

    shallow: ShapedTrace
    inserted: tuple[tuple[int, int], ...]
    """(layer, how many more like it), stack by stack."""
    above: int
    """The length class: longer than this ..."""
    up_to: float
    """... and at most this."""
    facts: Facts
    work: Work
    """What it computes, at any shape: lengths that are no multiple are as good, only a little less exact."""

    def covers(self, batch: int, length: int) -> bool:
        """Whether the family knows this shape."""
        short, long = self.shallow.lengths
        knows_length = length % MULTIPLE == 0 and self.above < length <= self.up_to if short < long else length == short
        return (batch == 1) == (self.shallow.batches == ONE) and knows_length

    @cached_property
    def deep(self) -> ShapedTrace:
        """All layers."""
        deep = self.shallow
        for template, extra in self.inserted:
            deep = deep.deepened(template, extra)
        return deep

    def at(self, batch: int, length: int) -> Trace:
        """The trace of one shape."""
        assert self.covers(batch, length)
        return self.deep.at(batch, length)

    def requests(self, batch: int, length: int) -> Requests:
        """One shape, ready for the caching allocator."""
        assert self.covers(batch, length)
        return self.deep.requests(batch, length)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """For `numpy.savez`: nothing that would have to be pickled."""
        shallow, base = self.shallow, self.shallow.base
        facts = {
            "format": _FORMAT,
            "names": base.names,
            "places": base.places,
            "batches": shallow.batches,
            "lengths": shallow.lengths,
            "inserted": self.inserted,
            "above": self.above,
            "up_to": None if self.up_to == inf else self.up_to,
            "facts": vars(self.facts),
        }
        arrays: dict[str, NDArray[Any]] = {name: _small(getattr(base, name)) for name in _COLUMNS}
        arrays |= {name: _small(getattr(shallow, name)) for name in _POWERS}
        return {**arrays, **self.work.to_arrays(), "json": np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Family:
        """From what `to_arrays` gave; ValueError or KeyError if it is something else."""
        facts = json.loads(arrays["json"].tobytes())
        if facts["format"] != _FORMAT:
            raise ValueError(facts["format"])
        base = Columns(
            **{name: arrays[name].astype(np.int64) for name in _COLUMNS},
            names=tuple(facts["names"]),
            places=tuple(Place(*place) for place in facts["places"]),
        )
        batches, (short, long) = tuple(facts["batches"]), facts["lengths"]
        shallow = ShapedTrace(base, batches, (short, long), **{name: arrays[name].astype(np.int64) for name in _POWERS})
        known = facts["facts"]
        return cls(
            shallow=shallow,
            inserted=tuple((template, extra) for template, extra in facts["inserted"]),
            above=facts["above"],
            up_to=inf if facts["up_to"] is None else facts["up_to"],
            facts=Facts(**{**known, "kernels": tuple(known["kernels"]), "notes": tuple(known["notes"])}),
            work=Work.from_arrays(arrays),
        )


def family_or_none(setup: Setup, target: Target) -> Family | None:
    """The family of a setup; None where its shape must be traced itself (`brim.memory.tracing.depth.trace_deep`)."""
    if setup.length % MULTIPLE:
        return None
    try:
        return trace_family(setup, target)
    except NotAProductError:
        return None


def has_family(setup: Setup, target: Target) -> bool:
    """Whether the length of a setup is one that a family can know."""
    return setup.length % MULTIPLE == 0 and _base_lengths(*length_class(setup.config, target, setup.length)) is not None


def family_of(setup: Setup, target: Target) -> Setup:
    """The setup that stands for its whole family: what a cache is asked for. Itself, where it has no family."""
    lengths = _base_lengths(*length_class(setup.config, target, setup.length))
    if setup.length % MULTIPLE or lengths is None:
        return setup
    return replace(stands_for(setup), length=lengths[0])


def stands_for(setup: Setup) -> Setup:
    """The setup that stands for its micro-batches."""
    return replace(setup, micro_batch=(ONE if setup.micro_batch == 1 else SEVERAL)[0])


def trace_family(setup: Setup, target: Target, *, one_length: bool = False) -> Family:
    """Trace a few small shapes of a few layers; of all layers, where they do not all do the same.

    `one_length`: a family of this very length, for all micro-batches. NotAProductError: the structure changes with the shape.
    """
    from brim.memory.tracing.depth import shallow

    above, up_to = length_class(setup.config, target, setup.length)
    lengths = (setup.length, setup.length) if one_length else _base_lengths(above, up_to)
    if lengths is None:
        raise NotAProductError
    reduced, removed = shallow(setup)
    try:
        return _trace(reduced, removed, target, lengths)
    except NotRepeatedError:
        return _trace(setup, (), target, lengths)


def _trace(reduced: Setup, removed: tuple[int, ...], target: Target, lengths: tuple[int, int]) -> Family:
    from brim.memory.tracing.depth import deep_facts, inserted_layers
    from brim.memory.tracing.reference import trace_step

    above, up_to = length_class(reduced.config, target, reduced.length)
    batches = ONE if reduced.micro_batch == 1 else SEVERAL
    first = trace_step(replace(reduced, micro_batch=batches[0], length=lengths[0]), target)
    inserted = inserted_layers(reduced, removed, first)
    _check(first.trace, inserted)

    traces = {(batches[0], lengths[0]): first.trace}

    def trace(batch: int, length: int) -> Trace:
        traces[batch, length] = trace_step(replace(reduced, micro_batch=batch, length=length), target).trace
        return traces[batch, length]

    def begin(batch: int, length: int) -> Trace:
        traces[batch, length] = _beginning(replace(reduced, micro_batch=batch, length=length), target)
        return traces[batch, length]

    shaped = fit(trace, lengths, batches, first=first.trace, begin=begin if reduced.evaluation_batch is None else None)
    if lengths[0] == lengths[1]:
        begin(batches[0], _another_length(reduced, up_to))  # for what it computes
    total, trainable, layers = deep_facts(first, inserted)
    facts = Facts(tuple(sorted(first.kernels)), first.attention, total, trainable, layers, first.notes)
    family = Family(shaped, inserted, above, up_to, facts, work_of(traces, inserted, trainable / first.trainable_parameters))
    assert family.deep  # made now, so that what cannot be deepened is found out here
    return family


def _check(trace: Trace, inserted: tuple[tuple[int, int], ...]) -> None:
    """Find out that layers are not repeated before other shapes are traced."""
    columns, before = Columns.of(trace), 0
    for template, extra in inserted:
        check_repeated(columns, template - before)
        before += extra


_beginnings: dict[str, Trace] = {}


def _beginning(setup: Setup, target: Target) -> Trace:
    """Forward and backward of the first step, the same for all optimizers and kept for the next one."""
    from brim.memory.tracing.reference import trace_step

    bare = replace(setup, optimizer="sgd", max_grad_norm=None, evaluation_batch=None)
    key = json.dumps([dict(vars(bare), config=dict(setup.config)), vars(target)], sort_keys=True, default=str)
    if key not in _beginnings:
        if len(_beginnings) >= _KEPT_BEGINNINGS:
            del _beginnings[next(iter(_beginnings))]
        _beginnings[key] = trace_step(bare, target, whole=False).trace
    return _beginnings[key]


def length_class(config: Mapping[str, Any], target: Target, length: int) -> tuple[int, float]:
    """The lengths among which nothing begins or ends to matter: above the first number, up to the second."""
    steps = _steps(config) | set(_CPU_STEPS if target.backend == "cpu" else ())
    return max((step for step in steps if step < length), default=0), min((step for step in steps if step >= length), default=inf)


def _steps(config: Mapping[str, Any]) -> set[int]:
    """The last lengths before something changes: a window or a chunk of attention masks, or positions end."""
    found: set[int] = set()
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _steps(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            if "window" in key or "chunk" in key or key in {"local_attention", "max_seq_len", "block_size"}:
                found |= {value - 1, value}  # whether a length that equals it is masked is not the same everywhere
            elif "position" in key:
                found.add(value)
    return found


def _base_lengths(above: int, up_to: float) -> tuple[int, int] | None:
    """Two lengths of the class to trace, as short as possible; None if it has not two."""
    short = (above // MULTIPLE + 1) * MULTIPLE
    long = 2 * short if 2 * short <= up_to else int(up_to) // MULTIPLE * MULTIPLE if up_to < inf else 0
    return (short, long) if short < long else None


def _another_length(setup: Setup, up_to: float) -> int:
    """To see what grows with the length: twice as long, unless positions end before that."""
    return 2 * setup.length if 2 * setup.length <= up_to else max(1, setup.length // 2)


def _small(column: NDArray[np.int64]) -> NDArray[Any]:
    """In as few bytes as it fits into."""
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    return column.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)))
