"""A budget from what a probe measured: bytes and seconds as functions of the padded shape.

Three things are known, and none of them bends to the polynomial that is laid through the points. A shape that a trial ran fits, and so does
every shape that is smaller in all directions. A shape at which a trial failed does not fit, and nothing does that is larger in all
directions. In between, and for many short sequences, the polynomial decides, raised until it understates no point; where
there are more tokens than in any shape that ran, no less than in proportion.

A slice of a step is one of several, so gradients of others are alive beside it. What ran as the only micro-batch of its step counts with
their bytes added, and proves a shape only if it fits with them.

Where all points have one length, nothing tells how bytes fall with it. Attention only makes shorter sequences cheaper than their share of
the tokens, so bytes that are affine in the tokens are safe, and longer sequences than those that were probed never come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from brim.errors import UsageError
from brim.locale import _, sentences
from brim.sizes import format_bytes
from brim.step.budget import Budget, Cost, FloatArray, ShapeCost
from brim.step.exchange import travels
from brim.step.fitting import MOST_PIECES, LargestOf, Shape, fit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from brim.records import Measurement

_POINTS_PER_PIECE = 4
"""A polynomial of a shape has as many coefficients."""
_MOST_BYTES: Final = 2**62
_MOST_SIZE: Final = 10**6
"""Of a micro-batch, and of a length."""
_MOST_SECONDS: Final = 10.0**7
LEAST_SECONDS: Final = 1e-9
"""Less than this was not timed."""


@dataclass(frozen=True)
class Run:
    """A shape that ran, and what it took; `accumulates`: with gradients of another micro-batch beside it."""

    shape: Shape
    peak_bytes: int | None
    accumulates: bool


@travels
@dataclass(frozen=True)
class MeasuredCost:
    """Bytes of a shape, in agreement with every trial."""

    fitted: LargestOf
    """Understates no point."""
    limit: float
    most_tokens: int
    """In any shape that ran. Beyond them bytes grow at least in proportion, whatever the polynomial says."""
    bytes_there: float
    proven: tuple[Shape, ...] = ()
    failed: tuple[Shape, ...] = ()

    def __call__(self, count: Any, *lengths: Any) -> FloatArray:
        """The cost of `count` sequences padded to these lengths."""
        sizes = np.broadcast_arrays(*(np.asarray(each, np.float64) for each in (count, *lengths)))
        tokens = _tokens(*sizes)
        least = np.where(tokens > self.most_tokens, self.bytes_there * tokens / self.most_tokens, 0.0)
        found = np.maximum(self.fitted(*sizes), least)
        for shape in self.proven:
            found = np.where(is_within(sizes, shape), np.minimum(found, self.limit), found)
        for shape in self.failed:
            found = np.where(_is_beyond(sizes, shape), np.maximum(found, np.nextafter(self.limit, np.inf)), found)
        return np.asarray(found, np.float64)


def measured_budget(
    measurement: Measurement,
    *,
    limit_bytes: int | None = None,
    margin_bytes: int | None = None,
    accumulates: bool = True,
) -> Budget:
    """The budget that a probe has measured, see `Budget.measured`.

    `limit_bytes` and `margin_bytes` stand for the probe's own. Without `accumulates`, every micro-batch is the only one of its step.
    """
    check_plausible(measurement)
    amounts, timed = bytes_of(measurement, accumulates=accumulates), _seconds_of(measurement)
    if not amounts:
        raise UsageError(_("Nothing ran in this probe, so there is no budget in it."), hint=hint_after_nothing(measurement))
    probed, most_seen = room_of(measurement), max(bytes_of(measurement, accumulates=False).values())
    margin = measurement.margin_bytes if margin_bytes is None else margin_bytes
    limit = measurement.limit_bytes if limit_bytes is None else limit_bytes
    room = float(most_seen if limit is None else limit - margin)
    seconds = _fitted(timed, max(timed.values())) if len(timed) > 1 else Budget.tokens(1).seconds
    proven = proven_shapes(measurement, room, accumulates=accumulates)
    beside = _said_of_gradients(measurement) if accumulates else ""
    if len(amounts) == 1 and room >= (most_seen if probed is None else probed):
        shape, amount = next(iter(amounts.items()))
        if amount <= room or shape in proven:
            return _of_one_shape(shape, seconds, sentences(_said_of_one(measurement, shape), beside))
    most = max(_tokens(*shape) for shape in amounts)
    cost = MeasuredCost(
        _raised(_fitted(amounts, room), amounts),
        room,
        most,
        min(amount for shape, amount in amounts.items() if _tokens(*shape) == most),
        proven=proven,
        failed=failed_shapes(measurement, room, accumulates=accumulates),
    )
    said = _said(measurement, amounts, room, margin if limit is not None else None)
    return Budget(cost, room, seconds, because=sentences(said, beside))


def check_plausible(measurement: Measurement) -> None:
    """Refuse figures that cannot be: files are written by hand, or damaged."""
    top: list[tuple[str, Any]] = [
        (f"{name}_bytes", getattr(measurement, f"{name}_bytes")) for name in ("limit", "margin", "gradient")
    ]
    if measurement.fit is not None:
        top += [(f"fit.{name}", abs(value)) for name, value in vars(measurement.fit).items()]
    for name, value in top:
        _check_at_most(name, value, _MOST_BYTES, "2**62")
    for name in ("max_length", "target_length"):
        _check_at_most(f"workload.{name}", getattr(measurement.workload, name), _MOST_SIZE, f"{_MOST_SIZE:,}")
    for index, trial in enumerate(measurement.trials):
        _check_figures(f"trials[{index}]", vars(trial))
        if trial.verdict == "ok":
            _check_took(f"trials[{index}].peak_device_bytes", trial.peak_device_bytes)
    for index, point in enumerate(measurement.points):
        _check_figures(f"points[{index}]", vars(point))
        _check_took(f"points[{index}].peak_bytes", point.peak_bytes)


def _check_figures(where: str, fields: dict[str, Any]) -> None:
    """By what the names of the fields say that they are."""
    for name, value in fields.items():
        field = f"{where}.{name}"
        if name.endswith("_bytes"):
            _check_at_most(field, value, _MOST_BYTES, "2**62")
        elif name.endswith("seconds"):
            _check_at_most(field, value, _MOST_SECONDS, f"{_MOST_SECONDS:,.0f}")
        elif name in {"micro_batch", "sequences"} or name.endswith("length"):
            _check_at_most(field, value, _MOST_SIZE, f"{_MOST_SIZE:,}")


def _check_at_most(field: str, value: float | None, most: float, said: str) -> None:
    if value is not None and not value <= most:
        text = _("{field} of the probe is more than {most}, which cannot be.")
        raise UsageError(text.format(field=field, most=said), hint=_hint_of_damage())


def _check_took(field: str, peak_bytes: int | None) -> None:
    if peak_bytes is not None and peak_bytes <= 0:
        text = _("{field} of the probe is {value}, and whatever ran took something.")
        raise UsageError(text.format(field=field, value=peak_bytes), hint=_hint_of_damage())


def _hint_of_damage() -> str:
    return _("Such a file was not written by a probe: probe again.")


def hint_after_nothing(measurement: Measurement) -> str:
    """What to do after a probe in which nothing ran: if it was cut short, memory is not known to be the reason."""
    if not measurement.complete:
        return _("It ended before any size had run: probe again, with more time or more trials.")
    return _("Probe again, with more memory or shorter sequences.")


def room_of(measurement: Measurement) -> float | None:
    """What a step of the probe could take; None where no limit was known."""
    return None if measurement.limit_bytes is None else measurement.limit_bytes - measurement.margin_bytes


def bytes_of(measurement: Measurement, *, accumulates: bool = True) -> dict[Shape, int]:
    """The most that every shape took, padded or not. With `accumulates`, gradients are added to what ran without those of others."""
    runs = [(run.shape, run.peak_bytes, run.accumulates) for run in _runs(measurement) if run.peak_bytes is not None]
    more = most_gradient_bytes(measurement) if accumulates else 0
    beside = {shape for shape, _peak, among_others in runs if among_others}
    found: dict[Shape, int] = {}
    for shape, peak, _among_others in runs:
        found[shape] = max(found.get(shape, 0), peak if shape in beside else peak + more)
    return found


def most_gradient_bytes(measurement: Measurement) -> int:
    """Of all that trains. Where nobody has counted: every gradient was there at some peak, and its weight, which is no smaller."""
    if measurement.gradient_bytes is not None:
        return measurement.gradient_bytes
    return min((run.peak_bytes for run in _runs(measurement) if run.peak_bytes is not None), default=0) // 2


def proven_shapes(measurement: Measurement, room: float, *, accumulates: bool = True) -> tuple[Shape, ...]:
    """What trials ran with no more memory than there is now, or took no more than that.

    With `accumulates`, what ran without gradients of others is proven only if it fits with them.
    """
    probed, gradients = room_of(measurement), measurement.gradient_bytes
    enough = probed is not None and room >= probed
    found = []
    for run in _trials(measurement):
        if run.accumulates or not accumulates:
            fits = enough or (run.peak_bytes is not None and run.peak_bytes <= room)
        else:
            fits = run.peak_bytes is not None and gradients is not None and run.peak_bytes + gradients <= room
        if fits:
            found.append(run.shape)
    return tuple(found)


def failed_shapes(measurement: Measurement, room: float, *, accumulates: bool = True) -> tuple[Shape, ...]:
    """Where trials failed with at least as much memory as there is now. A failure that a larger trial disproved is none.

    With `accumulates`, a failure beside gradients of others is not disproved by what ran without them.
    """
    probed = room_of(measurement)
    if probed is not None and room > probed:
        return ()
    found = []
    for trial in measurement.trials:
        shape = _shape(measurement, trial.micro_batch, trial.max_length)
        counts = [run.shape for run in _trials(measurement) if run.accumulates or not (accumulates and trial.accumulates)]
        if trial.verdict != "ok" and not any(is_within(shape, other) for other in counts):
            found.append(shape)
    return tuple(found)


def _runs(measurement: Measurement) -> Iterator[Run]:
    """All that ran: points, then trials."""
    for point in measurement.points:
        shape = _shape(measurement, point.sequences, point.length, point.target_length)
        yield Run(shape, point.peak_bytes, point.accumulates)
    yield from _trials(measurement)


def _trials(measurement: Measurement) -> list[Run]:
    return [
        Run(_shape(measurement, trial.micro_batch, trial.max_length), trial.peak_device_bytes, trial.accumulates)
        for trial in measurement.trials
        if trial.verdict == "ok"
    ]


def _seconds_of(measurement: Measurement) -> dict[Shape, float]:
    found: dict[Shape, float] = {}
    for point in measurement.points:
        shape = _shape(measurement, point.sequences, point.length, point.target_length)
        found[shape] = max(found.get(shape, 0.0), point.seconds)
    for trial in measurement.trials:
        if trial.verdict == "ok" and trial.micro_batch_seconds is not None:
            found[_shape(measurement, trial.micro_batch, trial.max_length)] = trial.micro_batch_seconds
    return {shape: seconds for shape, seconds in found.items() if seconds > LEAST_SECONDS}


def _shape(measurement: Measurement, count: int, length: int, target: int = 0) -> Shape:
    longest = measurement.workload.target_length
    return (count, length) if longest is None else (count, length, target or longest)


def _tokens(count: Any, *lengths: Any) -> Any:
    return count * sum(lengths)


def is_within(sizes: Iterable[Any], shape: Shape) -> Any:
    """Whether it is larger in no direction; a length that was not said is none."""
    return np.all([size <= most for size, most in zip(sizes, shape, strict=False)], axis=0)


def _is_beyond(sizes: Iterable[Any], shape: Shape) -> Any:
    return np.all([size >= least for size, least in zip(sizes, shape, strict=False)], axis=0)


def _fitted(points: dict[Shape, Any], limit: float) -> LargestOf:
    """A polynomial where lengths differ; else a line over the tokens."""
    if len({shape[1:] for shape in points}) > 1:
        return fit(points, limit, most_pieces=max(1, min(MOST_PIECES, len(points) // _POINTS_PER_PIECE)))
    tokens: dict[Shape, Any] = {(count * length, 1): amount for (count, length, *_targets), amount in points.items()}
    line = fit(tokens, limit, most_pieces=1).costs[0]
    line = ShapeCost(fixed=line.fixed, per_token=line.per_sequence + line.per_token)
    _count, length, *targets = next(iter(points))
    # Of a source and its target nobody knows which of the two it is that costs: each counts as if it were all.
    return LargestOf((line, *(ShapeCost(fixed=line.fixed, per_target=line.per_token * length / target) for target in targets)))


def _raised(cost: LargestOf, points: dict[Shape, int]) -> LargestOf:
    """By as much as it understates any of the points."""
    more = max(0.0, *(amount - float(cost(*shape)) for shape, amount in points.items()))
    return LargestOf(tuple(replace(each, fixed=each.fixed + more) for each in cost.costs))


def _of_one_shape(shape: Shape, seconds: Cost, said: str) -> Budget:
    """One shape ran, and nothing tells what is fixed of its bytes: as many tokens are known to fit."""
    count, length, *targets = shape
    pieces = ShapeCost(per_token=1.0), *(ShapeCost(per_target=length / target) for target in targets)
    return Budget(LargestOf(pieces), count * length, seconds, "tokens", said)


def _said_of_one(measurement: Measurement, shape: Shape) -> str:
    text = _("Measured on {device}: one shape ran, {count} x {length} tokens, and no more tokens are allowed.")
    return text.format(device=measurement.device or "cpu", count=shape[0], length=shape[1])


def _said(measurement: Measurement, amounts: dict[Shape, int], room: float, margin: int | None) -> str:
    text = _("Measured on {device}: {count} shapes, {limit} beside a margin of {margin}.")
    if margin is None:
        text = _("Measured on {device}: {count} shapes, {limit} as the largest of them took.")
    said = text.format(
        device=measurement.device or "cpu", count=len(amounts), limit=format_bytes(round(room)), margin=format_bytes(margin or 0)
    )
    if len(amounts) == 1:
        return sentences(said, _("One shape says nothing about what less of it takes: as much, for safety."))
    lengths = {shape[1:] for shape in amounts}
    if len(lengths) > 1:
        return said
    one = _("All have {length} tokens: shorter ones count by their tokens, which is more than they need.")
    return sentences(said, one.format(length=" + ".join(map(str, lengths.pop()))))


def _said_of_gradients(measurement: Measurement) -> str:
    """What was added to shapes that ran as the only micro-batch of their step; nothing where none did."""
    runs = [run for run in _runs(measurement) if run.peak_bytes is not None]
    count = len({run.shape for run in runs} - {run.shape for run in runs if run.accumulates})
    if not count:
        return ""
    text = _("{count} of the shapes ran without gradients of other micro-batches: {gradients} are added for them.")
    if measurement.gradient_bytes is None:
        text = _(
            "{count} of the shapes ran without gradients of other micro-batches, whose size is not known: {gradients} are added, half of"
            " the smallest peak and no less than they are, and these shapes do not count as proven."
        )
    return text.format(count=count, gradients=format_bytes(most_gradient_bytes(measurement)))
