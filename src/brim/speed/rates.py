"""What a device does in a second: from its data sheet and the constants, or measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from brim.memory.work import FORMATS
from brim.speed import constants

if TYPE_CHECKING:
    from brim.machine.records import GPU
    from brim.memory.work import Floats, Ints


@dataclass(frozen=True)
class Rates:
    """One device."""

    flops: dict[str, float]
    """Operations per second that large products reach, by the formats of `brim.memory.work`."""
    bandwidth: tuple[tuple[float, float], ...]
    """Bytes of a call, and bytes per second at that size; between them, lines over the logarithm of the size."""
    attention_share: float
    """Fused attention against large products."""
    kernel_seconds: float
    """Added to every call on the device."""
    launch_seconds: float
    """The host's time for every call, which hides behind the device's."""
    overlaps: bool
    """Whether a call computes and moves at the same time, and the host runs ahead: a GPU does, the CPU does not."""
    micro_batch_seconds: float = 0.0
    """Per micro-batch, whatever its size."""
    new_pages: tuple[float, float] | None = None
    """Bytes from which every result gets new pages of the system, and how many bytes of them it makes in a second. None: memory is kept,
    as a GPU's allocator does."""
    host_bytes_per_second: float = constants.DEFAULT_HOST_LINK_BYTES_PER_SECOND
    peer_bytes_per_second: float = constants.DEFAULT_HOST_LINK_BYTES_PER_SECOND
    scale: float = 1.0
    """Measured seconds over predicted ones."""
    source: str = "constants"
    """`constants`, `measured` (short measurements of the device), or `calibrated` (a micro-batch of the model was timed)."""
    notes: tuple[str, ...] = field(default=())

    def flops_of(self, formats: Ints) -> Floats:
        """The rate of each call."""
        rates: Floats = np.array([self.flops[name] for name in FORMATS])
        return rates[formats]

    def bandwidth_of(self, sizes: Floats) -> Floats:
        """Bytes per second of calls that move this many bytes."""
        if len(self.bandwidth) == 1:
            return np.full(len(sizes), self.bandwidth[0][1])
        knots, rates = zip(*self.bandwidth, strict=True)
        return np.exp(np.interp(np.log(np.maximum(sizes, 1.0)), np.log(knots), np.log(rates)))

    def new_page_seconds(self, results: Floats) -> Floats:
        """What the system needs to give memory to results of these sizes."""
        if self.new_pages is None:
            return np.zeros(len(results))
        smallest, rate = self.new_pages
        return np.where(results >= smallest, results / rate, 0.0)


def rates_of_gpu(gpu: GPU) -> Rates:
    """What a card of the catalogue does."""
    plain = constants.PLAIN_FLOPS_SHARE * (gpu.dense_flops.get("fp32") or _UNKNOWN_FP32)
    half = _tensor_flops(gpu)
    host = _reached(gpu.host_bytes_per_second) or constants.DEFAULT_HOST_LINK_BYTES_PER_SECOND
    return Rates(
        flops={"fp32": plain, "half": max(half, plain), "int8": max(half * constants.INT8_OVER_HALF, plain)},
        bandwidth=((1.0, constants.BANDWIDTH_SHARE * (gpu.bandwidth_bytes_per_second or _UNKNOWN_BANDWIDTH)),),
        attention_share=constants.ATTENTION_SHARE,
        kernel_seconds=constants.KERNEL_SECONDS,
        launch_seconds=constants.LAUNCH_SECONDS,
        overlaps=True,
        micro_batch_seconds=constants.STEP_OVERHEAD_SECONDS,
        host_bytes_per_second=host,
        peer_bytes_per_second=_reached(gpu.peer_bytes_per_second) or host,
    )


_UNKNOWN_FP32 = 20e12
_UNKNOWN_HALF = 80e12
_UNKNOWN_BANDWIDTH = 600e9
"""A card of which only the memory is known counts as a middling one: times are then for comparison only."""


def _reached(link_bytes_per_second: float | None) -> float | None:
    return link_bytes_per_second and constants.LINK_SHARE * link_bytes_per_second


def _tensor_flops(gpu: GPU) -> float:
    """Half precision: the data sheet's peak, as far as the power limit sustains it."""
    unknown = 0.0 if gpu.dense_flops else _UNKNOWN_HALF
    peak = gpu.dense_flops.get("fp16") or gpu.dense_flops.get("bf16") or unknown
    return constants.MATMUL_SHARE * peak * _powered_share(gpu, peak)


def _powered_share(gpu: GPU, peak: float) -> float:
    """Of the peak: the cube root of the power that there is over the power that it takes."""
    if gpu.vendor == "amd":
        return constants.AMD_MATMUL_SHARE
    needed = _watts_per_tflop(gpu.sm)
    if needed is None or not gpu.watts or not peak:
        return 1.0
    return float(min(1.0, (gpu.watts / (needed * peak / 1e12)) ** (1 / 3)))


def _watts_per_tflop(capability: tuple[int, int] | None) -> float | None:
    """Of the nearest older chip."""
    if capability is None:
        return None
    older = [known for known in constants.FULL_RATE_WATTS_PER_TFLOP if known <= capability]
    return constants.FULL_RATE_WATTS_PER_TFLOP[max(older)] if older else None


def rates_of_cpu(cores: float) -> Rates:
    """A CPU of which nothing was measured."""
    return Rates(
        flops={name: cores * rate for name, rate in constants.CPU_FLOPS_PER_CORE.items()},
        bandwidth=tuple((size, cores * rate) for size, rate in constants.CPU_BYTES_PER_SECOND_PER_CORE),
        attention_share=constants.ATTENTION_SHARE,
        kernel_seconds=constants.CPU_CALL_SECONDS,
        launch_seconds=0.0,
        overlaps=False,
        new_pages=(constants.CPU_KEPT_BYTES, cores * constants.CPU_NEW_PAGE_BYTES_PER_SECOND),
    )
