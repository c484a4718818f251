"""What a step computes: floating-point operations and bytes moved, call by call, as functions of micro-batch and length.

Noted beside the births and deaths of the same trace. A call's operations are a product of its dimensions, and so is the size of each of its
operands, so the few small traces of a family tell them for every shape. Layers that were not traced count by how often their like runs.
Which device does how much of this in a second is no matter of this room: see `brim.speed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from brim.memory.stream import Place, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PHASES = ("forward", "backward", "optimizer")
"""Recomputation under checkpointing is part of backward, clipping part of the optimizer."""
FORMATS = ("fp32", "half", "int8")
"""Numbers that a call multiplies in."""
_PHASE_OF = {"forward": 0, "backward": 1, "clip": 2, "optimizer": 2}
_MOST_POWER = 2


class Call(NamedTuple):
    """One call of one operator, as it was traced."""

    operator: str
    place: int
    """Index into the trace's places."""
    format: int
    """Index into `FORMATS`."""
    flops: int
    operands: tuple[int, ...]
    """Bytes of every tensor that is read or written."""


@dataclass(frozen=True)
class Work:
    """The calls of one step: forward and backward of one micro-batch, then one optimizer step."""

    operators: tuple[str, ...]
    """Of each call."""
    phases: Ints
    formats: Ints
    times: Floats
    """How often each call runs: layers that were not traced count here."""
    flops: Floats
    flops_growth: Ints
    """Powers of batch and length by which the operations grow: [calls, 2]."""
    operand_calls: Ints
    """Of each operand: its call."""
    operand_bytes: Floats
    operand_growth: Ints
    batch: int
    length: int
    """The shape of the figures above."""

    def flops_at(self, batch: float, length: float) -> Floats:
        """Operations of one run of each call."""
        return self.flops * self._grown(self.flops_growth, batch, length)

    def bytes_at(self, batch: float, length: float) -> Floats:
        """Bytes that one run of each call reads and writes."""
        sizes = self.operand_bytes * self._grown(self.operand_growth, batch, length)
        return np.asarray(np.bincount(self.operand_calls, weights=sizes, minlength=len(self.operators)), dtype=np.float64)

    def total_flops(self, batch: float, length: float) -> float:
        """Operations of forward and backward of a micro-batch and an optimizer step together."""
        return float((self.flops_at(batch, length) * self.times).sum())

    def _grown(self, growth: Ints, batch: float, length: float) -> Floats:
        taller, longer = (np.array([base**power for power in range(_MOST_POWER + 1)]) for base in self._factors(batch, length))
        return np.asarray(taller[growth[:, 0]] * longer[growth[:, 1]], dtype=np.float64)

    def _factors(self, batch: float, length: float) -> tuple[float, float]:
        return batch / self.batch, length / self.length

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """For `numpy.savez`."""
        names = sorted(set(self.operators))
        known = {name: index for index, name in enumerate(names)}
        return {
            "work_names": np.frombuffer("\n".join(names).encode(), dtype=np.uint8),
            "work_operators": np.array([known[name] for name in self.operators], dtype=np.uint16),
            "work_shape": np.array([self.batch, self.length]),
            **{f"work_{name}": getattr(self, name) for name in _FLOATS},
            **{f"work_{name}": getattr(self, name).astype(np.int32) for name in _INTS},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Work:
        """From what `to_arrays` gave; KeyError or ValueError if it is something else."""
        names = arrays["work_names"].tobytes().decode().split("\n")
        batch, length = arrays["work_shape"].tolist()
        return cls(
            operators=tuple(names[index] for index in arrays["work_operators"].tolist()),
            batch=batch,
            length=length,
            **{name: arrays[f"work_{name}"].astype(np.float64) for name in _FLOATS},  # type: ignore[arg-type]
            **{name: arrays[f"work_{name}"].astype(np.int64) for name in _INTS},  # type: ignore[arg-type]
        )


_FLOATS = ("times", "flops", "operand_bytes")
_INTS = ("phases", "formats", "flops_growth", "operand_calls", "operand_growth")


class Shallow(NamedTuple):
    """One traced shape: the calls, and where they stand."""

    batch: int
    length: int
    calls: Sequence[Call]
    places: Sequence[Place]


def understand(shapes: Sequence[Shallow], repeats: Mapping[int | None, int], optimizer_times: float) -> Work:
    """The work of every shape, from a few of them; the first must hold the optimizer's calls too.

    `repeats` says how often each layer really runs (others once), `optimizer_times` how much more trains than was traced.
    Where the calls of the shapes do not match one to one, those of the first are taken to grow with the tokens.
    """
    first = shapes[0]._replace(calls=_steady(shapes[0]))
    shapes = [first, *(each._replace(calls=_running(each)) for each in shapes[1:])]
    calls = first.calls
    places = [first.places[call.place] for call in calls]
    phases = np.array([_PHASE_OF[place.phase] for place in places], dtype=np.int64)
    repeated = [
        optimizer_times if phase == 2 else repeats.get(place.layer, 1) for phase, place in zip(phases, places, strict=True)
    ]
    flops = np.array([call.flops for call in calls], dtype=np.float64)
    operand_calls = np.repeat(np.arange(len(calls)), [len(call.operands) for call in calls])
    operands = np.array([size for call in calls for size in call.operands], dtype=np.float64)
    flops_growth, operand_growth = _growths(shapes, phases, flops, operands)
    return Work(
        operators=tuple(call.operator for call in calls),
        phases=phases,
        formats=np.array([call.format for call in calls], dtype=np.int64),
        times=np.array(repeated, dtype=np.float64),
        flops=flops,
        flops_growth=flops_growth,
        operand_calls=operand_calls,
        operand_bytes=operands,
        operand_growth=operand_growth,
        batch=first.batch,
        length=first.length,
    )


def work_of(traces: dict[tuple[int, int], Trace], inserted: tuple[tuple[int, int], ...], optimizer_times: float) -> Work:
    """What the traced shapes, the first of them whole, say of all shapes; the layers that were not traced are counted.

    `inserted` are layers and how many more like each, `optimizer_times` how much more trains than was traced.
    """
    repeats: dict[int | None, int] = {}
    before = 0
    for template, extra in inserted:
        repeats[template - before] = 1 + extra
        before += extra
    shapes = [Shallow(*shape, trace.calls, trace.places) for shape, trace in traces.items()]
    return understand(shapes, repeats, optimizer_times)


def _running(shape: Shallow) -> list[Call]:
    return [call for call in shape.calls if _PHASE_OF[shape.places[call.place].phase] < 2]


def _steady(shape: Shallow) -> list[Call]:
    """Forward, backward, and the last optimizer step: the first also makes its state."""
    after = [call for call in shape.calls if _PHASE_OF[shape.places[call.place].phase] == 2]
    last = max((shape.places[call.place].round for call in after), default=0)
    return [*_running(shape), *(call for call in after if shape.places[call.place].round == last)]


def _growths(shapes: Sequence[Shallow], phases: Ints, flops: Floats, operands: Floats) -> tuple[Ints, Ints]:
    first = shapes[0]
    running = int((phases < 2).sum())
    assert (phases[:running] < 2).all(), "the optimizer's calls come last"
    sizes = sum(len(call.operands) for call in first.calls[:running])
    growths = []
    for axis in (0, 1):
        other = next((each for each in shapes[1:] if _grew(first, each) == axis), None)
        flops_powers, operand_powers = np.zeros(len(flops), dtype=np.int64), np.zeros(len(operands), dtype=np.int64)
        factor = (other.batch / first.batch, other.length / first.length)[axis] if other is not None else 1.0
        if other is not None and _is_the_same(other.calls, first.calls[:running]):
            grown = np.array([call.flops for call in other.calls], dtype=np.float64)
            flops_powers[:running] = _power(flops[:running], grown, factor)
            grown = np.array([size for call in other.calls for size in call.operands], dtype=np.float64)
            operand_powers[:sizes] = _power(operands[:sizes], grown, factor)
        else:
            flops_powers[:running] = 1
            operand_powers[:sizes] = 1
        growths.append((flops_powers, operand_powers))
    (batch_flops, batch_operands), (length_flops, length_operands) = growths
    return np.stack([batch_flops, length_flops], axis=1), np.stack([batch_operands, length_operands], axis=1)


def _grew(one: Shallow, other: Shallow) -> int | None:
    """Which of batch (0) and length (1) alone differs."""
    differs = one.batch != other.batch, one.length != other.length
    return differs.index(True) if sum(differs) == 1 else None


def _is_the_same(calls: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether two shapes ran the same operators on as many operands."""
    return len(calls) == len(others) and all(
        call.operator == other.operator and len(call.operands) == len(other.operands)
        for call, other in zip(calls, others, strict=True)
    )


def _power(start: Floats, grown: Floats, factor: float) -> Ints:
    """The nearest whole power by which amounts grew."""
    ratio = np.where(start > 0, grown / np.maximum(start, 1.0), 1.0)
    powers = np.rint(np.log(np.maximum(ratio, 1e-9)) / np.log(factor)).astype(np.int64)
    return np.asarray(np.clip(powers, 0, _MOST_POWER))
