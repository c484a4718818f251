"""Seconds of one micro-batch and of one optimizer step: every call takes as long as its operations or its bytes do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from brim.memory.work import PHASES, Work
from brim.speed.rates import Rates

if TYPE_CHECKING:
    from brim.memory.work import Floats

_ATTENTION = ("attention", "attention_backward")
_OPTIMIZER = PHASES.index("optimizer")


@dataclass(frozen=True)
class Roofline:
    """One structure on one device."""

    work: Work
    rates: Rates

    def micro_batch_seconds(self, batch: float, length: float) -> float:
        """Forward and backward, recomputation included."""
        return float(sum(self.phase_seconds(batch, length)[:_OPTIMIZER])) + self.rates.micro_batch_seconds * self.rates.scale

    def optimizer_seconds(self) -> float:
        """Clipping and the optimizer's step, on one device that holds everything."""
        return self.phase_seconds(self.work.batch, self.work.length)[_OPTIMIZER]

    def phase_seconds(self, batch: float, length: float) -> list[float]:
        """Forward, backward, optimizer."""
        calls = self.call_seconds(batch, length) * self.work.times
        device = np.bincount(self.work.phases, weights=calls, minlength=len(PHASES))
        counts = np.bincount(self.work.phases, weights=self.work.times, minlength=len(PHASES))
        host = counts * self.rates.launch_seconds
        together = np.maximum(device, host) if self.rates.overlaps else device + host
        return [float(seconds) * self.rates.scale for seconds in together]

    def call_seconds(self, batch: float, length: float) -> Floats:
        """One run of each call, on the device."""
        rates, work = self.rates, self.work
        shares = np.where(np.isin(work.operators, _ATTENTION), rates.attention_share, 1.0)
        compute = work.flops_at(batch, length) / (rates.flops_of(work.formats) * shares)
        sizes = work.bytes_at(batch, length)
        move = sizes / rates.bandwidth_of(sizes)
        if rates.new_pages is not None:
            move = move + rates.new_page_seconds(_result_bytes(work, batch, length))
        return (np.maximum(compute, move) if rates.overlaps else compute + move) + rates.kernel_seconds


def _result_bytes(work: Work, batch: float, length: float) -> Floats:
    """Of each call, the tensor that it makes: the last of its operands. What works in place makes none."""
    growth = work.operand_growth
    sizes = work.operand_bytes * (batch / work.batch) ** growth[:, 0] * (length / work.length) ** growth[:, 1]
    results = np.zeros(len(work.operators))
    results[work.operand_calls] = sizes  # numpy keeps the last of those that go to one place
    in_place = np.array([operator.endswith("_") for operator in work.operators])
    return np.where(in_place, 0.0, results)
