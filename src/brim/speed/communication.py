"""Seconds that ranks spend on each other, and on the host's memory, by the engine that shards the step.

**What moves.** A gather or a scatter over n ranks moves (n - 1) / n of the data through every rank, a sum that all get twice that. DDP sums
gradients once per optimizer step. ZeRO-1 sums them once and gathers the updated weights; ZeRO-2 sums after every micro-batch, because it
keeps only its part; ZeRO-3 and FSDP2 scatter gradients and gather the weights for every forward and every backward. (DeepSpeed's stages 1
and 2 sum for all ranks even where their option is called `reduce_scatter`: `use_multi_rank_bucket_allreduce` is on by default.)

**Over which link.** The GPUs of a node reduce among themselves before a byte leaves it: the node's links carry (nodes - 1) / nodes of the
data once each way, whatever the number of GPUs inside, and the links inside carry their part beside it, chunk by chunk. So a transfer
takes as long as the slower of the two links, and the time until the first byte has gone round.

**How long that takes.** A ring passes every rank, so its latency grows with their number: ranks - nodes hops inside nodes and nodes - 1
between them. A sum may also go up and down a tree, which is only as deep as a node has GPUs and as the logarithm of the nodes; NCCL takes
what is faster, and so does this. Every call pays: DDP makes one for each bucket of 25 MiB, DeepSpeed for each of its buckets, engines
that gather weights for each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brim.speed import constants
from brim.speed.links import Link, Network, inside_link, read_link

if TYPE_CHECKING:
    from brim.machine.records import GPU
    from brim.speed.rates import Rates
    from brim.workload.settings import Settings

_ENGINES = ("zero1", "zero2", "zero3", "fsdp")
_GATHERING = ("zero3", "fsdp")
_SUMS_EVERY_TIME = ("zero2", "zero3", "fsdp")
_NEVER_HIDES = ("zero1", "zero2", "zero3")
"""DeepSpeed without `overlap_comm`, as the memory figures and the emitted files have it, moves data on the stream that computes."""
_PAGED_BYTES = 2
"""Per trainable parameter, two moments of 8 bits that a paged optimizer fetches from the host and sends back."""
_STATE_BYTES = 16
"""Per trainable parameter, read and written by Adam in float32: gradient, weight, two moments, and the writes."""


@dataclass(frozen=True)
class Busy:
    """Seconds that links are busy, hidden behind computation or not."""

    inside: float = 0.0
    between: float = 0.0
    host: float = 0.0

    def __add__(self, other: Busy) -> Busy:
        return Busy(self.inside + other.inside, self.between + other.between, self.host + other.host)

    def __mul__(self, times: float) -> Busy:
        return Busy(self.inside * times, self.between * times, self.host * times)


@dataclass(frozen=True)
class Moved:
    """One transfer, or several: how long it takes, and how long each link is busy with it."""

    seconds: float = 0.0
    busy: Busy = Busy()

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.seconds + other.seconds, self.busy + other.busy)

    def __mul__(self, times: float) -> Moved:
        return Moved(self.seconds * times, self.busy * times)


NOTHING = Moved()


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
    overlap: float = constants.OVERLAP_SHARE
    """Of what can hide behind computation, the share that does."""
    micro_batch_busy: Busy = Busy()
    """Links, with every micro-batch."""
    step_busy: Busy = Busy()
    """Links, once per optimizer step."""


ALONE = Traffic(0.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Group:
    """Ranks that move data together."""

    gpus: int
    """In a node."""
    nodes: int
    network: Network

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.gpus * self.nodes

    def around(self, size: float, calls: int = 1) -> Moved:
        """Gather, or reduce and scatter, so many bytes over a ring, in so many calls."""
        return self._moved(size, self._ring(), calls)

    def summed(self, size: float, calls: int = 1) -> Moved:
        """Sum so many bytes for all ranks, in so many calls: twice round the ring, or up and down a tree."""
        hops = min(self._ring() * 2, self._tree(), key=lambda each: each.inside + each.between)
        return self._moved(2 * size, hops, calls)

    def _moved(self, size: float, hops: Busy, calls: int) -> Moved:
        """The links work at the same time, chunk by chunk; the hops of a call come one after the other."""
        if self.ranks == 1:
            return NOTHING
        inside = (self.gpus - 1) / self.gpus * size / self.network.inside.bytes_per_second
        between = (self.nodes - 1) / self.nodes * size / self.network.between.bytes_per_second
        waiting = calls * (constants.CALL_SECONDS + hops.inside + hops.between)
        return Moved(max(inside, between) + waiting, Busy(inside, between) + hops * calls)

    def _ring(self) -> Busy:
        links = self.network
        return Busy((self.ranks - self.nodes) * links.inside.ring_hop_seconds, (self.nodes - 1) * links.between.ring_hop_seconds)

    def _tree(self) -> Busy:
        links = self.network
        deep = math.ceil(math.log2(self.nodes))
        return Busy(2 * (self.gpus - 1) * links.inside.tree_hop_seconds, 2 * deep * links.between.tree_hop_seconds)


def network_of(rates: Rates, gpus: int, *, gpu: GPU | None = None, link: Link | None = None) -> Network:
    """The wires of nodes with so many GPUs; the default between nodes where no link is given."""
    return Network(inside_link(gpu, rates, gpus), link or read_link(constants.NODE_LINK))


def traffic(
    settings: Settings,
    rates: Rates,
    *,
    parameters: int,
    trainable: int,
    network: Network | None = None,
    layers: int = 1,
    width: int | None = None,
) -> Traffic:
    """Of one rank. `layers` are gathered one by one; from the model's `width` the Trainer derives DeepSpeed's buckets."""
    is_paged = settings.optimizer == "paged-adamw-8bit"
    if settings.ranks == 1 and settings.offload == "none" and not is_paged:
        return ALONE
    group = Group(settings.gpus, settings.nodes, network or network_of(rates, settings.gpus))
    engine, weight_bytes = settings.sharding, _weight_bytes(settings)
    share = 1 / settings.ranks if engine in _ENGINES else 1.0
    weights = parameters * _held_bytes(settings)
    every, once, exposed = NOTHING, NOTHING, NOTHING
    if engine in _GATHERING:
        every = group.around(weights, layers + 1) * 2 + group.around(trainable * weight_bytes, layers + 1)
    elif engine in _ENGINES:
        bucket = width * width if width else constants.GATHER_BUCKET_ELEMENTS
        summed = group.summed(trainable * weight_bytes, math.ceil(trainable / bucket))
        every, once = (summed, NOTHING) if engine in _SUMS_EVERY_TIME else (NOTHING, summed)
        exposed = group.around(trainable * weight_bytes, math.ceil(trainable / constants.GATHER_BUCKET_ELEMENTS))
    else:
        size = trainable * _gradient_bytes(settings)
        once = group.summed(size, math.ceil(size / constants.DDP_BUCKET_BYTES))
    if settings.offload != "none":
        exposed += _over_host(2 * trainable * share * weight_bytes, rates)
        # The step of an optimizer on the host is waited for like a transfer, and keeps no link busy.
        exposed += Moved(trainable * share * settings.gpus * _STATE_BYTES / constants.HOST_OPTIMIZER_BYTES_PER_SECOND)
        every += _over_host(2 * share * weights, rates) * (settings.offload == "parameters")
        share = 0.0
    if is_paged:
        exposed += _over_host(2 * _PAGED_BYTES * trainable, rates)
    return Traffic(
        every.seconds,
        once.seconds,
        exposed.seconds,
        share,
        overlap=0.0 if engine in _NEVER_HIDES else constants.OVERLAP_SHARE,
        micro_batch_busy=every.busy,
        step_busy=once.busy + exposed.busy,
    )


def _over_host(size: float, rates: Rates) -> Moved:
    seconds = size / rates.host_bytes_per_second
    return Moved(seconds, Busy(host=seconds))


def _held_bytes(settings: Settings) -> float:
    """Of a weight as it is gathered: a quantised base travels as it is stored."""
    return {"qlora": 0.5, "lora-8bit": 1.0}.get(settings.method, float(_weight_bytes(settings)))


def _weight_bytes(settings: Settings) -> int:
    return 4 if settings.precision == "fp32" else 2


def _gradient_bytes(settings: Settings) -> int:
    """Float32 under amp, and for adapters, which are float32 beside a half-precision base too."""
    return 4 if settings.precision == "fp32" or settings.precision.startswith("amp-") or settings.method != "full" else 2
