"""Measured figures in the place of constants: what this CPU does in a second, and what a micro-batch of the model really took.

Short measurements of the machine give the shape of the curve over micro-batches: what a call costs however small it is, what caches and
new pages do to large ones. One timed micro-batch of the model gives the level: operators are not all alike, and whatever makes this
model's slower than those measured here does so at every size.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brim.speed import constants
from brim.speed.rates import Rates
from brim.speed.roofline import Roofline

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.memory.work import Work

MEASURED = "measured"
CALIBRATED = "calibrated"

_PRODUCT_SIZE = 384
_CURVE_BYTES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 3 << 22, 3 << 23, 1 << 26)
"""Of one operand."""
_ROW = 256
"""Numbers over which a softmax goes."""
_BLOCKS = 12
_BLOCK_WIDTH = 4
_BLOCK_CALLS = 9
"""That the trace counts in one block below: four forward (norm, product, function, sum) and five backward (function, two products, the
sum for the bias, norm)."""
_LEAST_REPEATS = 3


def calibrated(rates: Rates, work: Work, batch: int, length: int, measured_seconds: float) -> Rates:
    """The rates under which forward and backward of this micro-batch take as long as they were measured to."""
    predicted = Roofline(work, replace(rates, scale=1.0)).micro_batch_seconds(batch, length)
    return replace(rates, scale=measured_seconds / predicted, source=CALIBRATED)


def measure_cpu(seconds: float = 1.5, *, half: bool | None = None) -> Rates:
    """What this CPU does with as many threads as torch uses now, in about this many seconds.

    `half`: whether to time products in bfloat16 too. Some virtual machines promise instructions that they do not have, and a product then
    ends the process, so by default it is done only where ONEDNN_MAX_CPU_ISA says what may be used.
    """
    each = seconds / (len(_CURVE_BYTES) + 5)
    half = "ONEDNN_MAX_CPU_ISA" in os.environ if half is None else half
    plain = _product_flops("float32", each)
    ratio = constants.CPU_FLOPS_PER_CORE["half"] / constants.CPU_FLOPS_PER_CORE["fp32"]
    halved = _product_flops("bfloat16", each) if half else plain * ratio
    return Rates(
        flops={"fp32": plain, "half": halved, "int8": halved},
        bandwidth=tuple(_bandwidth(size, each) for size in _CURVE_BYTES),
        attention_share=constants.ATTENTION_SHARE,
        kernel_seconds=_call_seconds(2 * each),
        launch_seconds=0.0,
        overlaps=False,
        new_pages=_new_pages(each),
        source=MEASURED,
    )


def _product_flops(dtype: str, budget_seconds: float) -> float:
    """Of a product as large as a small model's."""
    import torch

    left, right = (torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=getattr(torch, dtype)) for _side in range(2))
    return 2 * _PRODUCT_SIZE**3 / _seconds_of(lambda: left @ right, budget_seconds)


def _bandwidth(size: int, budget_seconds: float) -> tuple[float, float]:
    """Bytes of a call whose operands have this size, and bytes per second.

    Over what a step is made of: a product of numbers, a function of each, a softmax. Results go where there is memory already: new pages
    are counted apart.
    """
    import torch

    rows = torch.ones(size // (4 * _ROW), _ROW)
    other, result = torch.ones_like(rows), torch.empty_like(rows)
    calls: list[tuple[int, Callable[[], Any]]] = [
        (3, lambda: torch.mul(rows, other, out=result)),
        (2, lambda: torch.exp(rows, out=result)),
        (2, lambda: torch.log_softmax(rows, 1, out=result)),
    ]
    seconds = sum(_seconds_of(call, budget_seconds / len(calls)) for _operands, call in calls)
    moved = size * sum(operands for operands, _call in calls)
    return moved / len(calls), moved / seconds


def _new_pages(budget_seconds: float) -> tuple[float, float]:
    """From which size on results are new to the process, and how fast the system makes them."""
    import torch

    # Whoever fixes glibc's threshold, as `brim.machine.child` does, has new pages from there on.
    smallest = int(os.environ.get("MALLOC_MMAP_THRESHOLD_") or constants.CPU_KEPT_BYTES)
    size = max(smallest, constants.CPU_KEPT_BYTES) * 5 // 4
    numbers = torch.ones(size // 4)
    kept = torch.empty_like(numbers)
    old = _seconds_of(lambda: torch.neg(numbers, out=kept), budget_seconds / 2)
    new = _seconds_of(lambda: torch.neg(numbers), budget_seconds / 2)
    # On a system that keeps even these, next to nothing is added.
    return float(smallest), size / max(new - old, 0.01 * old)


def _call_seconds(budget_seconds: float) -> float:
    """Of a call that has next to nothing to compute, with the modules, the views and the autograd around it."""
    import torch
    from torch.nn import functional

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(_BLOCK_WIDTH)
            self.linear = torch.nn.Linear(_BLOCK_WIDTH, _BLOCK_WIDTH)

        def forward(self, numbers: Any) -> Any:
            inner = self.linear(self.norm(numbers)).view(1, -1, 2, _BLOCK_WIDTH // 2).transpose(1, 2)
            return numbers + functional.gelu(inner).transpose(1, 2).reshape(numbers.shape)

    model = torch.nn.Sequential(*(Block() for _block in range(_BLOCKS)))
    numbers = torch.ones(1, 2, _BLOCK_WIDTH)

    def run() -> None:
        model(numbers).sum().backward()
        model.zero_grad(set_to_none=True)

    return _seconds_of(run, budget_seconds) / (_BLOCKS * _BLOCK_CALLS)


def _seconds_of(call: Callable[[], Any], budget_seconds: float) -> float:
    """The fastest of as many runs as the budget allows, after one that is not counted: what others do on the machine only adds."""
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _LEAST_REPEATS or time.perf_counter() - began < budget_seconds:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return min(times)
