"""What a probe has measured, in the place of the models' constants.

For the structure that was probed, bytes are those of the trials and of the line through them: what ran fits, what failed does not, and the
prediction is not asked. Another structure on the same device keeps its prediction, times what the probed one took of its own; a single
trial cannot say that predictions are too high, so that factor is below 1 only where two sizes or more agree. Seconds of all structures are
those of the speed model, times what the sizes that were timed took of theirs: a curve over sizes, for caches and new pages make large
micro-batches slower than any one level says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.locale import _, sentences
from brim.memory.estimate import Question
from brim.memory.footprint import Footprint
from brim.planner.probed import usual
from brim.planner.rates import rates_of, with_emulated_bf16
from brim.records import AffineFit, Measurement, MemoryPrediction, Trial
from brim.sizes import format_bytes
from brim.speed.measured import CALIBRATED
from brim.speed.roofline import Roofline
from brim.step.budget import Cost
from brim.step.measured import (
    LEAST_SECONDS,
    MeasuredCost,
    bytes_of,
    failed_shapes,
    is_within,
    measured_budget,
    most_gradient_bytes,
    proven_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.memory.work import Work
    from brim.planner.host import HostSide
    from brim.speed.rates import Rates
    from brim.step.fitting import Shape
    from brim.workload.settings import Settings

_STRUCTURE = (
    "method", "lora_rank", "lora_dropout", "lora_targets", "lora_dtype", "base_dtype", "freeze", "precision", "optimizer", "checkpointing",
    "attention", "padded", "loss", "sharding", "offload", "gradient_as_bucket_view", "gpus", "nodes",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredRoofline(Roofline):
    """Seconds at the level of those that were measured."""

    update_scale: float = 1.0
    """Measured seconds of the update over predicted ones, beyond what the rates are scaled by."""
    curve: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """The same of micro-batches: sizes, from the smallest on, and the factor at each."""

    def micro_batch_seconds(self, batch: float, length: float) -> float:
        """Forward and backward; between two sizes the factor is a line over the logarithm of the size, beyond them it stays."""
        sizes, factors = zip(*self.curve, strict=True)
        return super().micro_batch_seconds(batch, length) * float(np.interp(math.log(batch), np.log(sizes), factors))

    def optimizer_seconds(self) -> float:
        """Clipping and the optimizer's step."""
        return super().optimizer_seconds() * self.update_scale


