"""What one call of an operator costs: floating-point operations, and bytes of what it reads and writes.

Counted below autograd, where every call is one kernel (or one loop on the CPU). Views cost nothing, and neither does memory that is only
asked for. The kernels that `kernels.py`, `flash2.py`, `quantized.py` and `optimizers.py` stand in for say what they do by `note`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from brim.memory.work import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_aten = torch.ops.aten
_FREE = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "alias", "lift_fresh",
        "_local_scalar_dense", "_reshape_alias", "set_", "resize_", "is_same_size",
    }
)  # fmt: skip
_FORMAT_OF = {torch.float16: 1, torch.bfloat16: 1, torch.int8: 2}
_counted: dict[Any, Callable[[Any, Any], int] | None] = {}


def count(func: Any, args: Any, result: Any) -> tuple[str, int, int, tuple[int, ...]] | None:
    """Operator, format, operations and operands of a call; None where it costs nothing."""
    if func not in _counted:
        _counted[func] = _rule(func)
    rule = _counted[func]
    if rule is None:
        return None
    sizes: list[int] = []
    _sizes(args, sizes)
    _sizes((result,), sizes)
    if not sizes:
        return None
    return func._schema.name.removeprefix("aten::"), _format(args), rule(args, result), tuple(sizes)


_listener: Callable[[str, int, int, tuple[int, ...]], None] | None = None


def listen(listener: Callable[[str, int, int, tuple[int, ...]], None] | None) -> None:
    """Whom `note` tells; None: nobody."""
    global _listener  # one trace runs at a time, and kernels are called from deep inside of autograd
    _listener = listener


def note(operator: str, like: torch.Tensor, flops: float, tensors: Iterable[torch.Tensor | None]) -> None:
    """Say what a kernel does that is not run here: it computes in the format of `like`, and reads and writes these tensors."""
    if _listener is not None:
        with torch._C.DisableTorchFunction():
            _listener(operator, format_of(like), int(flops), operands(tensors))


def note_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    tensors: Iterable[torch.Tensor | None],
    *,
    share: float = 1.0,
    backward: bool = False,
) -> None:
    """Fused attention: two products forward, five backward. `share` of all pairs is computed: a causal kernel skips what nobody sees."""
    batch, heads, length, size = query.shape
    flops = (10 if backward else 4) * batch * heads * length * key.shape[2] * size * share
    note("attention_backward" if backward else "attention", query, flops, tensors)


def operands(tensors: Iterable[torch.Tensor | None]) -> tuple[int, ...]:
    """Bytes of each."""
    return tuple(_bytes(tensor) for tensor in tensors if tensor is not None)


def format_of(tensor: torch.Tensor) -> int:
    """Index into `FORMATS` of what a tensor is multiplied in."""
    return _FORMAT_OF.get(tensor.dtype, FORMATS.index("fp32"))


def _rule(func: Any) -> Callable[[Any, Any], int] | None:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if name in _FREE or any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
        return None
    return _PRODUCTS.get(name, _nothing)


def _nothing(_args: Any, _result: Any) -> int:
    """Element by element: bytes decide, operations do not."""
    return 0


def _mm(args: Any, _result: Any) -> int:
    left, right = args[:2]
    return 2 * int(left.shape[0] * left.shape[1] * right.shape[1])


def _addmm(args: Any, result: Any) -> int:
    return _mm(args[1:], result)


def _bmm(args: Any, _result: Any) -> int:
    left, right = args[:2]
    return 2 * int(left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2])


def _baddbmm(args: Any, result: Any) -> int:
    return _bmm(args[1:], result)


def _convolution(args: Any, result: Any) -> int:
    weight = args[1]
    return 2 * int(result.numel()) * int(prod(weight.shape[1:]))


def _convolution_backward(args: Any, _result: Any) -> int:
    grad, _x, weight = args[:3]
    return 4 * int(grad.numel()) * int(prod(weight.shape[1:]))


_PRODUCTS = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


def _format(args: Any) -> int:
    for value in args:
        if isinstance(value, torch.Tensor):
            return format_of(value)
    return 0


def _sizes(values: Any, sizes: list[int]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes.append(_bytes(value))
        elif isinstance(value, tuple | list):
            _sizes(value, sizes)


def _bytes(tensor: torch.Tensor) -> int:
    """What is really there of it: a broadcast tensor is read again and again from the same bytes."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
