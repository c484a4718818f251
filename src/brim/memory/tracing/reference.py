"""The reference step that an estimate describes, run on no memory.

Forward with labels (and an attention mask where the batch is padded) and no key-value cache, backward, clipping, optimizer step,
`zero_grad(set_to_none=True)`; twice, because the optimizer's state exists from the second step on; with accumulation, two micro-batches
a step, because gradients live through the second one's forward.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from brim.errors import UsageError
from brim.locale import _
from brim.memory.layers import NotRepeatedError, repeat_chunks
from brim.memory.scratch import scratch_name
from brim.memory.stream import Trace
from brim.memory.tracing.autocast import Autocast, meta_counts_as_cpu
from brim.memory.tracing.building import (
    ALL_LINEAR,
    HALVES,
    attention_in_force,
    build_model,
    find_layers,
    lora_targets,
    make_batch,
)
from brim.memory.tracing.kernel_scratch import scratch_of
from brim.memory.tracing.kernels import Kernels, in_order
from brim.memory.tracing.loading import load_on_card
from brim.memory.tracing.losses import TRACED_CHUNKS, chunks_of, few_chunks
from brim.memory.tracing.optimizers import Stepper, make_optimizer
from brim.memory.tracing.quantized import BITS, true_numel
from brim.memory.tracing.trace import Tracer
from brim.memory.work import Work, work_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.memory.setup import Setup, Target
    from brim.workload.words import Optimizer, Precision


@dataclass(frozen=True)
class Traced:
    """A step that was traced."""

    trace: Trace
    kernels: frozenset[str]
    attention: str | None
    """In force; None for a module that is not transformers'."""
    total_parameters: int
    trainable_parameters: int
    layers: int
    notes: tuple[str, ...] = ()
    """What was done otherwise than asked, in words that `brim.memory.assumptions` knows."""
    layer_parameters: tuple[tuple[int, int], ...] = ()
    """Of each layer, all and trainable."""
    work: Work | None = None
    """What the step computes; None in a family, which knows it for every shape."""


def trace_step(setup: Setup, target: Target, *, whole: bool = True) -> Traced:
    """Build the model on no memory and run two steps of it; if not `whole`, only to the end of the first backward.

    Of a chunked loss a few chunks are run, and the others are repeated from them.
    """
    more_chunks = chunks_of(setup.micro_batch, setup.length) - TRACED_CHUNKS if setup.loss == "chunked" else 0
    if more_chunks > 0 and setup.evaluation_batch in {None, setup.micro_batch}:
        traced = trace_unrepeated(setup, target, whole=whole, few=True)
        with contextlib.suppress(NotRepeatedError):
            return replace(traced, trace=repeat_chunks(traced.trace, 1, more_chunks))
    return trace_unrepeated(setup, target, whole=whole)


def trace_unrepeated(setup: Setup, target: Target, *, whole: bool = True, few: bool = False) -> Traced:
    """The same with every chunk of the loss; `few`: with `TRACED_CHUNKS` of them, and their numbers in the trace."""
    model = build_model(setup, backend=target.backend)
    _keep_all_layers(model)
    batch = make_batch(setup)

    def prepare(tracer: Tracer) -> None:
        tracer.adopt((tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)), "buffers")
        if setup.padded:
            tracer.values.deny(batch["attention_mask"])

    def evaluate(tracer: Tracer, round_: int) -> None:
        batch.clear()
        if setup.evaluation_batch is not None:
            tracer.go("evaluation", round_, None)
            _evaluate(model, replace(setup, micro_batch=setup.evaluation_batch), tracer)

    # The truth value that transformers asks of tensors is whether a mask or the positions are trivial: they are, but for the batch's mask.
    stage = Stage(model, target, setup.precision, scalar=True)
    with few_chunks(stage.tracer.enter_chunk) if few else contextlib.nullcontext():
        traced = stage.run(setup, lambda: model(**batch).loss, prepare=prepare, evaluate=evaluate, whole=whole)
    return replace(traced, notes=tuple(_notes(setup, model)))


def _keep_all_layers(model: nn.Module) -> None:
    """Turn LayerDrop (the BART family) off: it skips layers at random, and a step with all layers needs the most memory."""
    for module in model.modules():
        if isinstance(getattr(module, "layerdrop", None), float):
            module.layerdrop = 0.0  # type: ignore[assignment]


def with_work(traced: Traced, shape: tuple[int, int], inserted: tuple[tuple[int, int], ...] = (), trains: float = 1.0) -> Traced:
    """Count what one traced shape computes; other shapes are then in proportion to their tokens."""
    return replace(traced, work=work_of({shape: traced.trace}, inserted, trains))