@dataclass(frozen=True)
class Measured:
    """What one measurement says for one question."""

    measurement: Measurement
    question: Question
    """The probed structure, at the longest length that was probed."""
    host_cores: float | None = None
    _costs: dict[tuple[bool, int | None], Cost] = field(default_factory=dict, compare=False, repr=False)

    @property
    def settings(self) -> Settings:
        """How the step was run."""
        return self.question.settings

    @property
    def length(self) -> int:
        """The longest that was probed."""
        return self.measurement.workload.max_length

    def is_probed(self, settings: Settings) -> bool:
        """Whether it is the structure that ran, whatever its micro-batch and its length."""
        mine = self.settings
        clips = (mine.max_grad_norm is None) == (settings.max_grad_norm is None)
        return clips and all(self._word(mine, name) == self._word(settings, name) for name in _STRUCTURE)

    def bytes_of(self, shape: Shape, room: int, floor: Callable[[], int], *, accumulates: bool, gradient_bytes: int) -> int:
        """What a micro-batch of the probed structure takes; more than `room` where a trial of no larger a size failed.

        `floor` gives the prediction for one sequence, below which no line is followed. With `accumulates` there are other micro-batches in
        the step: `gradient_bytes` are added where they were not there in a trial, unless the probe itself has counted them.
        """
        found = self.evidence(gradient_bytes)
        needed = float(_peaks(found, accumulates=accumulates).get(shape, 0))
        if not needed:
            within = [peak for other, peak in bytes_of(found, accumulates=accumulates).items() if is_within(other, shape)]
            needed = max([self._between(found, shape, accumulates=accumulates), *within, self.ratio * floor()])
        if any(is_within(shape, other) for other in proven_shapes(found, room, accumulates=accumulates)):
            needed = min(needed, room)
        if any(is_within(other, shape) for other in failed_shapes(found, room, accumulates=accumulates)):
            needed = max(needed, room + 1)
        return math.ceil(needed)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of other micro-batches were there in any trial that ran."""
        return any(trial.accumulates for trial in self._ran)

    def evidence(self, gradient_bytes: int) -> Measurement:
        """The measurement, with these bytes for the gradients of all that trains where it has none of its own."""
        found = self.measurement
        return found if found.gradient_bytes is not None else replace(found, gradient_bytes=gradient_bytes)

    @cached_property
    def ratio(self) -> float:
        """Measured bytes over predicted ones: the largest of all trials."""
        ratios = [
            trial.peak_device_bytes / self._footprint(2 if trial.accumulates else 1).device_bytes(trial.micro_batch)
            for trial in self._ran
            if trial.peak_device_bytes is not None and trial.max_length == self.length
        ]
        return max([*ratios, *([1.0] if len(ratios) < 2 else [])])

    @cached_property
    def factors(self) -> dict[int, float]:
        """Measured seconds of a micro-batch over predicted ones, of every size that was timed at the full length: its fastest run."""
        roofline = Roofline(self._work, replace(self._rates, scale=1.0))
        fastest: dict[int, float] = {}
        for size, seconds in self._timed():
            fastest[size] = min(seconds, fastest.get(size, math.inf))
        return {size: fastest[size] / roofline.micro_batch_seconds(size, self.length) for size in sorted(fastest)}

    @cached_property
    def scale(self) -> float | None:
        """The middle of these factors; None where nothing was timed."""
        return median(self.factors.values()) if self.factors else None

    @cached_property
    def update_scale(self) -> float | None:
        """The same of the update."""
        seconds = [trial.update_seconds for trial in self._ran if trial.update_seconds]
        predicted = Roofline(self._work, self._rates).optimizer_seconds()
        return median(seconds) / predicted if seconds and predicted else None

    def roofline(self, work: Work, rates: Rates) -> Roofline:
        """The work of any structure on the device that was measured."""
        if self.scale is None:
            return Roofline(work, rates)
        own = self.update_scale / self.scale if self.update_scale is not None else 1.0
        curve = tuple((size, factor / self.scale) for size, factor in self.factors.items())
        return MeasuredRoofline(work, replace(rates, scale=self.scale, source=CALIBRATED), own, curve)

    def loader(self, side: HostSide, gpus: int) -> HostSide:
        """The host's side with the loader that was measured, where it served as many ranks."""
        found = self.measurement.loader
        if found is None or gpus != self.settings.gpus:
            return side
        text = _("num_workers is {count}: measured.")
        if found.wait_fraction is not None:
            text = _("num_workers is {count}: measured, and the step waits {share:.1%} of its time for data.")
        said = text.format(count=found.num_workers, share=found.wait_fraction or 0.0)
        return replace(
            side,
            num_workers=found.num_workers,
            prefetch_factor=found.prefetch_factor if found.num_workers else None,
            pin_memory=found.pin_memory,
            reasons=(said, *found.reasons),
            assumptions=(),
        )

    def note(self) -> str:
        """What was measured, in a sentence."""
        found = self.measurement
        largest = max(self._ran, key=lambda trial: trial.micro_batch)
        text = _("Measured: {trials} trials on {device} ran up to {micro} x {length} tokens, at {peak}.")
        said = text.format(
            trials=len(found.trials),
            device=found.device or "cpu",
            micro=largest.micro_batch,
            length=largest.max_length,
            peak=format_bytes(largest.peak_device_bytes) if largest.peak_device_bytes is not None else _("bytes not known"),
        )
        return sentences(said, "" if found.complete else _("The search was not finished."))

    def assumptions(self, settings: Settings) -> list[str]:
        """How it is used for a plan of this structure."""
        said = []
        if not self.is_probed(settings):
            text = _("Another structure was measured: it took {ratio:.2f} of what is predicted of it, and so does this one.")
            said.append(text.format(ratio=self.ratio))
        elif not self.has_gradients:
            said.append(
                _("Measured without gradients of other micro-batches: they are added where micro-batches are accumulated.")
            )
        elif alone := sorted({trial.micro_batch for trial in self._ran if not trial.accumulates}):
            text = _(
                "Measured without gradients of other micro-batches at {sizes} sequences: they are added where micro-batches are"
                " accumulated."
            )
            said.append(text.format(sizes=", ".join(map(str, alone))))
        if self.scale is not None:
            text = _("Measured: micro-batches take {scale:.2f} times the seconds of the speed model, which all times follow.")
            if len(self.factors) > 1:
                text = _(
                    "Measured: micro-batches take {least:.2f} to {most:.2f} times the seconds of the speed model, a curve of the {count}"
                    " sizes that were timed, which all times follow."
                )
            factors = self.factors.values()
            said.append(text.format(scale=self.scale, least=min(factors), most=max(factors), count=len(factors)))
        return said

    def warnings(self) -> list[str]:
        """What a reader should know before trusting it."""
        if self.measurement.complete:
            return []
        said = _("The probe was not finished: what ran is known, and larger micro-batches may fit too.")
        ran = bytes_of(self.measurement)
        if len(ran) != 1:
            return [said]
        text = _("Only one size ran, {count} x {length} tokens: the bytes of all others are drawn from that one.")
        count, length, *_targets = next(iter(ran))
        return [sentences(said, text.format(count=count, length=length))]

    @property
    def _ran(self) -> list[Trial]:
        return [trial for trial in self.measurement.trials if trial.verdict == "ok"]

    def _timed(self) -> Iterator[tuple[int, float]]:
        """Sizes of the full length, and their seconds."""
        workload = self.measurement.workload
        for trial in self._ran:
            seconds = trial.micro_batch_seconds or 0.0
            if seconds > LEAST_SECONDS and trial.max_length == self.length:
                yield trial.micro_batch, seconds
        for point in self.measurement.points:
            is_longest = point.length == self.length and point.target_length in {0, workload.target_length}
            if point.seconds > LEAST_SECONDS and is_longest and point.padded == workload.padded:
                yield point.sequences, point.seconds

    def _between(self, found: Measurement, shape: Shape, *, accumulates: bool) -> float:
        """By the line through the trials, and for shorter sequences by all shapes that were measured."""
        line, known = self._line(found, accumulates=accumulates), math.inf
        if line is not None:
            known = line.bytes_of(shape[0]) + line.residual_bytes
            if shape[1] == self.length and shape[2:] in {(), (found.workload.target_length,)}:
                return known
        if len(bytes_of(found)) > 1:
            key = accumulates, found.gradient_bytes
            if key not in self._costs:
                # Under the probe's own limit, so that the same shape takes the same, however much memory a plan has.
                self._costs[key] = measured_budget(found, accumulates=accumulates).cost
            cost = self._costs[key]
            assert isinstance(cost, MeasuredCost)
            return min(known, float(replace(cost, proven=(), failed=())(*shape)))
        return known if known < math.inf else self.ratio * self._predicted(shape, accumulates=accumulates)

    def _line(self, found: Measurement, *, accumulates: bool) -> AffineFit | None:
        """Of trials of one kind: gradients that were there at some sizes only make a line of no meaning."""
        if found.fit is None or len({trial.accumulates for trial in self._ran}) > 1:
            return None
        more = most_gradient_bytes(found) if accumulates and not self.has_gradients else 0
        return replace(found.fit, base_bytes=found.fit.base_bytes + more)

    def _predicted(self, shape: Shape, *, accumulates: bool) -> int:
        lengths: dict[str, Any] = dict(zip(("seq_len", "target_len"), shape[1:], strict=False))
        settings = replace(self.settings, accumulation=2 if accumulates else 1, **lengths)
        return Footprint(replace(self.question, settings=settings)).device_bytes(shape[0])

    def _word(self, settings: Settings, name: str) -> Any:
        if name == "attention" and settings.attention is None:
            return self._own_attention
        return usual(settings, name)

    @cached_property
    def _own_attention(self) -> str:
        """What the model takes where nothing is said."""
        if self.settings.attention in {None, "sdpa"}:
            return "sdpa"
        question = replace(self.question, settings=replace(self.settings, attention=None))
        return Footprint(question).facts.attention or "sdpa"

    def _footprint(self, accumulation: int) -> Footprint:
        return Footprint(replace(self.question, settings=replace(self.settings, accumulation=accumulation)))

    @cached_property
    def _work(self) -> Work:
        return self._footprint(2 if self.has_gradients else 1).work

    @cached_property
    def _rates(self) -> Rates:
        return with_emulated_bf16(rates_of(self.question.where, self.host_cores), self.question.where, self.settings)


