"""A budget from what a probe measured: bytes and seconds as functions of the padded shape.

Three things are known, and none of them bends to the polynomial that is laid through the points. A shape that a trial ran fits, and so does
every shape that is smaller in all directions. A shape at which a trial failed does not fit, and nothing does that is larger in all
directions. In between, and for many short sequences, the polynomial decides, raised until it understates no point; where
there are more tokens than in any shape that ran, no less than in proportion.

Where all points have one length, nothing tells how bytes fall with it. Attention only makes shorter sequences cheaper than their share of
the tokens, so bytes that are affine in the tokens are safe, and longer sequences than those that were probed never come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.errors import UsageError
from brim.locale import _, sentences
from brim.sizes import format_bytes
from brim.step.budget import Budget, Cost, FloatArray, ShapeCost
from brim.step.fitting import MOST_PIECES, LargestOf, Shape, fit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from brim.records import Measurement

_POINTS_PER_PIECE = 4
"""A polynomial of a shape has as many coefficients."""


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
    beside_bytes: int = 0,
) -> Budget:
    """The budget that a probe has measured, see `Budget.measured`.

    `limit_bytes` and `margin_bytes` stand for the probe's own. `beside_bytes` were not there when it was measured, and will be.
    """
    amounts, timed = bytes_of(measurement), _seconds_of(measurement)
    if not amounts:
        raise UsageError(
            _("Nothing ran in this probe, so there is no budget in it."),
            hint=_("Probe again, with more memory or shorter sequences."),
        )
    probed = room_of(measurement)
    margin = measurement.margin_bytes if margin_bytes is None else margin_bytes
    limit = measurement.limit_bytes if limit_bytes is None else limit_bytes
    room = float(max(amounts.values()) if limit is None else limit - margin)
    seconds = _fitted(timed, max(timed.values())) if len(timed) > 1 else Budget.tokens(1).seconds
    said = _said(measurement, amounts, room, margin if limit is not None else None)
    is_as_probed = room >= (max(amounts.values()) if probed is None else probed)
    if len(amounts) == 1 and is_as_probed and not beside_bytes:
        return _of_one_shape(next(iter(amounts)), seconds, said)
    fitted = _beside(_raised(_fitted(amounts, room), amounts), beside_bytes)
    most = max(_tokens(*shape) for shape in amounts)
    cost = MeasuredCost(
        fitted,
        room,
        most,
        beside_bytes + min(amount for shape, amount in amounts.items() if _tokens(*shape) == most),
        proven=proven_shapes(measurement, room) if not beside_bytes else (),
        failed=failed_shapes(measurement, room),
    )
    return Budget(cost, room, seconds, because=said)


def room_of(measurement: Measurement) -> float | None:
    """What a step of the probe could take; None where no limit was known."""
    return None if measurement.limit_bytes is None else measurement.limit_bytes - measurement.margin_bytes


def bytes_of(measurement: Measurement) -> dict[Shape, int]:
    """The peak of every shape that ran, padded or not, whichever is more."""
    found: dict[Shape, int] = {}
    for point in measurement.points:
        shape = _shape(measurement, point.sequences, point.length, point.target_length)
        found[shape] = max(found.get(shape, 0), point.peak_bytes)
    for shape, peak_bytes in _trials(measurement):
        if peak_bytes is not None:
            found[shape] = max(found.get(shape, 0), peak_bytes)
    return found


def proven_shapes(measurement: Measurement, room: float) -> tuple[Shape, ...]:
    """What trials ran with no more memory than there is now, or took no more than that."""
    probed = room_of(measurement)
    enough = probed is not None and room >= probed
    return tuple(shape for shape, peak in _trials(measurement) if enough or (peak is not None and peak <= room))


def failed_shapes(measurement: Measurement, room: float) -> tuple[Shape, ...]:
    """Where trials failed with at least as much memory as there is now. A failure that a larger trial disproved is none."""
    probed = room_of(measurement)
    if probed is not None and room > probed:
        return ()
    ran = [shape for shape, _peak in _trials(measurement)]
    tried = [_shape(measurement, trial.micro_batch, trial.max_length) for trial in measurement.trials if trial.verdict != "ok"]
    return tuple(shape for shape in tried if not any(is_within(shape, other) for other in ran))


def _trials(measurement: Measurement) -> list[tuple[Shape, int | None]]:
    """Shapes that trials ran, and their peaks."""
    return [
        (_shape(measurement, trial.micro_batch, trial.max_length), trial.peak_device_bytes)
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
    return {shape: seconds for shape, seconds in found.items() if seconds > 0}


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
    return _beside(cost, max(0.0, *(amount - float(cost(*shape)) for shape, amount in points.items())))


def _beside(cost: LargestOf, more: float) -> LargestOf:
    return LargestOf(tuple(replace(each, fixed=each.fixed + more) for each in cost.costs))


def _of_one_shape(shape: Shape, seconds: Cost, said: str) -> Budget:
    """One shape ran, and nothing tells what is fixed of its bytes: as many tokens are known to fit."""
    count, length, *targets = shape
    pieces = ShapeCost(per_token=1.0), *(ShapeCost(per_target=length / target) for target in targets)
    return Budget(LargestOf(pieces), count * length, seconds, "tokens", said)


def _said(measurement: Measurement, amounts: dict[Shape, int], room: float, margin: int | None) -> str:
    device = measurement.device or "cpu"
    if len(amounts) == 1:
        count, length, *_targets = next(iter(amounts))
        text = _("Measured on {device}: one shape ran, {count} x {length} tokens, and no more tokens are allowed.")
        return text.format(device=device, count=count, length=length)
    text = _("Measured on {device}: {count} shapes, {limit} beside a margin of {margin}.")
    if margin is None:
        text = _("Measured on {device}: {count} shapes, {limit} as the largest of them took.")
    said = text.format(device=device, count=len(amounts), limit=format_bytes(round(room)), margin=format_bytes(margin or 0))
    lengths = {shape[1:] for shape in amounts}
    if len(lengths) > 1:
        return said
    one = _("All have {length} tokens: shorter ones count by their tokens, which is more than they need.")
    return sentences(said, one.format(length=" + ".join(map(str, lengths.pop()))))
