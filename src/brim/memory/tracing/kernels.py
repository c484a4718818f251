"""What the target would run where a trace on no device runs something else.

A trace has shapes only. Which attention kernel takes them, what that kernel saves for backward and what it needs in passing is decided by
the target: the CPU, or a GPU by its compute capability. `Kernels` stands above autograd and replaces such calls by functions that
allocate exactly what the target's kernel allocates.

Attention (aten/src/ATen/native/transformers/{sdp_utils_cpp.cpp,cuda/sdp_utils.cpp}, attention.cpp):

- A boolean mask becomes an additive one in the query's dtype, once per call, and is saved for backward.
- CPU: flash unless there is dropout or the value's head size differs; then the mathematical form.
- CUDA: flash (sm80 and newer, half precision, no mask), else memory-efficient (no grouped heads), else the mathematical form, which
  holds the S x S scores, in float32 even for half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everybody uses)
from torch.overrides import TorchFunctionMode

from brim.memory.tracing.counting import note, note_attention

if TYPE_CHECKING:
    from brim.memory.setup import Target
    from brim.memory.tracing.autocast import Autocast
    from brim.memory.tracing.trace import Tracer

AttentionKernel = Literal["flash", "efficient", "math"]
HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_LIMIT = 256
_POINTWISE = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))
# The experts of a mixture, multiplied in one call; on meta tensors only bfloat16 is taken.
_GROUPED_PRODUCTS = tuple(
    found for found in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if found is not None
)


def scratch_bytes(target: Target, operator: Any, arguments: Any) -> tuple[int, ...]:
    """What an operator takes and gives back inside its kernel on the target, storage by storage."""
    # The CPU adds half-precision values up in float32 (aten/src/ATen/native/cpu/ScatterGatherKernel.cpp).
    if operator is torch.ops.aten.scatter_add.default and target.backend == "cpu" and arguments[0].dtype in HALF:
        return (4 * int(arguments[0].numel()),)
    # The CPU brings operands of two dtypes to the wider one before it starts (aten/src/ATen/TensorIterator.cpp, `compute_types`).
    if operator in _POINTWISE and target.backend == "cpu" and isinstance(arguments[1], torch.Tensor):
        left, right = arguments[:2]
        if left.dtype != right.dtype and left.dim() and right.dim():
            common = torch.promote_types(left.dtype, right.dtype)
            return tuple(side.numel() * common.itemsize for side in (left, right) if side.dtype != common)
    # Which scores are minus infinity, and which rows have no other (aten/src/ATen/native/transformers/attention.cpp, `_safe_softmax`).
    if operator is torch.ops.aten._safe_softmax.default:
        scores: torch.Tensor = arguments[0]
        return scores.numel(), scores.numel() // scores.shape[-1]
    return ()


def choose_attention(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    has_mask: bool,
    dropout: float,
    enable_gqa: bool,
) -> AttentionKernel:
    """The kernel that `scaled_dot_product_attention` takes on the target."""
    grouped = query.shape[1] != key.shape[1]
    same_head = query.shape[-1] == value.shape[-1]
    if target.backend == "cpu":
        # Heads that differ without `enable_gqa` are broadcast, which only the mathematical form does.
        return "flash" if dropout == 0.0 and same_head and (enable_gqa or not grouped) else "math"
    capability = target.compute_capability or (8, 0)
    half = query.dtype in HALF
    if capability >= (8, 0) and half and not has_mask and same_head and query.shape[-1] <= _FLASH_HEAD_LIMIT:
        return "flash"
    if query.dtype == torch.bfloat16 and capability < (8, 0):
        return "math"
    return "math" if grouped else "efficient"


class Kernels(TorchFunctionMode):
    """Replaces calls while it is active; `chosen` remembers which attention kernels ran."""

    def __init__(self, target: Target, tracer: Tracer, autocast: Autocast | None = None) -> None:
        super().__init__()
        self._autocast = autocast
        self._target = target
        self._tracer = tracer
        self.chosen: set[AttentionKernel] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if self._autocast is None:
                return self._attention(*args, **kwargs)
            args, kwargs = self._autocast.lower(args, kwargs)
            with self._autocast.paused():
                return self._attention(*args, **kwargs)
        if func is F.dropout and self._target.backend == "cuda":
            return _cuda_dropout(*args, **kwargs)
        if func in _GROUPED_PRODUCTS:
            return _GroupedProduct.apply(*args[:2])  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        kernel = choose_attention(
            self._target, query, key, value, has_mask=attn_mask is not None, dropout=dropout_p, enable_gqa=enable_gqa
        )
        self.chosen.add(kernel)
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = _additive(attn_mask, query.dtype)
        if kernel == "math":
            arguments = (query, key, value, bias, dropout_p, is_causal)
            with self._tracer.in_place(torch.ops.aten.add.Tensor):  # the mask is added to the scores where they are
                result = torch.ops.aten._scaled_dot_product_attention_math(*arguments, scale=scale, enable_gqa=enable_gqa)
            return result[0]  # type: ignore[no-any-return]
        if self._target.backend == "cpu":
            return _CpuFlash.apply(query, key, value, bias, self._tracer, self._target.threads, is_causal)  # type: ignore[no-any-return,no-untyped-call]
        if kernel == "flash":
            return CudaFlash.apply(query, key, value, is_causal)  # type: ignore[no-any-return,no-untyped-call]
        return _CudaEfficient.apply(query, key, value, bias)  # type: ignore[no-any-return,no-untyped-call]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the mask allows, minus infinity where it does not: a tensor of its own."""
    allowed, forbidden = mask.new_empty((), dtype=dtype), mask.new_empty((), dtype=dtype)
    return torch.where(mask, allowed, forbidden)


