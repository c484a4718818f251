"""What data-parallel training does to the memory of one rank.

Every rank runs the same step on its own sequences, so the activations are those of one device; what changes is who holds the parameters,
gradients and optimizer state, and the buffers in which they travel. `shard` rewrites the trace of one device into that of a rank: one
trace serves all strategies and all numbers of ranks, and needs no torch. Of ranks that differ it describes the one that needs most.

- DDP holds everything whole, and beside it buckets of the size of all gradients.
- ZeRO-1 splits the optimizer's state (and float32 copies of the parameters), ZeRO-2 also the gradients, ZeRO-3 also the parameters
  (`brim.memory.sharding.zero`).
- FSDP2 splits all of them, module by module (`brim.memory.sharding.fsdp`).

The libraries' own buffers (NCCL's) are in `brim.memory.outside`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from brim.memory.sharding.walk import Engine, Parameter
from brim.workload.words import Offload, Sharding

if TYPE_CHECKING:
    from brim.memory.stream import Birth, Trace

MIB = 1 << 20
# torch/csrc/distributed/c10d/reducer.hpp (`kDefaultFirstBucketBytes`) and torch/nn/parallel/distributed.py (`_DEFAULT_BUCKET_CAP_MB`):
# the first bucket is small, so that the first reduction starts early.
_FIRST_BUCKET_BYTES = 1 * MIB
_BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True)
class Parallel:
    """How a step is spread over ranks."""

    sharding: Sharding
    ranks: int
    offload: Offload = "none"
    """FSDP2 knows one offload, of everything; ZeRO-1 and 2 know none of parameters, and offload the optimizer's part then."""
    master: bool = False
    """FSDP2's mixed precision: shards of what trains are float32, and gathered in the dtype of the trace. ZeRO always holds float32."""
    hidden: int | None = None
    """The model's width, from which Hugging Face fills in DeepSpeed's `auto` buckets; None: DeepSpeed's own defaults."""
    gradient_as_bucket_view: bool = False
    """DDP: gradients live in the buckets."""
    splits_packed: bool = True
    """FSDP2: 4-bit weights are stored in a floating-point dtype (`bnb_4bit_quant_storage`), without which they cannot be split."""
    synchronise_each: bool = False
    """DDP and FSDP2: reduce after every micro-batch (accelerate's `sync_each_batch`) instead of once a step."""
    overlap: bool = False
    """ZeRO-1 and 2: `overlap_comm`, which takes a second bucket."""
    live_elements: int = 1_000_000_000
    """ZeRO-3: `stage3_max_live_parameters`; so many are gathered ahead of their use."""
    reuse_elements: int = 1_000_000_000
    """ZeRO-3: `stage3_max_reuse_distance`; parameters that are used again within so many elements stay gathered."""


def shard(trace: Trace, parallel: Parallel) -> tuple[Trace, list[int]]:
    """The trace of one rank, and for each of its births the birth of `trace` that it comes from, or -1 for one that is new."""
    if parallel.sharding == "none":
        return replace(trace), list(range(len(trace.births)))
    return _engine(_as_loaded(trace), parallel).run()


def _as_loaded(trace: Trace) -> Trace:
    """Without storages that live only while the model is loaded: engines shard parameters in the same way, however they were loaded."""
    passing = {
        ~event
        for event, place in zip(trace.events, trace.event_places, strict=True)
        if event < 0 and trace.places[place].phase == "build"
    }
    if not passing:
        return trace
    kept = [pair for pair in zip(trace.events, trace.event_places, strict=True) if max(pair[0], ~pair[0]) not in passing]
    return replace(trace, events=[event for event, _ in kept], event_places=[place for _, place in kept])


def _engine(trace: Trace, parallel: Parallel) -> Engine:
    from brim.memory.sharding.fsdp import FullyShard
    from brim.memory.sharding.zero import Zero3, ZeroOptimizer

    if parallel.sharding == "ddp":
        return _DistributedDataParallel(trace, parallel)
    return {"fsdp": FullyShard, "zero3": Zero3}.get(parallel.sharding, ZeroOptimizer)(trace, parallel)


class _DistributedDataParallel(Engine):
    """Gradients are copied into buckets, reduced there, and copied back; or they live there from the start."""

    def __init__(self, trace: Trace, parallel: Parallel) -> None:
        super().__init__(trace)
        self._parallel = parallel

    def finish(self, phase: str, round_: int) -> None:  # noqa: ARG002
        """The wrapper makes its buckets when the model is built."""
        if phase == "build":
            for size in ddp_buckets(self.reading.trainable):
                self.writer.bear(size, "ddp:bucket")

    def birth(self, number: int, birth: Birth) -> None:
        """A gradient that is to live in its bucket is copied there as soon as it is complete."""
        super().birth(number, birth)
        home = self.reading.gradients.get(number)
        if home is None or not self._parallel.gradient_as_bucket_view:
            return
        is_tied = self.reading.tied is not None and birth.size == self.writer.old.births[self.reading.tied].size
        if not is_tied and (self._parallel.synchronise_each or self.reading.is_last_round(self.now.round)):
            self.writer.drop(number)
            self.writer.drop(home)


def ddp_buckets(trainable: list[Parameter]) -> list[int]:
    """Bytes of DDP's buckets: filled from the end of the model, one dtype each, closed when they are full."""
    buckets: list[int] = []
    for item_bytes in sorted({parameter.item_bytes for parameter in trainable}):
        limit, filled = _FIRST_BUCKET_BYTES, 0
        for parameter in reversed(trainable):
            if parameter.item_bytes == item_bytes:
                filled += parameter.size
                if filled >= limit:
                    buckets.append(filled)
                    limit, filled = _BUCKET_BYTES, 0
        if filled:
            buckets.append(filled)
    return buckets
