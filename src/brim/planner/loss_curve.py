"""Rules on a loss series: does it fall, swing, crawl or run away, and what should the learning rate do about it?

A loss that learns only ever falls, so the yardstick is the *non-increasing* curve nearest to the series (isotonic regression). It has no
window to choose, and follows a steep start, a long plateau and everything between. What is left over is not learning: noise of the batches,
or swings. Three numbers are read off, each the ratio of two losses, so that the unit does not matter:

- `fall`: from the first steps to the last ones, against the loss at the start. A loss has a true zero, so its own size is the measure;
- `swing`: half the width of the middle 68 % of what is left over, against the loss's usual size. A few spikes do not count;
- `memory`: the correlation of what is left over from one step to the next, or the next but one. Batches of different sequences give noise
  without memory; a rate that is too high gives swings that have some: waves (towards 1) or a zigzag (towards -1). Noise without memory
  never counts as swings: a batch of one or two mixed sequences moves the loss by half of itself at any rate.

The verdict is about the series given, warm-up and all. A curve that fell early and is flat now has converged: that is `keep`, also where a
rate far too high settled it on a poor level, which one series cannot show. One that never fell is `crawls`, also where nothing was left to
learn: the sentence says so. Where noise hides a fall of a tenth, or the loss goes back and forth over zero as it does in some reinforcement
learning, nothing is concluded: that is `keep` as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, Final, Literal

from brim.locale import _
from brim.planner.schedule import format_setting
from brim.records import Advice

if TYPE_CHECKING:
    from collections.abc import Sequence

Word = Literal["keep", "oscillates", "crawls", "diverges", "too-short"]

SHORTEST: Final = 20
LOWER: Final = 0.6
RAISE: Final = 1.6
"""One step down or up on a scale of about five steps to a factor of ten: 3e-5, 5e-5, 8e-5. Learning rates are searched on such a scale."""
SCALE_SOURCE: Final = "Bengio 2012, arXiv 1206.5533"

SWING_OF_FALL: Final = 0.25
"""A swing counts when its peaks and troughs (about four times `swing`) span as much as the whole fall."""
LEAST_SWING: Final = 0.04
"""... when it is this share of the loss ..."""
MEMORY: Final = 0.4
"""... and when it has so much memory, beyond what chance gives to so few steps."""

LITTLE_FALL: Final = 0.1
"""A fall of less than a tenth, spread evenly over the series, is a crawl."""
EARLY_SHARE: Final = 0.55
"""A straight line has fallen by a third after a third of the steps, a curve that flattens by much more: at this share it has flattened."""
RISE: Final = 0.02
"""A loss that ends higher than it began by this share of itself, beyond its noise, is running away."""
LARGE_RISE: Final = 0.25
"""After a fall, a rise that is half of it is running away; so is one that is a third of it and this share of the best loss. Harder data at
the end of a curriculum lifts it by less."""
BOTH_SIGNS: Final = 0.1
"""Share of the losses above zero, and share below, from which on zero is what they swing about. No likelihood of words is below zero."""
SURE: Final = 4.0
"""Standard errors beyond which a difference of two averages is no accident."""
ENDLESS: Final = 1e30
"""No loss is that large; NaN is not below it either."""
ROUNDING: Final = 1e-9
BLOCKS: Final = 15


@dataclass(frozen=True)
class Verdict:
    """What a loss series says, and the figures it says it by."""

    word: Word
    reason: str
    advice: Advice | None = None
    """For the learning rate; None where it is not known, or should stay, or is not what is wrong."""
    steps: int = 0
    fall: float | None = None
    """From the first steps to the last ones, as a share of the loss at the start; below 0 where it rose."""
    swing: float | None = None
    """Typical distance from the nearest falling curve, as a share of the loss's usual size."""
    memory: float | None = None
    """Correlation of that distance from one step to the next, or to the next but one where that is stronger."""


