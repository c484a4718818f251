"""Temporary memory that kernels of the target take and give back, which a trace on no device does not see."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from brim.memory.scratch import scratch_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.memory.setup import Target

_HALF = (torch.float16, torch.bfloat16)
_POINTWISE = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))
_PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm"))
_ONEDNN_ALIGNMENT = 128


class Scratch(NamedTuple):
    """Temporary memory of a kernel, as (operator, sizes): `held` while the result is allocated, and `after` that."""

    held: tuple[tuple[str, tuple[int, ...]], ...] = ()
    after: tuple[tuple[str, tuple[int, ...]], ...] = ()


_NOTHING = Scratch()


def scratch_of(target: Target, operator: Any, arguments: Any, keywords: Any) -> Scratch:
    """What an operator takes and gives back inside its kernel on the target, storage by storage."""
    if target.backend == "cuda":
        rule = _CUDA_SCRATCH.get(operator)
        return rule(arguments, keywords) if rule is not None else _NOTHING
    # The CPU adds half-precision values up in float32 (aten/src/ATen/native/cpu/ScatterGatherKernel.cpp).
    if operator is torch.ops.aten.scatter_add.default and arguments[0].dtype in _HALF:
        return _after(operator, 4 * int(arguments[0].numel()))
    # The CPU brings operands of two dtypes to the wider one before it starts (aten/src/ATen/TensorIterator.cpp, `compute_types`).
    if operator in _POINTWISE and isinstance(arguments[1], torch.Tensor):
        left, right = arguments[:2]
        if left.dtype != right.dtype and left.dim() and right.dim():
            common = torch.promote_types(left.dtype, right.dtype)
            return _after(operator, *(side.numel() * common.itemsize for side in (left, right) if side.dtype != common))
    if operator is torch.ops.aten._safe_softmax.default:
        return _safe_softmax(arguments, keywords)
    if operator in _PRODUCTS and not target.multiplies_bf16 and arguments[-1].dtype == torch.bfloat16:
        left, right = arguments[-2:]
        matrices = min(target.threads, left.shape[0]) if left.dim() == 3 else 1
        return _after(operator, 4 * matrices * left.shape[-2] * right.shape[-1] + _ONEDNN_ALIGNMENT)
    return _NOTHING


def _after(operator: Any, *sizes: int) -> Scratch:
    return Scratch(after=((operator._schema.name, sizes),))


def _safe_softmax(arguments: Any, _keywords: Any) -> Scratch:
    """Masks of scores that are minus infinity, and of rows in which all are (aten/src/ATen/native/transformers/attention.cpp)."""
    scores: torch.Tensor = arguments[0]
    return _after(torch.ops.aten._safe_softmax.default, scores.numel(), scores.numel() // scores.shape[-1])


def _reduction(arguments: Any, keywords: Any) -> Scratch:
    """A sum, mean or norm over some dimensions (aten/src/ATen/native/cuda/Reduce.cuh): see `brim.memory.scratch.reduction_bytes`."""
    tensor: torch.Tensor = arguments[0]
    dims = keywords.get("dim", arguments[1] if len(arguments) > 1 else None)
    return _split_reduction(tensor, dims)


def _norm(arguments: Any, keywords: Any) -> Scratch:
    return _split_reduction(arguments[0], keywords.get("dim", arguments[2] if len(arguments) > 2 else None))


def _split_reduction(tensor: torch.Tensor, dims: Any) -> Scratch:
    if not tensor.is_floating_point() or not tensor.numel():
        return _NOTHING
    dims = [dims] if isinstance(dims, int) else dims
    reduced = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    inner = _coalesced(tensor, sorted(reduced))
    outer = _coalesced(tensor, [dim for dim in range(tensor.dim()) if dim not in reduced])
    inputs, outputs = prod(size for size, _ in inner), prod(size for size, _ in outer)
    if inputs == 1:
        return _NOTHING
    along_rows = not outer or inner[0][1] < outer[0][1]
    input_vector = output_vector = 1
    if along_rows and inner[0][1] == 1 and len(inner) == 1:
        input_vector = 4 if tensor.itemsize == 4 else 8
    elif not along_rows and outer[0][1] == 1:
        output_vector = gcd(4, outer[0][0], *(stride for _, stride in (*inner, *outer[1:])))
    return Scratch(after=((scratch_name("reduction", int(along_rows), input_vector, output_vector, 4), (outputs, inputs)),))


def _coalesced(tensor: torch.Tensor, dims: list[int]) -> list[tuple[int, int]]:
    """(size, stride) of these dimensions, the smallest stride first; dimensions that are contiguous are merged."""
    merged: list[tuple[int, int]] = []
    for dim in sorted(dims, key=lambda dim: tensor.stride(dim)):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0] * size, merged[-1][1]
        else:
            merged.append((size, stride))
    return merged


def _embedding_backward(arguments: Any, _keywords: Any) -> Scratch:
    grad, indices, rows = arguments[:3]
    copied = () if grad.is_contiguous() else (("aten::contiguous", (grad.numel() * grad.itemsize,)),)

    def buffer(number: int) -> tuple[str, tuple[int, ...]]:
        return scratch_name("embedding", number, rows, grad.shape[-1]), (indices.numel(),)

    return Scratch(held=(*copied, buffer(0), buffer(0)), after=(buffer(0), buffer(1), buffer(1), buffer(2), buffer(3)))


def _softmax_backward(arguments: Any, _keywords: Any) -> Scratch:
    """The gradient times the result (aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`)."""
    grad: torch.Tensor = arguments[0]
    return _after(torch.ops.aten.mul.Tensor, grad.numel() * grad.itemsize)


_aten = torch.ops.aten
_CUDA_SCRATCH: dict[Any, Callable[[Any, Any], Scratch]] = {
    _aten._safe_softmax.default: _safe_softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.sum.default: _reduction,
    _aten.sum.dim_IntList: _reduction,
    _aten.mean.default: _reduction,
    _aten.mean.dim: _reduction,
    _aten.linalg_vector_norm.default: _norm,
    _aten.embedding_dense_backward.default: _embedding_backward,
}
