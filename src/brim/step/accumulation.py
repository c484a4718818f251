"""`calculate_gradient_accumulation`: a target batch as micro-batches of what fits, with nothing left over."""

from __future__ import annotations

import math
from typing import TypedDict

from brim.errors import UsageError
from brim.locale import _
from brim.step.cuts import cut


class GradientAccumulation(TypedDict):
    """How one optimizer step is sliced: into equal micro-batches for a plain loop, and into the fewest for one that weighs them."""

    batch_size: int
    """Sequences in every micro-batch of a plain loop: the largest divisor of the target that is at most what fits."""
    accumulation_steps: int
    """Micro-batches of a plain loop: `batch_size` times this is exactly the target."""
    effective_batch_size: int
    """The target."""
    batch_size_difference: int
    """Effective minus target: always 0."""
    slices: list[int]
    """The fewest micro-batches, which may differ by one sequence."""


def calculate_gradient_accumulation(target_batch_size: int, actual_batch_size: int) -> GradientAccumulation:
    """Slice a step of `target_batch_size` sequences into micro-batches of at most `actual_batch_size`.

    The target is met exactly. A plain loop takes equal micro-batches: 50 with at most 8 is 10 of 5, a loader with `batch_size` 5 and
    `accumulation_steps` 10. A loop that weighs each micro-batch by its supervised tokens, as `brim.GradientAccumulator` and
    `brim.steps` do, needs fewer: `slices` is one of 8 and six of 7.
    """
    target, most = _positive("target_batch_size", target_batch_size), _positive("actual_batch_size", actual_batch_size)
    found = cut(target, most)
    equal = _largest_divisor(target, most)
    return {
        "batch_size": equal,
        "accumulation_steps": target // equal,
        "effective_batch_size": target,
        "batch_size_difference": 0,
        "slices": list(found.slices) or [found.micro_batch] * found.accumulation,
    }


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return max(divisor for low in small for divisor in (low, number // low) if divisor <= most)


def _positive(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    text = _("{name} is {value!r}, and must be a whole number of at least 1.").format(name=name, value=value)
    raise UsageError(text, hint=_("Write calculate_gradient_accumulation(target_batch_size=64, actual_batch_size=8)."))