class _GroupedProduct(torch.autograd.Function):
    """Rows of tokens, sorted by expert, times each expert's matrix: [tokens, in] x [experts, in, out] -> [tokens, out]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        # Each side is kept for the gradient of the other: frozen experts keep no tokens.
        needs_rows, needs_matrices = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_matrices else None, matrices if needs_rows else None)
        ctx.shapes = rows.shape, matrices.shape
        result = rows.new_empty(rows.shape[0], matrices.shape[-1])
        note("grouped_mm", rows, 2 * rows.numel() * matrices.shape[-1], (rows, matrices, result))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, matrices = ctx.saved_tensors
        flops = 2 * grad.numel() * ctx.shapes[0][-1]
        grads = []
        for shape, needed, other in zip(ctx.shapes, ctx.needs_input_grad, (matrices, rows), strict=True):
            grads.append(grad.new_empty(shape) if needed else None)
            if needed:
                note("grouped_mm", grad, flops, (grad, other, grads[-1]))
        return tuple(grads)


def _cuda_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """CUDA keeps a boolean mask, one byte an element; the CPU keeps the noise in the activation's dtype."""
    del inplace
    return torch.native_dropout(x, p, True)[0] if training and p > 0.0 else x


def _heads_last(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[batch, heads, length, size] in memory order [batch, length, heads, size], as the fused kernels write it."""
    batch, heads, length, size = like.shape
    return like.new_empty(batch, length, heads, size, dtype=dtype or like.dtype).transpose(1, 2)


class _CpuFlash(torch.autograd.Function):
    """aten/src/ATen/native/cpu/FlashAttentionKernel.cpp."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, tracer: Tracer, threads: int, causal: bool
    ) -> torch.Tensor:
        batch, heads, length, size = query.shape
        out = torch.empty_like(query)  # in the query's own memory order, whatever that is
        logsumexp = query.new_empty(batch, length, heads, dtype=torch.float32).transpose(1, 2)
        q_split = 256 if length >= 768 else 64 if length >= 192 else 32
        q_split, kv_split = min(q_split, length), min(512, key.shape[2])
        scratch = q_split * kv_split + 2 * q_split + q_split * size
        tracer.transient((4 * threads * scratch,), "flash_attention_forward")
        ctx.save_for_backward(query, key, value, out, logsumexp, bias)
        ctx.tracer = tracer
        ctx.scratch = 4 * threads * (2 * q_split * kv_split + q_split)
        ctx.share = 0.5 if causal else 1.0
        note_attention(query, key, (query, key, value, bias, out), share=ctx.share)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, *_rest = ctx.saved_tensors
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        ctx.tracer.transient((ctx.scratch,), "flash_attention_backward")
        note_attention(query, key, (query, key, value, grad, *grads), share=ctx.share, backward=True)
        return *grads, None, None, None, None


class CudaFlash(torch.autograd.Function):
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, sequences: int = 1) -> torch.Tensor:
        """Take [batch, heads, length, size]; save the three, the output and the logarithms of the row sums.

        `sequences` are packed into each row, and attend to themselves only.
        """
        batch, heads, length, _size = query.shape
        out = _heads_last(query)
        logsumexp = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.share = (0.5 if causal else 1.0) / sequences
        note_attention(query, key, (query, key, value, out), share=ctx.share)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make three gradients, and scratch that lives until they are there."""
        query, key, value, _out, _logsumexp = ctx.saved_tensors
        batch, heads, length, size = query.shape
        rounded = -(-length // 128) * 128
        grad_query = _heads_last(query)
        # Scratch: the row sums, the accumulator of the query's gradient, and grouped heads' gradients before they are summed.
        row_sums = query.new_empty(batch, heads, rounded, dtype=torch.float32)
        accumulator = query.new_empty(batch, heads, rounded, -(-size // 32) * 32, dtype=torch.float32)
        grad_key, grad_value = _heads_last(key), _heads_last(value)
        if heads != key.shape[1]:
            expanded = [query.new_empty(batch, key.shape[2], heads, size) for _ in range(2)]
            del expanded
        touched = (query, key, value, grad, accumulator, grad_query, grad_key, grad_value)
        note_attention(query, key, touched, share=ctx.share, backward=True)
        del row_sums, accumulator, touched
        return grad_query, grad_key, grad_value, None, None


class _CudaEfficient(torch.autograd.Function):
    """aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu (the memory-efficient kernel)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any) -> torch.Tensor:
        batch, heads, length, _size = query.shape
        if bias is not None and bias.shape[-1] % 8:
            # The kernel wants rows aligned to 16 bytes: the bias is padded, which copies it.
            bias = bias.new_empty(*bias.shape[:-1], -(-bias.shape[-1] // 8) * 8)
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        logsumexp = query.new_empty(batch, heads, -(-length // 32) * 32, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp, bias)
        result: torch.Tensor = out
        note_attention(query, key, (query, key, value, bias, out))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, *_rest = ctx.saved_tensors
        batch, heads, length, size = query.shape
        row_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        grads = _heads_last(query), _heads_last(key), _heads_last(value)
        note_attention(query, key, (query, key, value, grad, *grads), backward=True)
        if query.dtype in HALF:
            accumulator = query.new_empty(batch, heads, length, size, dtype=torch.float32)
            del accumulator
        del row_sums
        return *grads, None