@dataclass(frozen=True)
class _Shape:
    start: float
    end: float
    size: float
    """The loss's usual size, above 0."""
    swing: float
    """In units of the loss."""
    memory: float
    error: float
    """Standard error of `start - end`."""
    step_error: float
    """The same by the jumps from step to step, which a steady rise hardly touches."""
    early: float
    """Share of the fall that was done after a third of the steps."""
    blocks: tuple[float, ...]
    steps: int
    is_about_zero: bool

    @property
    def fall(self) -> float:
        return self.start - self.end

    @property
    def relative_fall(self) -> float:
        return self.fall / (abs(self.start) or self.size)

    @property
    def relative_swing(self) -> float:
        return self.swing / self.size


def judge(losses: Sequence[float], learning_rate: float | None = None) -> Verdict:
    """Judge one training loss a step, in order. With the learning rate, the verdict carries advice for it."""
    broken = next((index for index, loss in enumerate(losses) if not abs(loss) < ENDLESS), None)
    if broken is not None:
        text = _("The loss is {loss} at step {step} of the series: the run has diverged. Go back to a checkpoint before it.")
        return Verdict("diverges", text.format(loss=losses[broken], step=broken + 1), steps=len(losses))
    if len(losses) < SHORTEST:
        text = _("{count} steps are too few to judge; {least} are needed.")
        return Verdict("too-short", text.format(count=len(losses), least=SHORTEST), steps=len(losses))
    shape = _shape(losses)
    word, reason = _verdict(shape, losses)
    return Verdict(
        word,
        reason,
        advice=_advice(word, reason, learning_rate),
        steps=len(losses),
        fall=shape.relative_fall,
        swing=shape.relative_swing,
        memory=shape.memory,
    )


def _verdict(shape: _Shape, losses: Sequence[float]) -> tuple[Word, str]:
    fall, swing = _percent(max(0.0, shape.relative_fall)), _percent(shape.relative_swing)
    if _runs_away(shape, losses):
        text = _(
            "The loss runs away: from {start} at first to {end} at the end, after a lowest level of {low}. Go back to a checkpoint."
        )
        low, end = min(shape.blocks), max(shape.end, _average(losses[-5:]))
        return "diverges", text.format(start=f"{shape.start:.4g}", end=f"{end:.4g}", low=f"{low:.4g}")
    if shape.is_about_zero:
        return "keep", _("The loss goes back and forth over zero: its size says nothing about the learning rate.")
    if _swings(shape):
        text = _("The loss oscillates: it swings by {swing} of itself about its trend, and falls by {fall}.")
        return "oscillates", text.format(swing=swing, fall=fall)
    unsure = SURE / 2 * shape.error
    if shape.fall <= unsure and unsure > LITTLE_FALL * abs(shape.start):
        text = _("The noise of the batches, {swing} of the loss, hides whether it falls in these {steps} steps.")
        return "keep", text.format(swing=swing, steps=len(losses))
    if shape.fall <= max(unsure, ROUNDING * shape.size):
        text = _("The loss has not fallen in {steps} steps: the learning rate is too low, or there is nothing left to learn.")
        return "crawls", text.format(steps=len(losses))
    if shape.relative_fall < LITTLE_FALL and shape.early < EARLY_SHARE:
        text = _("The loss crawls: it has fallen by {fall} in {steps} steps, and as slowly at first as at the end.")
        return "crawls", text.format(fall=fall, steps=len(losses))
    text = _("The loss falls as it should: by {fall}, with swings of {swing} about its trend.")
    return "keep", text.format(fall=fall, swing=swing)


def _runs_away(shape: _Shape, losses: Sequence[float]) -> bool:
    """It ends far above its best, and had not swung like that before."""
    blocks = shape.blocks
    if _average(losses[-5:]) > max(max(blocks), shape.start) + SURE * 2 * max(shape.swing, RISE * shape.size):
        return True
    if shape.is_about_zero:
        return False
    lowest = min(range(len(blocks)), key=blocks.__getitem__)
    best = blocks[lowest]
    rise, drop = blocks[-1] - best, shape.start - best
    much = min(drop / 2, max(drop / 3, LARGE_RISE * abs(best)))
    if rise <= max(SURE * shape.step_error, RISE * shape.size, much):
        return False
    return rise > 3 * _largest_rise(blocks[: lowest + 1]) and rise > 3 * _largest_rise([-block for block in blocks[lowest:]])