def measured_of(measurement: Measurement, question: Question, settings: Settings, host_cores: float | None) -> Measured:
    """`settings` are those of the probe."""
    return Measured(measurement, replace(question, settings=replace(settings, micro_batch=2)), host_cores)


def _peaks(measurement: Measurement, *, accumulates: bool) -> dict[Shape, int]:
    """Of the trials that ran, the largest of each shape."""
    return bytes_of(replace(measurement, points=(), largest=None, fastest=None), accumulates=accumulates)


def scaled(prediction: MemoryPrediction, device_bytes: int) -> MemoryPrediction:
    """A prediction brought to what the device was measured to hold: every part in proportion."""
    factor = device_bytes / max(1, prediction.peak_device_bytes)
    reserved = min(device_bytes, round(factor * prediction.peak_reserved_bytes))
    allocated = min(reserved, round(factor * prediction.peak_allocated_bytes))
    kinds: dict[Any, int] = {kind: round(factor * size) for kind, size in prediction.by_kind.items()}
    held = {kind: size for kind, size in kinds.items() if kind not in {"fragmentation", "context"}}
    if held:
        # Rounding leaves a few bytes over: the largest kind takes them.
        kinds[max(held, key=lambda kind: held[kind])] += allocated - sum(held.values())
        kinds |= {"fragmentation": reserved - allocated, "context": device_bytes - reserved}
    needed = min(device_bytes, round(factor * prediction.smallest_surviving_limit_bytes))
    return replace(
        prediction,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_device_bytes=device_bytes,
        smallest_surviving_limit_bytes=needed,
        fits=needed <= prediction.limit_bytes,
        by_phase={phase: round(factor * size) for phase, size in prediction.by_phase.items()},
        by_kind=kinds,
    )
