"""`brim.budget`: what a micro-batch may need and how long it takes, as functions of its padded shape, from the memory and speed models.

A slicer asks for the cost of a hundred thousand shapes at a time, and a replay of the allocator takes a twentieth of a second. So some
thirty shapes are replayed, most of them near the limit, where the answer matters, and a polynomial is laid over them
(`brim.step.fitting`). With a probe, what was measured stands for all of that.

The allocator's segments make the real figure uneven by a few percent. The polynomial is therefore raised until no shape that was replayed
near the limit is understated, nor any other by more than `MOST_UNDERSTATED`. Shapes that were not replayed may be off by a little more;
the margin is there for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from brim.errors import OutOfMemoryError, UsageError
from brim.locale import _
from brim.memory.compatibility import check, check_module
from brim.memory.family import MULTIPLE, has_family, length_class
from brim.memory.footprint import Footprint
from brim.planner.option import Option, Sampler
from brim.planner.probed import check_structure
from brim.planner.rates import rates_of
from brim.planner.request import Request, make_request
from brim.sizes import format_bytes
from brim.step.budget import Budget, Cost, FloatArray
from brim.step.exchange import travels
from brim.step.fitting import BEYOND, LargestOf, Shape, fit, raised
from brim.step.measured import measured_budget
from brim.workload.settings import read_settings

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch import nn

    from brim.machine.records import GPU
    from brim.planner.measured import Measured
    from brim.records import Measurement
    from brim.speed.step import StepSpeed
    from brim.workload.resolve import Model

_MOST_SEQUENCES: Final = 4096
"""In a micro-batch that is looked at; beyond, the polynomial goes on."""
_GROWTH: Final = 4
_CHECKS: Final = 3
"""Rounds in which the largest micro-batches that a cost allows are predicted themselves."""
_TOLERATED: Final = 1.005
_ALONE_MATTERS: Final = 0.7
"""Of the limit: where one sequence of the longest needs less, nobody asks how much less it needs alone."""
_LEAST_LENGTHS: Final = 3


@travels
@dataclass(frozen=True)
class AloneOrSeveral:
    """One sequence alone needs less than the others say of it, where several have to be copied or repeated."""

    alone: LargestOf
    several: LargestOf

    def __call__(self, count: Any, *lengths: Any) -> FloatArray:
        """The cost of `count` sequences padded to these lengths."""
        several = self.several(count, *lengths)
        return np.where(np.asarray(count) > 1, several, np.minimum(several, self.alone(count, *lengths)))


def budget(
    model: str | os.PathLike[str] | Model | nn.Module,
    *,
    gpu: GPU | str | None = None,
    memory: int | str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    margin: str | float | None = None,
    probe: str | os.PathLike[str] | Measurement | None = None,
    step: Callable[[nn.Module, int, int], Any] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    **settings: Any,
) -> Budget:
    """What a micro-batch of this model may need on this device, for `brim.steps` and the trainers.

    All arguments are those of `brim.estimate`, and `margin` is that of `brim.plan`. A micro-batch whose cost is within the limit is
    predicted to fit beside the margin, whatever its shape. It is one of several in its step, so gradients of others are there, unless
    `accumulation=1` says that it is the only one. With `probe`, the result of `brim probe` or its file, costs are as measured there.
    """
    if "micro_batch" in settings:
        raise UsageError(_("A budget is for micro-batches of every size: leave micro_batch out."))
    read_settings({name: value for name, value in settings.items() if value is not None})
    request = make_request(
        model, gpu=gpu, memory=memory, device=device, margin=margin, probe=probe, step=step, trust_remote_code=trust_remote_code,
        cache=cache, **settings,
    )  # fmt: skip
    question, room = request.question, request.room_bytes
    check(question.settings, question.config, question.where.gpu)
    if question.config is None:
        check_module(question.given, has_step=step is not None or probe is not None)
    accumulation = 1 if request.accumulation == 1 else 2
    if request.measured is not None:
        return _measured(request, request.measured, accumulation)
    lines = {lengths: _footprint(request, accumulation, lengths) for lengths in _grid(request)}
    points = {(count, *lengths): size for lengths, line in lines.items() for count, size in _around(line, room).items()}
    cost = _bytes_of(lines, points, room)
    for _round in range(_CHECKS):
        missed = _missed(lines, cost, room)
        if not missed.keys() - points.keys():
            break
        points |= missed
        cost = _bytes_of(lines, points, room)
    for line in lines.values():
        line.keep()
    _check_anything_fits(request, cost)
    because = _("Predicted for {device}: {limit} beside a margin of {margin}, from {count} shapes.").format(
        device=request.where.label, limit=format_bytes(room), margin=format_bytes(request.margin.bytes), count=len(points)
    )
    return Budget(cost, room, _seconds_of(request, lines, points), because=because)


def _measured(request: Request, measured: Measured, accumulation: int) -> Budget:
    """As a probe has it, for the structure that was probed."""
    measurement, accumulates = measured.measurement, accumulation > 1
    check_structure(measurement, request.base)
    ran = [each.accumulates for each in measurement.trials] + [each.accumulates for each in measurement.points]
    if accumulates and measurement.gradient_bytes is None and not all(ran):
        measurement = measured.evidence(_gradient_bytes(request))
    return measured_budget(
        measurement, limit_bytes=request.where.limit_bytes, margin_bytes=request.margin.bytes, accumulates=accumulates
    )


def _gradient_bytes(request: Request) -> int:
    model = request.question.model
    if request.question.config is None and request.question.step is None:
        # A module that was probed with the data's own loss needs no step to say what trains.
        return sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    return Option(request, request.base, Sampler(request), rates_of(request.where, request.host_cores)).gradient_bytes


def _footprint(request: Request, accumulation: int, lengths: Shape) -> Footprint:
    """All micro-batches of sequences of this length."""
    changed: dict[str, Any] = dict(zip(("seq_len", "target_len"), lengths, strict=False))
    return Footprint(replace(request.question, settings=replace(request.base, accumulation=accumulation, **changed)))


def _check_anything_fits(request: Request, cost: Cost) -> None:
    targets = (1,) if request.base.target_len is not None else ()
    least = int(cost(1, 1, *targets))
    if least <= request.room_bytes:
        return
    text = _(
        "{model} does not fit on {device}: without any tokens it needs {least}, {missing} more than the {room} that there are."
    )
    raise OutOfMemoryError(
        text.format(
            model=request.question.name,
            device=request.where.label,
            least=format_bytes(least),
            missing=format_bytes(least - request.room_bytes),
            room=format_bytes(request.room_bytes),
        ),
        hint=_("A larger GPU, a smaller model, or less that trains: --method lora or qlora. brim plan says what would fit."),
    )


def _grid(request: Request) -> list[Shape]:
    """Lengths to look at, the longest first."""
    sources = _lengths(request)
    longest = request.base.target_len
    if longest is None:
        return [(source,) for source in sources]
    # Every length of the targets is a trace of its own: two must do.
    return [(source, target) for target in (longest, -(-longest // 4)) for source in sources]


def _lengths(request: Request) -> list[int]:
    """Multiples of what families know, so that most share one trace; where positions end before that, parts of the longest."""
    config, target, longest = request.question.config, request.where.target, request.length
    top = max(2, -(-longest // MULTIPLE))
    above, up_to = length_class(config, target, longest) if config is not None else (0, 0)
    if top * MULTIPLE > up_to:
        return sorted({longest, *(-(-longest // part) for part in (2, 4))}, reverse=True)
    # The first of the class of the longest comes with its trace.
    multiples = {top, max(1, top // 2), max(1, top // 4), 1, min(top, above // MULTIPLE + 1)}
    lengths = sorted((MULTIPLE * multiple for multiple in multiples), reverse=True)
    for length in lengths[1:]:
        # Alone in its class, it would need a trace of its own.
        if len(lengths) > _LEAST_LENGTHS and not has_family(_footprint(request, 2, (length,)).question.setup(), target):
            lengths.remove(length)
    return lengths


def _bytes_of(lines: dict[Shape, Footprint], points: dict[Shape, int], room: int) -> LargestOf | AloneOrSeveral:
    """The predicted bytes of the device at the peak."""
    several = raised(fit(points, room), points, room)
    if several(1, *next(iter(lines))) <= _ALONE_MATTERS * room:
        return several
    singles = {(1, *lengths): line.device_bytes(1) for lengths, line in lines.items()}
    return AloneOrSeveral(raised(fit(singles, room), singles, room), several)


def _missed(lines: dict[Shape, Footprint], cost: Cost, room: int) -> dict[Shape, int]:
    """The largest micro-batch of each length that the cost allows, where it needs more than there is: scratch of kernels has thresholds."""
    found = {}
    for lengths, line in lines.items():
        allowed = np.flatnonzero(cost(np.arange(1, _MOST_SEQUENCES + 1), *lengths) <= room)
        if not len(allowed):
            continue
        count = int(allowed[-1]) + 1
        needed = line.device_bytes(count, limit=int(BEYOND * room))
        if needed > _TOLERATED * room:
            found[(count, *lengths)] = needed
    return found


def _around(footprint: Footprint, room: int) -> dict[int, int]:
    """Micro-batches up to the limit, and what they need: more and more, then nearer. One sequence as the others say of it."""
    counts = [2]
    needed = {1: footprint.alone_at_most(), 2: footprint.device_bytes(2)}
    while needed[counts[-1]] <= room and counts[-1] < _MOST_SEQUENCES:
        counts.append(counts[-1] * _GROWTH)
        needed[counts[-1]] = footprint.device_bytes(counts[-1], limit=int(BEYOND * room))
    if needed[counts[-1]] > room and len(counts) > 1:
        low, high = counts[-2:]
        share = (room - needed[low]) / (needed[high] - needed[low])
        most = min(high - 1, low + int(share * (high - low)))
        for count in {most, (low + most) // 2} - set(counts):
            needed[count] = footprint.device_bytes(count, limit=int(BEYOND * room))
    elif len(counts) == 1:
        needed[3] = footprint.device_bytes(3)
    return {count: size for count, size in needed.items() if count <= 3 or size <= BEYOND * room}


def _seconds_of(request: Request, lines: dict[Shape, Footprint], points: dict[Shape, int]) -> Cost:
    """What one more micro-batch adds to a step; where nothing is known of the device's speed, padded tokens."""
    gpu = request.where.gpu
    if gpu is None or not gpu.dense_flops:
        return Budget.tokens(1).seconds
    speeds = {lengths: _speed(request, line) for lengths, line in lines.items()}
    seconds = {shape: speeds[shape[1:]].micro_batch_seconds(shape[0]) for shape in points}
    return fit(seconds, max(seconds.values()))


def _speed(request: Request, line: Footprint) -> StepSpeed:
    """Of a step whose sequences have the length of this line."""
    settings = line.question.settings
    sequences = settings.micro_batch * settings.accumulation * settings.ranks
    request = replace(request, question=line.question, accumulation=settings.accumulation, effective_batch=sequences)
    option = Option(request, settings, Sampler(request), rates_of(request.where, request.host_cores))
    option.trace()
    return option.speed