def _swings(shape: _Shape) -> bool:
    if shape.swing <= SWING_OF_FALL * max(shape.fall, 0.0):
        return False
    return shape.relative_swing > LEAST_SWING and abs(shape.memory) > max(MEMORY, SURE / math.sqrt(shape.steps))


def _advice(word: Word, reason: str, learning_rate: float | None) -> Advice | None:
    factor = {"oscillates": LOWER, "crawls": RAISE}.get(word)
    if factor is None or learning_rate is None:
        return None
    then = float(format_setting(learning_rate * factor))
    return Advice(setting="learning_rate", now=learning_rate, then=then, reason=reason, source=SCALE_SOURCE)


def _shape(losses: Sequence[float]) -> _Shape:
    count = len(losses)
    first, last = max(5, count // 50), max(5, count // 10)
    start, end = _average(losses[:first]), _average(losses[-last:])
    trend = _falling(_without_spikes(losses))
    rest = [loss - level for loss, level in zip(losses, trend, strict=True)]
    swing = _half_width(rest)
    third = _average(losses[count // 3 - last // 2 : count // 3 + (last + 1) // 2])
    fall, both = start - end, math.sqrt(1 / first + 1 / last)
    return _Shape(
        start=start,
        end=end,
        size=_quantile(sorted(abs(loss) for loss in losses), 0.5) or max(abs(loss) for loss in losses) or 1.0,
        swing=swing,
        memory=_memory(rest),
        error=swing * both,
        step_error=_half_width([after - before for before, after in pairwise(losses)]) / math.sqrt(2) * both,
        early=(start - third) / fall if fall > 0 else 0.0,
        blocks=_block_averages(losses),
        steps=count,
        is_about_zero=min(sum(loss < 0 for loss in losses), sum(loss > 0 for loss in losses)) > BOTH_SIGNS * count,
    )


def _falling(losses: Sequence[float]) -> list[float]:
    """The non-increasing series nearest to this one: neighbours that rise are pooled until none do."""
    pools: list[tuple[float, int]] = []
    for loss in losses:
        total, count = loss, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    return [total / count for total, count in pools for _step in range(count)]


def _without_spikes(losses: Sequence[float]) -> list[float]:
    """The middle one of each three neighbours, so that one spike does not lift the trend before it."""
    inner = [sorted(losses[index - 1 : index + 2])[1] for index in range(1, len(losses) - 1)]
    return [losses[0], *inner, losses[-1]]


def _block_averages(losses: Sequence[float]) -> tuple[float, ...]:
    blocks = min(BLOCKS, len(losses) // 5)
    edges = [index * len(losses) // blocks for index in range(blocks + 1)]
    return tuple(_average(losses[low:high]) for low, high in pairwise(edges))


def _largest_rise(values: Sequence[float]) -> float:
    lowest, rise = math.inf, 0.0
    for value in values:
        lowest = min(lowest, value)
        rise = max(rise, value - lowest)
    return rise


def _average(values: Sequence[float]) -> float:
    """Without the fifth at each end: a single spike does not count."""
    away = len(values) // 5
    middle = sorted(values)[away : len(values) - away]
    return math.fsum(middle) / len(middle)


def _half_width(values: Sequence[float]) -> float:
    """Half the width of the middle 68 %: one standard deviation where the values are normal, and blind to a few spikes."""
    ordered = sorted(values)
    return (_quantile(ordered, 0.84) - _quantile(ordered, 0.16)) / 2


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _memory(values: Sequence[float]) -> float:
    """Correlation of neighbours, or of every second step where that is stronger: a wave of four steps has only the latter.

    Spikes are cut to three half-widths, so that one of them does not decide.
    """
    most = 3 * _half_width(values)
    cut = [min(max(value, -most), most) for value in values]
    power = math.fsum(value * value for value in cut)
    if power <= 0:
        return 0.0
    return max((math.fsum(map(mul, cut, cut[apart:])) / power for apart in (1, 2)), key=abs)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
