"""Scale on paper: the chosen structure on other numbers of GPUs, and with other batches on the planned ones.

Strong scaling: the effective batch stays, so more GPUs have less to do each while what they send each other does not shrink. Of every
number of GPUs the fastest slices that fit are taken. A GPU's tokens per second are held against those of the best number of the curve,
most often the smallest that fits; so efficiency is at most 1, also where more GPUs, each with smaller shards, have room for larger
slices.

The guide to the batch (McCandlish et al. 2018, arXiv 1812.06162): with noise scale B' a batch of B reaches the same loss in 1 + B' / B
times the fewest steps, and takes 1 + B / B' times the fewest sequences. Far below B' a batch twice as large halves the steps; far above
it, it only doubles the work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from brim.memory.ahead import trace_ahead
from brim.planner.option import Option, Sampler
from brim.planner.request import MOST_EFFECTIVE
from brim.records import BatchGuide, BatchPoint, ScalePoint, Scaling, Wire
from brim.speed.step import StepParts
from brim.step.cuts import Cut

if TYPE_CHECKING:
    from brim.planner.request import Request
    from brim.planner.search import Found, Pick
    from brim.speed.links import Link
    from brim.speed.rates import Rates
    from brim.workload.settings import Settings

KNEE_SHARE: Final = 0.5
"""An added GPU that brings less than half of what one of the best-used does is called not worth it. Chosen."""
_BEYOND: Final = 2
"""Doublings beyond what was asked for."""
_SEVERAL: Final = 2
"""Sequences: the trace of two serves all micro-batches but that of one."""
_FEW: Final = 8
_BATCHES: Final = 6
"""Effective batches of the guide: the planned one, and doublings of it."""


@dataclass(frozen=True)
class _Tried:
    """One number of GPUs, or one batch."""

    option: Option
    cut: Cut
    fits: bool
    parts: StepParts

    @property
    def tokens_per_second(self) -> float:
        request = self.option.request
        return request.effective_batch * request.mean_tokens / self.parts.seconds

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_second / self.option.settings.ranks


@dataclass(frozen=True)
class _Caps:
    """No larger slice fits: among several, whose gradients wait for the next one, and alone."""

    several: int
    alone: int

    def of(self, cut: Cut) -> int:
        return self.several if cut.accumulation > 1 else self.alone

    def without(self, cut: Cut) -> _Caps:
        """This one does not fit either."""
        smaller = cut.micro_batch - 1
        # Alone it needs no more than among others.
        return replace(
            self, several=min(self.several, smaller), **({} if cut.accumulation > 1 else {"alone": min(self.alone, smaller)})
        )


def scaling_of(request: Request, found: Found) -> Scaling | None:
    """The curve of a plan for several GPUs; None for one, for the CPU, and where nothing fits."""
    best = found.best
    if best is None or request.base.ranks == 1 or request.where.gpu is None:
        return None
    rates = best.option.rates
    _trace_ahead(best)
    tried, caps = _curve(request, best, rates)
    fitting = [each for each in tried if each.fits]
    reference = max(fitting, key=lambda each: (each.per_gpu, -each.option.settings.ranks))
    network = best.option.network
    return Scaling(
        inside=_wire(network.inside),
        between=_wire(network.between),
        points=tuple(_point(each, reference) for each in tried),
        reference_gpus=reference.option.settings.ranks,
        knee_gpus=_knee(fitting, reference),
        knee_share=KNEE_SHARE,
        batches=_guide(request, best, rates, reference, caps),
    )


def counts_of(gpus: int, nodes: int) -> list[tuple[int, int]]:
    """GPUs in a node, and nodes: one GPU, doublings up to a full node, doublings of nodes, the asked number, and beyond it."""
    within = [1 << power for power in range(gpus.bit_length()) if 1 << power < gpus]
    last = nodes << _BEYOND
    across = {1, nodes, *(nodes << more for more in range(_BEYOND + 1)), *(1 << power for power in range(last.bit_length()))}
    return [*((count, 1) for count in within), *((gpus, count) for count in sorted(across) if count <= last)]


def _curve(request: Request, best: Pick, rates: Rates) -> tuple[list[_Tried], _Caps]:
    """From the most GPUs down: shards only grow, so a slice that is once too large stays so. Also the caps of the planned GPUs."""
    tried: list[_Tried] = []
    caps = planned_caps = _Caps(_cap(best), _cap(best))
    for gpus, nodes in reversed(counts_of(request.base.gpus, request.base.nodes)):
        settings = replace(best.option.settings, gpus=gpus, nodes=nodes)
        if gpus * nodes == 1 and settings.sharding == "ddp":
            settings = replace(settings, sharding="none")
        if settings == best.option.settings:
            tried.append(_Tried(best.option, best.cut, fits=True, parts=best.option.parts(best.cut)))
            planned_caps = caps
            continue
        found, caps = _try(_elsewhere(request, settings, best.cut.micro_batch), settings, rates, caps)
        tried.append(found)
    return tried[::-1], planned_caps


def _trace_ahead(best: Pick) -> None:
    """With few GPUs each accumulates, with many none does; where memory is short, micro-batches of one are asked for too."""
    several, alone = best.option.footprints
    wanted = [several.wanted(_SEVERAL), alone.wanted(_SEVERAL), several.wanted(1) if _cap(best) <= _FEW else None]
    trace_ahead([pair for pair in wanted if pair is not None])


def _cap(best: Pick) -> int:
    """No slice larger than this fits, whatever the shards: each sequence needs at least what one more does without them."""
    option, cut = best.option, best.cut
    free = option.room_bytes - option.device_bytes(cut) + option.shard_bytes + option.gradient_bytes
    return cut.micro_batch + max(0, int(free // max(1, option.sequence_bytes)))


def _elsewhere(request: Request, settings: Settings, micro_batch: int, effective_batch: int | None = None) -> Request:
    """The same question on other GPUs, or of another batch. Slices that were asked for stay as large; how many there are follows."""
    is_pinned = request.micro_batch is not None or request.accumulation is not None
    return replace(
        request,
        question=replace(request.question, settings=settings),
        effective_batch=effective_batch or request.effective_batch,
        micro_batch=micro_batch if is_pinned else None,
        accumulation=None,
    )


def _try(request: Request, settings: Settings, rates: Rates, caps: _Caps, like: Option | None = None) -> tuple[_Tried, _Caps]:
    """The fastest slices within the caps that fit, and the caps that are left: each miss lowers one."""
    option = Option(request, settings, Sampler(request), rates, like=like)
    option.trace()
    chosen: Cut | None = None
    for cut in sorted(request.cuts, key=option.seconds):
        if cut.micro_batch > caps.of(cut):
            continue
        if option.surely_fits(cut):
            chosen = cut
            break
        caps = caps.without(cut)
    option.keep()
    shown = chosen or request.cuts[0]
    return _Tried(option, shown, fits=chosen is not None, parts=option.parts(shown)), caps


def _point(tried: _Tried, reference: _Tried) -> ScalePoint:
    settings, parts = tried.option.settings, tried.parts
    return ScalePoint(
        gpus=settings.ranks,
        nodes=settings.nodes,
        fits=tried.fits,
        micro_batch=tried.cut.micro_batch,
        accumulation=tried.cut.accumulation,
        idle_gpus=max(0, settings.ranks - tried.option.request.effective_batch),
        device_bytes=tried.option.device_bytes(tried.cut),
        step_seconds=parts.seconds,
        compute_seconds=parts.compute_seconds,
        exposed_seconds=parts.exposed_seconds,
        inside_seconds=parts.busy.inside,
        between_seconds=parts.busy.between,
        tokens_per_second=tried.tokens_per_second,
        efficiency=min(1.0, tried.per_gpu / reference.per_gpu) if tried.fits else None,
    )


def _knee(fitting: list[_Tried], reference: _Tried) -> int:
    """The last number that still pays against the last one that did: a number between may divide the batch badly."""
    knee = fitting[0]
    for each in fitting[1:]:
        added = each.option.settings.ranks - knee.option.settings.ranks
        gained = (each.tokens_per_second - knee.tokens_per_second) / added
        if gained >= KNEE_SHARE * reference.per_gpu:
            knee = each
    return knee.option.settings.ranks


def _guide(request: Request, best: Pick, rates: Rates, reference: _Tried, caps: _Caps) -> BatchGuide:
    settings = best.option.settings
    points: list[BatchPoint] = []
    planned = best.option.parts(best.cut).seconds
    for doublings in range(_BATCHES):
        batch = request.effective_batch << doublings
        if batch > MOST_EFFECTIVE:
            break
        if doublings:
            asked = _elsewhere(request, settings, best.cut.micro_batch, batch)
            found, caps = _try(asked, settings, rates, caps, like=best.option)
            if not found.fits:
                continue
        else:
            found = _Tried(best.option, best.cut, fits=True, parts=best.option.parts(best.cut))
        points.append(_batch_point(found, reference, request.noise_scale, request.effective_batch, planned))
    enough = (point.effective_batch for point in points if point.efficiency >= KNEE_SHARE)
    return BatchGuide(noise_scale=request.noise_scale, points=tuple(points), enough_batch=next(enough, None))


def _batch_point(tried: _Tried, reference: _Tried, noise: float | None, planned: int, planned_seconds: float) -> BatchPoint:
    batch, seconds = tried.option.request.effective_batch, tried.parts.seconds
    return BatchPoint(
        effective_batch=batch,
        step_seconds=seconds,
        tokens_per_second=tried.tokens_per_second,
        efficiency=min(1.0, tried.per_gpu / reference.per_gpu),
        steps=steps_over_fewest(batch, noise) if noise else None,
        examples=1 + batch / noise if noise else None,
        time=seconds * steps_over_fewest(batch, noise) / (planned_seconds * steps_over_fewest(planned, noise)) if noise else None,
    )


def steps_over_fewest(batch: float, noise_scale: float) -> float:
    """Optimizer steps to a loss, as a multiple of what an endless batch needs."""
    return 1 + noise_scale / batch


def _wire(link: Link) -> Wire:
    return Wire(name=link.name, bytes_per_second=link.bytes_per_second, hop_seconds=link.ring_hop_seconds)
