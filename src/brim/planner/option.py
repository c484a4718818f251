"""One structure with what is predicted of it: which micro-batches fit, and how long a step takes with each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from brim.memory.footprint import Footprint
from brim.memory.parallel import width_of
from brim.planner.measured import scaled
from brim.planner.padding import sorted_slices
from brim.planner.rates import with_emulated_bf16
from brim.planner.request import Margin, Request
from brim.speed.communication import network_of, traffic
from brim.speed.roofline import Roofline
from brim.speed.step import StepParts, StepSpeed
from brim.step.cuts import Cut

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from brim.memory.setup import Setup, Target
    from brim.records import MemoryPrediction
    from brim.speed.rates import Rates
    from brim.workload.settings import Settings

Shapes = list[list[list[tuple[int, float]]]]
_ALONE_SAVES_AT_MOST = 1.25
"""One sequence alone has needed down to 0.8 of what the trace of several says of it; beyond this it is not tried."""
_TRAINED_BYTES = {"bf16": 2, "fp16": 2}
_STATE_BYTES = 20
"""Per trainable parameter, more than any engine shards: weights in half and in float32, gradients in both, two moments."""


@dataclass(frozen=True)
class Sampler:
    """Padded shapes of the micro-batches of sampled global batches, cut by cut."""

    request: Request
    _shapes: dict[Cut, Shapes] = field(default_factory=dict, compare=False, repr=False)

    def shapes(self, cut: Cut) -> Shapes | None:
        """Of each sampled global batch the (sequences, padded length) of every micro-batch of each rank; None where all are the longest."""
        lengths = self.request.lengths
        if lengths is None or lengths.are_equal:
            return None
        if cut not in self._shapes:
            ranks = self.request.base.ranks
            slices = cut.slices or (cut.micro_batch,) * (cut.accumulation * ranks)
            found = sorted_slices(lengths, self.request.effective_batch, slices, ranks).astype(float)
            sizes, padded = found[..., 0].astype(int), found[..., 1]
            if found.shape[-1] == 3:
                # The work of a seq2seq step is known for the longest targets: shorter ones count in proportion.
                target = self.request.base.target_len or 1
                padded = (padded + found[..., 2]) * self.request.length / (self.request.length + target)
            self._shapes[cut] = [
                [list(zip(*rank, strict=True)) for rank in zip(size.tolist(), length.tolist(), strict=True)]
                for size, length in zip(sizes, padded, strict=True)
            ]
        return self._shapes[cut]


class Option:
    """One structure."""

    footprints: tuple[Footprint, Footprint]
    """Of a micro-batch among several, and of one alone."""

    def __init__(
        self, request: Request, settings: Settings, sampler: Sampler, rates: Rates, *, like: Option | None = None
    ) -> None:
        """`like` is the same structure with another batch: what is known of its memory serves this one too."""
        self.request = request
        self.settings = settings
        self._sampler = sampler
        self._parts: dict[Cut, StepParts] = {}
        # Gradients of the first micro-batch live through the forward of the second: one micro-batch alone is another structure.
        self.footprints = (self._footprint(accumulation=2), self._footprint(accumulation=1)) if like is None else like.footprints
        self._several, self._alone = self.footprints
        self._own_rates = rates
        self.rates = with_emulated_bf16(rates, request.where, settings)
        self.network = network_of(self.rates, settings.gpus, gpu=request.where.gpu, link=request.link)
        self._refused: set[Cut] = set()
        self.fitting: int | None = None
        """How many cuts fit, once that is known."""

    def with_settings(self, settings: Settings) -> Option:
        """Another structure of the same question."""
        return Option(self.request, settings, self._sampler, self._own_rates)

    def trace(self) -> None:
        """Find out what it computes and holds."""
        settings, rates, request = self.settings, self.rates, self.request
        footprint = self._of(request.cuts[0])
        self.facts = facts = footprint.facts
        self.attention = facts.attention or "none"
        self.attention_kernel = footprint.attention_kernel
        self.total_parameters, self.trainable_parameters = facts.total_parameters, facts.trainable_parameters
        moved = traffic(
            settings,
            rates,
            parameters=facts.total_parameters,
            trainable=facts.trainable_parameters,
            network=self.network,
            layers=_depth(request.question.config),
            width=width_of(request.question.config),
        )
        measured = request.measured
        roofline = Roofline(footprint.work, rates) if measured is None else measured.roofline(footprint.work, rates)
        self.speed = StepSpeed(roofline, moved, self.gradient_bytes, request.length)

    def seconds(self, cut: Cut) -> float:
        """Of one optimizer step; with data, the mean over sampled global batches."""
        return self.parts(cut).seconds

    def parts(self, cut: Cut) -> StepParts:
        """The same, taken apart."""
        if cut not in self._parts:
            shapes = self._sampler.shapes(cut)
            if shapes is not None:
                self._parts[cut] = self.speed.mean_step_parts(shapes)
            else:
                slices = cut.slices or (cut.micro_batch,) * cut.accumulation
                runs = [slices[start : start + cut.accumulation] for start in range(0, len(slices), cut.accumulation)]
                self._parts[cut] = self.speed.step_parts(runs)
        return self._parts[cut]

    def fits(self, cut: Cut) -> bool:
        """Whether what it needs, and the margin, is there."""
        if cut in self._refused:
            return False
        if self.is_probed:
            return self.device_bytes(cut) <= self.room_bytes
        # In the terms of the prediction, which is multiplied by the ratio before it is held against the room.
        room = int(self.room_bytes / self._ratio)
        size = cut.micro_batch
        if size == 1 and len(self.request.cuts) > 1:
            # Most often the trace of several decides, and saves one of its own.
            bound = self._of(cut).alone_at_most()
            if bound <= room or bound > _ALONE_SAVES_AT_MOST * room:
                return bound <= room
        if cut.accumulation > 1:
            return self._several.device_bytes(size, limit=room) <= room
        # Alone it needs no more than with others, and less by its gradients at most: often that decides without another trace.
        if len(self.request.cuts) > 1:
            among = self._several.device_bytes(size, limit=room + self.gradient_bytes)
            if among <= room or among > room + self.gradient_bytes:
                return among <= room
        return self._alone.device_bytes(size, limit=room) <= room

    def surely_fits(self, cut: Cut) -> bool:
        """The same, without a bound: what is shown has been looked at itself."""
        if self.device_bytes(cut) > self.room_bytes:
            self._refused.add(cut)
        return cut not in self._refused

    def device_bytes(self, cut: Cut) -> int:
        """What nvidia-smi would show at the peak."""
        measured = self.request.measured
        if measured is None:
            return self._of(cut).device_bytes(cut.micro_batch)
        if not self.is_probed:
            return math.ceil(self._ratio * self._of(cut).device_bytes(cut.micro_batch))
        target = self.settings.target_len
        shape = (cut.micro_batch, self.request.length, *(() if target is None else (target,)))
        return measured.bytes_of(
            shape,
            self.room_bytes,
            self._of(cut).alone_at_most,
            accumulates=cut.accumulation > 1,
            gradient_bytes=self.gradient_bytes,
        )

    def prediction(self, cut: Cut) -> MemoryPrediction:
        """Everything about its memory."""
        found = self._of(cut).prediction(cut.micro_batch)
        return found if self.request.measured is None else scaled(found, self.device_bytes(cut))

    @cached_property
    def is_probed(self) -> bool:
        """Whether a probe has run this very structure."""
        return self.request.was_probed(self.settings)

    @property
    def margin(self) -> Margin:
        """What stays free: what was not measured itself keeps the margin of a prediction."""
        return self.request.margin if self.is_probed else self.request.predicted_margin

    @property
    def room_bytes(self) -> int:
        """What it may need."""
        return self.request.where.limit_bytes - self.margin.bytes

    @property
    def _ratio(self) -> float:
        return self.request.measured.ratio if self.request.measured is not None else 1.0

    def largest_fitting(self, guess: int | None = None) -> int:
        """How many of the cuts that accumulate fit, from the smallest on, found by halving: it never shrinks as the limit grows.

        `guess` is where a structure of the same kind ended: the search begins there.
        """
        low, high = 0, len(self.request.cuts) - (self._single is not None)
        nearby = [] if guess is None else [guess - 1, guess]
        while low < high:
            middle = nearby.pop() if nearby else (low + high) // 2
            if not low <= middle < high:
                continue
            if self.fits(self.request.cuts[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def fastest(self, guess: int | None = None) -> Cut | None:
        """The fastest cut that fits."""
        self.fitting = self.largest_fitting(guess)
        fitting = [*self.request.cuts[: self.fitting], *([self._single] if self._single is not None else ())]
        return next((cut for cut in sorted(fitting, key=self.seconds) if self.fits(cut)), None)

    def smallest_fits(self) -> bool:
        """Whether any cut does: the smallest micro-batches need least, unless gradients that wait for the next one weigh more."""
        return self.fits(self.request.cuts[0]) or (self._single is not None and self.fits(self._single))

    @property
    def _single(self) -> Cut | None:
        """The cut without accumulation, whose gradients do not live through another forward."""
        last: Cut = self.request.cuts[-1]
        return last if last.accumulation == 1 else None

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all that trains."""
        each = _TRAINED_BYTES.get(self.settings.precision if self.settings.method == "full" else "", 4)
        return self._of(self.request.cuts[0]).facts.trainable_parameters * each

    @cached_property
    def sequence_bytes(self) -> int:
        """What one more sequence in a micro-batch needs at least, by the bytes of a device that trains alone; 1 where that is not known."""
        return max(1, self._of(self.request.cuts[0]).sequence_bytes())

    @property
    def shard_bytes(self) -> int:
        """What more ranks could still take off this one, at most: all that it holds of weights, gradients and the optimizer's state."""
        if self.settings.sharding in {None, "none", "ddp"}:
            return 0
        return _STATE_BYTES * self.trainable_parameters // self.settings.ranks

    def bound(self) -> float:
        """The least seconds that it could take if memory were no matter."""
        return min(self.seconds(cut) for cut in self.request.cuts)

    def wanted(self, cut: Cut | None = None) -> tuple[Setup, Target] | None:
        """What must be traced to know this cut; without one, to know anything."""
        return self._of(cut or self.request.cuts[0]).wanted(cut.micro_batch if cut is not None else 2)

    def keep(self) -> None:
        """Write down what was found out."""
        self._several.keep()
        self._alone.keep()

    def _of(self, cut: Cut) -> Footprint:
        return self._several if cut.accumulation > 1 else self._alone

    def _footprint(self, *, accumulation: int) -> Footprint:
        # Where one micro-batch alone is all there is, no trace of several is ever made, and the other way round.
        settings = replace(self.settings, micro_batch=2, accumulation=accumulation)
        return Footprint(replace(self.request.question, settings=settings))


def _depth(config: Mapping[str, Any] | None) -> int:
    """Layers of the model, which engines that gather weights gather one by one; 1 where that is not known."""
    inner: Mapping[str, Any] = (config or {}).get("text_config") or config or {}
    known = (inner.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    return next((depth for depth in known if isinstance(depth, int) and depth > 0), 1)
