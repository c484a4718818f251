"""A case traced and replayed: the source's loop on no memory, then the caching allocator.

A deep model is traced by four of its layers, and `brim.memory.layers` repeats them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import brim
from brim.memory.allocator import Block, CachingAllocator, LimitReachedError
from brim.memory.layers import NotRepeatedError, deepen
from brim.memory.outside import outside
from brim.memory.sharding.shard import shard
from brim.memory.tracing.autocast import Autocast
from brim.memory.tracing.building import HALVES, build_model, find_layers, make_batch
from brim.memory.tracing.kernel_scratch import scratch_of
from brim.memory.tracing.kernels import Kernels, in_order
from brim.memory.tracing.optimizers import Stepper, make_optimizer
from brim.memory.tracing.reference import _backward, _state_tensors, _vocabulary
from brim.memory.tracing.trace import Tracer

from .eras import old_adamw, old_mean, repeated_heads, shifted_loss

if TYPE_CHECKING:
    from brim.memory.stream import Trace

    from .case import Case

_SHALLOW = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    allocated: int
    reserved: int
    device: int
    sampled: int
    seconds: float

    def on(self, case: Case, measured: float) -> tuple[int, str]:
        """The figure on the row's metric, and the metric's name."""
        if case.sampled:
            return self.sampled, "allocated, sampled"
        if case.metric == "unknown":
            pairs = (self.reserved, "reserved?"), (self.device, "device?")
            return min(pairs, key=lambda pair: abs(pair[0] - measured))
        return {"allocated": self.allocated, "reserved": self.reserved, "nvidia-smi": self.device}[case.metric], case.metric


def estimate(case: Case) -> Estimate:
    """Trace, put cuBLAS's workspaces where they are made, and run the allocator."""
    began = time.perf_counter()
    trace = _trace_deep(case)
    if case.parallel is not None:
        trace = shard(trace, case.parallel)[0]
    ranks = case.parallel.ranks if case.parallel is not None else 1
    around = outside(case.target.compute_capability or (8, 0), gpus=ranks)
    limit = brim.find_gpu(case.card).gpu.usable_bytes - around.device_bytes if case.card else None
    try:
        allocator, sampled = _replay(trace, around.workspace_bytes, limit, empties=case.empties)
    except LimitReachedError:
        allocator, sampled = _replay(trace, around.workspace_bytes, None, empties=case.empties)
    return Estimate(
        allocated=allocator.peak_allocated_bytes,
        reserved=allocator.peak_reserved_bytes,
        device=allocator.peak_reserved_bytes + around.device_bytes,
        sampled=sampled,
        seconds=time.perf_counter() - began,
    )


def _replay(trace: Trace, workspace_bytes: int, limit: int | None, *, empties: bool) -> tuple[CachingAllocator, int]:
    """The allocator at the end, and most bytes allocated at a moment when the source read them."""
    allocator = CachingAllocator(limit_bytes=limit)
    second = (max(place.round for place in trace.places) + 1) // 2
    blocks: dict[int, Block] = {}
    seen: set[str] = set()
    sampled = 0
    for event, number in zip(trace.events, trace.event_places, strict=True):
        place = trace.places[number]
        if place.phase not in seen:
            seen.add(place.phase)
            if place.phase in {"forward", "backward"}:
                allocator.allocate(workspace_bytes)
        if empties and place.phase == "forward" and place.round == second:
            empties = False
            allocator.give_back()
            allocator.peak_reserved_bytes = allocator.reserved_bytes
        if place.phase == "sample":
            sampled = max(sampled, allocator.allocated_bytes)
        if event >= 0:
            blocks[event] = allocator.allocate(trace.births[event].size)
        else:
            allocator.release(blocks.pop(~event))
    return allocator, sampled


def _trace_deep(case: Case) -> Trace:
    """By four layers, of which the second is repeated; whole, where the layers do not all do the same."""
    config = case.setup.config
    depth = config.get("num_hidden_layers", 0)
    if depth <= _SHALLOW or "layer_types" in config:
        return _Loop(case).run()
    reduced = replace(case, setup=replace(case.setup, config={**config, "num_hidden_layers": _SHALLOW}))
    try:
        return deepen(_Loop(reduced).run(), 1, depth - _SHALLOW)
    except NotRepeatedError:
        return _Loop(case).run()


