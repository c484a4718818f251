"""What older releases of torch and transformers did, and those that are traced no longer do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everybody uses)
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .case import Case


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """transformers/models/llama/modeling_llama.py of 4.37, `LlamaForCausalLM.forward`."""
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].contiguous().view(-1))


@contextlib.contextmanager
def repeated_heads(case: Case) -> Iterator[None]:
    from transformers.integrations import sdpa_attention

    home: Any = sdpa_attention
    before = home.use_gqa_in_sdpa
    if case.repeats_heads:
        home.use_gqa_in_sdpa = lambda *_args, **_kwargs: False
    try:
        yield
    finally:
        home.use_gqa_in_sdpa = before


@contextlib.contextmanager
def old_adamw(case: Case) -> Iterator[None]:
    """torch 2.0, optim/adamw.py, `_multi_tensor_adamw`: `denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`, since 2.1 in place."""
    home: Any = torch
    in_place = home._foreach_add_
    denominators: list[torch.Tensor] = []

    def add(tensors: Any, other: Any, **rest: Any) -> Any:
        if isinstance(other, float):
            denominators[:] = home._foreach_add(tensors, other)
        return in_place(tensors, other, **rest)

    if case.old_torch == "2.0":
        home._foreach_add_ = add
    try:
        yield
    finally:
        home._foreach_add_ = in_place


def old_mean(case: Case) -> contextlib.AbstractContextManager[Any]:
    """See `_OldMean`."""
    return _OldMean() if case.old_torch else contextlib.nullcontext()


class _OldMean(TorchFunctionMode):
    """torch 2.0 and 2.1: `MeanBackward1` holds its input, of which it needs the number of elements only; since 2.2 it holds that.

    Seen in the headers of the wheels (torch/include/torch/csrc/autograd/generated/Functions.h) and by running transformers 4.37.2 on torch
    2.1.2. In a root-mean-square norm the input is the square of the hidden states, in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.mean and len(args) == 2 and args[0].requires_grad:
            return _KeepingMean.apply(args[0], args[1], kwargs.get("keepdim", False))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _KeepingMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.dim, ctx.keepdim = dim, keepdim
        return x.mean(dim, keepdim=keepdim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad = grad if ctx.keepdim else grad.unsqueeze(ctx.dim)
        return grad.expand(x.shape) / x.shape[ctx.dim], None, None
