"""What the device of a plan does in a second."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from brim.speed.rates import Rates, rates_of_cpu, rates_of_gpu

if TYPE_CHECKING:
    from brim.memory.where import Where
    from brim.workload.settings import Settings

_EMULATED_SHARE = 0.5
"""Of the float32 rate. Chosen: every operand is cast there and back."""


def rates_of(where: Where, cores: float | None = None) -> Rates:
    """By the data sheet; of the CPU by its cores."""
    if where.gpu is not None:
        return rates_of_gpu(where.gpu)
    from brim.machine.host import host

    return rates_of_cpu(cores or host().cores)


def with_emulated_bf16(rates: Rates, where: Where, settings: Settings) -> Rates:
    """A card without bfloat16 computes it in float32, and casts on the way."""
    gpu = where.gpu
    if gpu is None or gpu.bf16 or gpu.vendor == "unknown" or not settings.precision.endswith("bf16"):
        return rates
    return replace(rates, flops={**rates.flops, "half": _EMULATED_SHARE * rates.flops["fp32"]})
