"""Any `torch.nn.Module` with a step of its own, traced whole.

The module is copied onto the meta device without its values, and the user's function is called there: `step(model, micro_batch, seq_len)`
makes the tensors of one micro-batch and returns the loss.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.errors import BrimError, RunError, UnsupportedError, UsageError
from brim.locale import _
from brim.memory.tracing.building import refusals
from brim.memory.tracing.reference import Stage, Traced
from brim.memory.tracing.values import DataDependentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.memory.setup import Target
    from brim.memory.tracing.trace import Tracer
    from brim.workload.settings import Settings

    Step = Callable[[nn.Module, int, int], Any]


def without_memory(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and no values; what is shared stays shared."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in memo:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        text = _("{name} cannot be copied without its values: {why}.").format(name=type(module).__name__, why=error)
        raise UnsupportedError(text, hint=_("Give a function that builds it: module:function.")) from error


def trace_module(module: nn.Module, step: Step | None, settings: Settings, target: Target) -> tuple[Traced, bool]:
    """Two steps of the module; and whether the step asked for values of tensors, which a trace has not."""
    if step is None:
        return _trace_as_transformers(without_memory(module), settings, target), False
    for scalar in (None, True):
        fresh = without_memory(module)
        fresh.train()
        try:
            return _trace(fresh, step, settings, target, scalar), scalar is not None
        except DataDependentError:
            continue
    raise UnsupportedError(_("The step depends on the values of tensors, and a trace has none."))


def _trace_as_transformers(module: Any, settings: Settings, target: Target) -> Traced:
    """A module that is called as transformers' are: token ids, labels and a mask in, an output with a loss out."""
    vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
    if vocabulary is None:
        text = _("{name} is no model of transformers, so brim does not know how to call it.").format(name=type(module).__name__)
        raise UsageError(text, hint=_("In Python: brim.estimate(module, step=...); docs/estimate.md shows how."))
    module.train()
    batch: dict[str, Any] = {}

    def prepare(tracer: Tracer) -> None:
        with torch.device("meta"):
            tokens = torch.randint(0, max(2, int(vocabulary)), (settings.micro_batch, settings.seq_len or 1))
            batch.update(input_ids=tokens, labels=tokens.clone())
            if settings.padded:
                batch["attention_mask"] = torch.ones_like(tokens)
        tracer.adopt(batch.values(), "buffers")
        if settings.padded:
            tracer.values.deny(batch["attention_mask"])

    def forward() -> torch.Tensor:
        loss: torch.Tensor = module(**batch, use_cache=False).loss
        return loss

    stage = Stage(module, target, settings.precision, scalar=True)
    with refusals():
        return stage.run(settings, forward, prepare=prepare, evaluate=lambda _tracer, _round: batch.clear())


def _trace(module: nn.Module, step: Step, settings: Settings, target: Target, scalar: bool | None) -> Traced:
    length = settings.seq_len
    assert length is not None

    def forward() -> torch.Tensor:
        try:
            with torch.device("meta"):
                loss = step(module, settings.micro_batch, length)
        except (BrimError, DataDependentError):
            raise
        except (Exception, SystemExit) as error:
            text = _("The step of {name} failed on tensors without memory: {why}.")
            raise RunError(text.format(name=type(module).__name__, why=" ".join(str(error).split())[:400])) from error
        loss = getattr(loss, "loss", loss)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(_("The step must return the loss: one number that depends on the parameters."))
        return loss

    stage = Stage(module, target, settings.precision, scalar=scalar)
    return stage.run(settings, forward, prepare=lambda _tracer: None, evaluate=lambda _tracer, _round: None)