def _notes(setup: Setup, model: nn.Module) -> Iterator[str]:
    if setup.method != "full" and not setup.lora_targets and lora_targets(setup) == ALL_LINEAR:
        yield ALL_LINEAR
    if setup.method in BITS:
        if setup.task == "classification":
            yield "head-not-quantised"
        # bitsandbytes replaces linear layers; experts that are one tensor of three dimensions are none.
        if any(parameter.dim() == 3 and parameter.is_floating_point() for parameter in model.parameters()):
            yield "experts-not-quantised"


class Recipe(Protocol):
    """What the loop around forward and backward must know."""

    @property
    def accumulation(self) -> int: ...  # noqa: D102
    @property
    def precision(self) -> Precision: ...  # noqa: D102
    @property
    def optimizer(self) -> Optimizer: ...  # noqa: D102
    @property
    def max_grad_norm(self) -> float | None: ...  # noqa: D102


class Stage:
    """A module on no memory, and everything that watches it run."""

    def __init__(self, model: nn.Module, target: Target, precision: Precision, *, scalar: bool | None) -> None:
        self._model = model
        self._target = target
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._trainable:
            raise UsageError(_("Nothing trains: every parameter is frozen."))
        self.tracer = Tracer(
            scalar=scalar,
            scratch=partial(scratch_of, target),
            in_order=partial(in_order, target),
            vocabulary=_vocabulary(model),
        )
        self._autocast = Autocast(target.backend, HALVES[precision]) if precision in HALVES else None
        self._kernels = Kernels(target, self.tracer, self._autocast)

    def run(
        self,
        recipe: Recipe,
        forward: Callable[[], torch.Tensor],
        *,
        prepare: Callable[[Tracer], None],
        evaluate: Callable[[Tracer, int], None],
        whole: bool = True,
    ) -> Traced:
        """Two optimizer steps, and what comes after training; or only forward and backward of the first."""
        model, tracer, autocast = self._model, self.tracer, self._autocast
        optimizer = make_optimizer(recipe.optimizer, self._trainable, self._target)
        blocks = find_layers(model)
        ready = autocast.around(model) if autocast else contextlib.nullcontext()
        # Kernels in backward too: checkpointing runs forward again there.
        with meta_counts_as_cpu(), tracer, self._kernels, ready, tracer.layers(blocks):
            tracer.adopt_model(model, blocks, load_on_card if self._target.backend == "cuda" else None)
            prepare(tracer)
            rounds = 0
            for _step in range(2):
                for _micro in range(min(2, recipe.accumulation) if whole else 1):
                    self._micro_step(recipe, forward, rounds)
                    rounds += 1
                if not whole:
                    break
                self._optimize(recipe, optimizer, rounds - 1)
            else:
                with self._region():
                    evaluate(tracer, rounds - 1)
        tracer.trace.label_activations()
        return Traced(
            trace=tracer.trace,
            kernels=frozenset(self._kernels.chosen),
            attention=attention_in_force(model),
            total_parameters=true_numel(model),
            trainable_parameters=sum(parameter.numel() for parameter in self._trainable),
            layers=len(blocks),
            layer_parameters=tuple((true_numel(block), _trainable_numel(block)) for block in blocks),
        )

    def _micro_step(self, recipe: Recipe, forward: Callable[[], torch.Tensor], round_: int) -> None:
        self.tracer.go("forward", round_, None)
        with self._region():
            loss = forward()
        if recipe.precision == "amp-fp16":
            loss = loss * torch.ones_like(loss)  # GradScaler: all that it adds are scalars; unscaling works in place
        if recipe.accumulation > 1:
            loss = loss / recipe.accumulation
        self.tracer.go("backward", round_, None)
        _backward(loss)
        # Tensors that graph nodes still hold (bitsandbytes' 8-bit inputs) are freed with the loss, outside of any layer.
        self.tracer.go("backward", round_, None)

    def _optimize(self, recipe: Recipe, optimizer: Stepper, round_: int) -> None:
        tracer, trainable = self.tracer, self._trainable
        tracer.adopt((parameter.grad for parameter in trainable if parameter.grad is not None), "gradients")
        tracer.go("clip", round_, None)
        if recipe.max_grad_norm is not None:
            if self._target.backend == "cuda":
                largest = max(parameter.numel() for parameter in trainable)
                tracer.transient((largest,), scratch_name("foreach_norm"))
            torch.nn.utils.clip_grad_norm_(trainable, recipe.max_grad_norm)
        tracer.go("optimizer", round_, None)
        optimizer.step()
        tracer.adopt(_state_tensors(optimizer.state), "optimizer")
        optimizer.zero_grad(set_to_none=True)

    def _region(self) -> contextlib.AbstractContextManager[None]:
        return self._autocast.region() if self._autocast else contextlib.nullcontext()


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


def _trainable_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _state_tensors(state: Any) -> Iterator[torch.Tensor]:
    for entry in state.values():
        for value in entry.values():
            with contextlib.suppress(AttributeError):
                if value.is_meta:
                    yield value