class _Loop:
    """The source's training loop, on no memory."""

    def __init__(self, case: Case) -> None:
        setup, target = case.setup, case.target
        self._case = case
        self._model: Any = build_model(setup, backend=target.backend)
        case.change(self._model)
        self._trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._tracer = Tracer(
            scalar=True,
            scratch=partial(scratch_of, target),
            in_order=partial(in_order, target),
            vocabulary=_vocabulary(self._model),
        )
        self._autocast = Autocast(target.backend, HALVES[setup.precision]) if setup.precision in HALVES else None
        self._batch = make_batch(setup)
        self._batch["use_cache"] = case.caches
        self._labels = self._batch["labels"]
        if case.loss != "labels":
            self._batch.pop("labels")
        self._outputs: Any = None

    def run(self) -> Trace:
        """Two steps, or one where there is no optimizer."""
        case, tracer, model = self._case, self._tracer, self._model
        optimizer = make_optimizer(case.setup.optimizer, self._trainable, case.target)
        blocks = find_layers(model)
        ready = self._autocast.around(model) if self._autocast else contextlib.nullcontext()
        with (
            tracer,
            repeated_heads(case),
            Kernels(case.target, tracer, self._autocast),
            old_mean(case),
            ready,
            tracer.layers(blocks),
        ):
            tracer.adopt_model(model, blocks)
            given = (*self._batch.values(), self._labels)
            tracer.adopt((tensor for tensor in given if isinstance(tensor, torch.Tensor)), "buffers")
            if case.setup.padded:
                tracer.values.deny(self._batch["attention_mask"])
            rounds = 0
            for _step in range(2 if case.optimizer_steps else 1):
                for _micro in range(min(2, case.setup.accumulation)):
                    self._micro_step(rounds)
                    rounds += 1
                self._read(rounds - 1)
                if case.optimizer_steps:
                    self._optimize(optimizer, rounds - 1)
        return tracer.trace

    def _micro_step(self, round_: int) -> None:
        self._tracer.go("forward", round_, None)
        with self._autocast.region() if self._autocast else contextlib.nullcontext():
            loss = self._forward()
        self._read(round_)
        if self._case.loss == "mean":
            loss = self._outputs.logits.mean()
        if self._case.keeps == "nothing":
            self._outputs = None
        self._tracer.go("backward", round_, None)
        assert loss is not None
        _backward(loss)

    def _forward(self) -> torch.Tensor | None:
        case = self._case
        if case.loss == "hidden":
            loss: torch.Tensor = self._model.get_base_model().model(**self._batch).last_hidden_state.float().mean()
            return loss
        self._outputs = outputs = self._model(**self._batch)
        if case.loss == "labels":
            return outputs.loss  # type: ignore[no-any-return]
        if case.upcasts_logits:
            outputs.logits = outputs.logits.float()
        if case.loss == "mean":
            return None
        loss = shifted_loss(outputs.logits, self._labels)
        if case.converts_logits:
            outputs.logits = outputs.logits.float()
        return loss

    def _read(self, round_: int) -> None:
        """A moment at which the source may have read what is allocated."""
        if self._case.sampled:
            self._tracer.go("sample", round_, None)
            torch.empty(1, device="meta")

    def _optimize(self, optimizer: Stepper, round_: int) -> None:
        tracer, trainable, setup = self._tracer, self._trainable, self._case.setup
        tracer.adopt((parameter.grad for parameter in trainable if parameter.grad is not None), "gradients")
        tracer.go("clip", round_, None)
        if setup.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trainable, setup.max_grad_norm)
        tracer.go("optimizer", round_, None)
        with old_adamw(self._case):
            optimizer.step()
        tracer.adopt(_state_tensors(optimizer.state), "optimizer")
        if self._case.keeps != "always":
            self._outputs = None
        optimizer.zero_grad(set_to_none=True)
