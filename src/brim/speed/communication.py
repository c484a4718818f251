"""Seconds that ranks spend on each other, and on the host's memory, by the engine that shards the step.

A ring over n ranks moves (n - 1) / n of the data through every rank's link for a gather or a scatter, and twice that for a sum that all
get. DDP sums gradients once per optimizer step. ZeRO-1 scatters them once and gathers the updated weights; ZeRO-2 scatters after every
micro-batch, because it keeps only its part; ZeRO-3 and FSDP2 also gather the weights for every forward and every backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from brim.speed import constants

if TYPE_CHECKING:
    from brim.speed.rates import Rates
    from brim.workload.settings import Settings

_ENGINES = ("zero1", "zero2", "zero3", "fsdp")
_GATHERING = ("zero3", "fsdp")
_SCATTERS_EVERY_TIME = ("zero2", "zero3", "fsdp")
_PAGED_BYTES = 2
"""Per trainable parameter, two moments of 8 bits that a paged optimizer fetches from the host and sends back."""
_STATE_BYTES = 16
"""Per trainable parameter, read and written by Adam in float32: gradient, weight, two moments, and the writes."""


@dataclass(frozen=True)
class Traffic:
    """What has to travel in one optimizer step."""

    micro_batch_seconds: float
    """With every micro-batch; partly hidden behind its computation."""
    step_seconds: float
    """Once per optimizer step; partly hidden behind the last backward."""
    exposed_seconds: float
    """Once per optimizer step, when nothing else runs: updated weights, and the step of an optimizer on the host."""
    optimizer_share: float
    """Of the optimizer's step, what this rank does on its device."""


ALONE = Traffic(0.0, 0.0, 0.0, 1.0)


def traffic(settings: Settings, rates: Rates, *, parameters: int, trainable: int) -> Traffic:
    """Of one rank."""
    ranks = settings.ranks
    is_paged = settings.optimizer == "paged-adamw-8bit"
    if ranks == 1 and settings.offload == "none" and not is_paged:
        return ALONE
    link = link_bytes_per_second(settings, rates)
    ring = (ranks - 1) / ranks
    latency = constants.PAIR_LATENCY_SECONDS * (ranks - 1)
    weights = parameters * _held_bytes(settings)
    gradients = trainable * (_weight_bytes(settings) if settings.sharding in _ENGINES else _gradient_bytes(settings))
    scatter = ring * gradients / link + latency if ranks > 1 else 0.0
    gather_trained = ring * trainable * _weight_bytes(settings) / link + latency if ranks > 1 else 0.0
    gather_all = ring * weights / link + latency if ranks > 1 else 0.0
    share = 1 / ranks if settings.sharding in _ENGINES else 1.0
    every = (scatter if settings.sharding in _SCATTERS_EVERY_TIME else 0.0) + 2 * gather_all * (settings.sharding in _GATHERING)
    once = 2 * scatter if settings.sharding in {"ddp", "none"} else scatter if settings.sharding == "zero1" else 0.0
    exposed = gather_trained if settings.sharding in {"zero1", "zero2"} else 0.0
    if settings.offload != "none":
        exposed += 2 * trainable * share * _weight_bytes(settings) / rates.host_bytes_per_second
        exposed += trainable * share * settings.gpus * _STATE_BYTES / constants.HOST_OPTIMIZER_BYTES_PER_SECOND
        every += 2 * share * weights / rates.host_bytes_per_second * (settings.offload == "parameters")
        share = 0.0
    if is_paged:
        exposed += 2 * _PAGED_BYTES * trainable / rates.host_bytes_per_second
    return Traffic(every, once, exposed, share)


def link_bytes_per_second(settings: Settings, rates: Rates) -> float:
    """Of one rank in a ring: the slowest link of the ring decides."""
    if settings.nodes == 1:
        return rates.peer_bytes_per_second
    # One ring crosses each node's link once in and once out, whatever the number of GPUs inside.
    return min(rates.peer_bytes_per_second, constants.LINK_SHARE * constants.NODE_LINK_BYTES_PER_SECOND)


def _held_bytes(settings: Settings) -> float:
    """Of a weight as it is gathered: a quantised base travels as it is stored."""
    return {"qlora": 0.5, "lora-8bit": 1.0}.get(settings.method, float(_weight_bytes(settings)))


def _weight_bytes(settings: Settings) -> int:
    return 4 if settings.precision == "fp32" else 2


def _gradient_bytes(settings: Settings) -> int:
    """Float32 under amp, and for adapters, which are float32 beside a half-precision base too."""
    return 4 if settings.precision == "fp32" or settings.precision.startswith("amp-") or settings.method != "full" else 2
