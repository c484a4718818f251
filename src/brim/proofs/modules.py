"""A module and what is in it: behind wrappers, its configs, and how it is left as it was."""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from brim.step.randomness import Randomness

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST_COPY = 300_000_000
"""Parameters of a model that may be copied for every call."""


def inner_model(model: Any) -> Any:
    """Behind an adapter of PEFT, the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unwrapped(model: nn.Module) -> nn.Module:
    """Behind what hands everything on: data parallelism, and torch.compile."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        behind = getattr(model, "_orig_mod", None)
        model = behind if isinstance(behind, nn.Module) else cast("nn.Module", model.module)
    return model


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Without the autocast that accelerate leaves around the forward of a model that it has trained: the proofs choose the precision."""
    left: Any = model.__dict__.get("forward")
    forward, outer = left, getattr(left, "__wrapped__", None)
    # accelerate/accelerator.py, prepare_model: forward = ConvertOutputsToFp32(autocast(forward)); once for each training.
    while outer is not None and type(outer).__name__ == "ConvertOutputsToFp32":
        forward = outer.model_forward.__wrapped__
        outer = getattr(forward, "__wrapped__", None)
    if forward is left:
        yield
        return
    setattr(model, "forward", forward if isinstance(forward, MethodType) else MethodType(forward, model))  # noqa: B010 (mypy: a method)
    try:
        yield
    finally:
        setattr(model, "forward", left)  # noqa: B010 (as above)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Everything as before afterwards: modes, random numbers, buffers. Meanwhile no cache is kept, as in training."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    randomness = Randomness.of(device)
    caching = [config for config in configs_of(model) if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, name, each, each.detach().clone()) for module in model.modules() for name, each in _own_buffers(module)]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for config in caching:
            config.use_cache = True
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer)
                if buffer.shape == before.shape:
                    buffer.copy_(before)
        randomness.restore(device)


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_buffers(recurse=False))


def is_small_enough_to_copy(model: nn.Module) -> bool:
    """Whether a second one fits everywhere."""
    return sum(parameter.numel() for parameter in model.parameters()) <= _LARGEST_COPY


def configs_of(model: nn.Module) -> list[Any]:
    """Every config that a part of the model looks at, each once."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation")]


def attention_of(model: nn.Module) -> str | None:
    """What the first part that has a say attends with."""
    config = getattr(inner_model(model), "config", None)
    if not hasattr(config, "_attn_implementation"):
        config = next(iter(configs_of(model)), None)
    return getattr(config, "_attn_implementation", None)
