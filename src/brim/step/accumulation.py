"""`calculate_gradient_accumulation`: a target batch as micro-batches of what fits, with nothing left over."""

from __future__ import annotations

from typing import TypedDict

from brim.errors import UsageError
from brim.locale import _
from brim.step.cuts import cut


class GradientAccumulation(TypedDict):
    """How one optimizer step is sliced."""

    accumulation_steps: int
    effective_batch_size: int
    batch_size_difference: int
    """Effective minus target: always 0, because slices may differ by one sequence."""
    slices: list[int]
    """Every micro-batch of the step."""


def calculate_gradient_accumulation(target_batch_size: int, actual_batch_size: int) -> GradientAccumulation:
    """Slice a step of `target_batch_size` sequences into micro-batches of at most `actual_batch_size`.

    The target is met exactly: 50 in slices of at most 8 is one slice of 8 and six of 7. A mean over such slices must weigh each by what it
    holds, by its sequences or better by its supervised tokens.
    """
    target = _positive("target_batch_size", target_batch_size)
    found = cut(target, _positive("actual_batch_size", actual_batch_size))
    slices = list(found.slices) or [found.micro_batch] * found.accumulation
    return {
        "accumulation_steps": found.accumulation,
        "effective_batch_size": sum(slices),
        "batch_size_difference": sum(slices) - target,
        "slices": slices,
    }


def _positive(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    text = _("{name} is {value!r}, and must be a whole number of at least 1.").format(name=name, value=value)
    raise UsageError(text, hint=_("Write calculate_gradient_accumulation(target_batch_size=64, actual_batch_size=8)."))
