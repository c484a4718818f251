"""The reference step that an estimate describes, run on no memory.

Forward with labels (and an attention mask where the batch is padded) and no key-value cache, backward, clipping, optimizer step,
`zero_grad(set_to_none=True)`; twice, because the optimizer's state exists from the second step on; with accumulation, two micro-batches
a step, because gradients live through the second one's forward.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.errors import UsageError
from brim.locale import _
from brim.memory.autocast import Autocast
from brim.memory.building import HALVES, build_model, find_layers, make_batch
from brim.memory.kernels import Kernels, scratch_bytes
from brim.memory.optimizers import make_optimizer
from brim.memory.quantized import true_numel
from brim.memory.stream import Trace
from brim.memory.trace import Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.setup import Setup, Target


@dataclass(frozen=True)
class Traced:
    """A step that was traced."""

    trace: Trace
    kernels: frozenset[str]
    total_parameters: int
    trainable_parameters: int
    layers: int


def trace_step(setup: Setup, target: Target) -> Traced:
    """Build the model on no memory and run two steps of it."""
    model = build_model(setup, backend=target.backend)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UsageError(_("Nothing trains: every parameter is frozen."))
    optimizer = make_optimizer(setup.optimizer, trainable, target)
    batch = make_batch(setup)
    # The truth value that transformers asks of tensors is whether a mask or the positions are trivial: they are, but for the batch's mask.
    tracer = Tracer(scalar=True, scratch=partial(scratch_bytes, target), vocabulary=_vocabulary(model))
    autocast = Autocast(target.backend, HALVES[setup.precision]) if setup.precision in HALVES else None
    kernels = Kernels(target, tracer, autocast)
    blocks = find_layers(model)
    ready = autocast.around(model) if autocast else contextlib.nullcontext()
    with tracer, kernels, ready, tracer.layers(blocks):  # kernels in backward too: checkpointing runs forward again there
        tracer.adopt_model(model, blocks)
        tracer.adopt((tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)), "buffers")
        if setup.padded:
            tracer.values.deny(batch["attention_mask"])
        rounds = 0
        for _step in range(2):
            for _micro in range(min(2, setup.accumulation)):
                tracer.go("forward", rounds, None)
                with autocast.region() if autocast else contextlib.nullcontext():
                    loss = model(**batch).loss
                if setup.precision == "amp-fp16":
                    loss = loss * torch.ones_like(loss)  # GradScaler: all that it adds are scalars; unscaling works in place
                if setup.accumulation > 1:
                    loss = loss / setup.accumulation
                tracer.go("backward", rounds, None)
                _backward(loss)
                del loss
                rounds += 1
            tracer.adopt((parameter.grad for parameter in trainable if parameter.grad is not None), "gradients")
            tracer.go("clip", rounds - 1, None)
            if setup.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(trainable, setup.max_grad_norm)
            tracer.go("optimizer", rounds - 1, None)
            optimizer.step()
            tracer.adopt(_state_tensors(optimizer.state), "optimizer")
            optimizer.zero_grad(set_to_none=True)
        del batch
        if setup.evaluation_batch is not None:
            tracer.go("evaluation", rounds - 1, None)
            with autocast.region() if autocast else contextlib.nullcontext():
                _evaluate(model, replace(setup, micro_batch=setup.evaluation_batch), tracer)
    tracer.trace.label_activations()
    return Traced(
        trace=tracer.trace,
        kernels=frozenset(kernels.chosen),
        total_parameters=true_numel(model),
        trainable_parameters=sum(parameter.numel() for parameter in trainable),
        layers=len(blocks),
    )


def _evaluate(model: nn.Module, setup: Setup, tracer: Tracer) -> None:
    """The Trainer's step of evaluation where no metrics are computed: forward without gradients; the logits die with it."""
    batch = make_batch(setup)
    tracer.adopt((tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)), "buffers")
    if setup.padded:
        tracer.values.deny(batch["attention_mask"])
    model.eval()
    with torch.no_grad():
        model(**batch)
    model.train()


def _backward(loss: torch.Tensor) -> None:
    """`loss.backward()` without its Python front: a function mode is off while it handles a call, and `Tensor.backward` is one.

    Checkpointing runs forward again inside backward, and must meet the target's kernels there too.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _vocabulary(model: nn.Module) -> int | None:
    """The size of the last dimension of the logits; None where the task has no vocabulary to predict."""
    outputs: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return int(outputs.weight.shape[0]) if outputs is not None else None


def _state_tensors(state: Any) -> Iterator[torch.Tensor]:
    for entry in state.values():
        for value in entry.values():
            with contextlib.suppress(AttributeError):
                if value.is_meta:
                    yield value
