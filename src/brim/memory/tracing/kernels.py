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

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everybody uses)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from brim.memory.scratch import scratch_name
from brim.memory.tracing.counting import note, note_attention

if TYPE_CHECKING:
    from brim.memory.setup import Target
    from brim.memory.tracing.autocast import Autocast
    from brim.memory.tracing.trace import Tracer

AttentionKernel = Literal["flash", "efficient", "math"]
HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_LIMIT = 256
# The experts of a mixture, multiplied in one call; on meta tensors only bfloat16 is taken.
_GROUPED_PRODUCTS = tuple(
    found for found in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if found is not None
)


_aten = torch.ops.aten
_MASK_FIRST = frozenset({_aten.native_dropout.default})
_ON_NOISE = frozenset({_aten.bernoulli_.float, _aten.div_.Scalar})


def in_order(target: Target, operator: Any, results: Any) -> Any:
    """The results of an operator in the order in which the target allocates them."""
    return reversed(results) if target.backend == "cuda" and operator in _MASK_FIRST else results


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


_SOFTMAXES: dict[Any, Any] = {
    **dict.fromkeys((F.softmax, torch.softmax, torch.Tensor.softmax), _aten._softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax), _aten._log_softmax),
}


def _writes_float32(args: Any, kwargs: Any) -> bool:
    """CUDA reads float16 and writes float32 in one kernel; every other pair of dtypes is converted first."""
    has_dimension = len(args) > 1 or kwargs.get("dim") is not None
    return bool(has_dimension and kwargs.get("dtype") is torch.float32 and args[0].dtype == torch.float16)


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
        if func in _SOFTMAXES and self._target.backend == "cuda" and _writes_float32(args, kwargs):
            return _SOFTMAXES[func](args[0], args[1] if len(args) > 1 else kwargs["dim"], True)
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
            is_fused = self._target.backend == "cuda" and dropout_p > 0.0
            dropout: Any = _FusedDropout() if is_fused else contextlib.nullcontext()  # type: ignore[no-untyped-call]
            with self._tracer.in_place(_aten.add.Tensor), dropout:  # the mask is added to the scores where they are
                result = _aten._scaled_dot_product_attention_math(*arguments, scale=scale, enable_gqa=enable_gqa)
            return result[0]  # type: ignore[no-any-return]
        if self._target.backend == "cpu":
            return _CpuFlash.apply(query, key, value, bias, self._tracer, self._target.threads, is_causal)  # type: ignore[no-any-return,no-untyped-call]
        if kernel == "flash":
            return CudaFlash.apply(query, key, value, is_causal, 1, self._tracer, dropout_p)  # type: ignore[no-any-return,no-untyped-call]
        if bias is not None:
            bias = _aligned(bias).expand(*query.shape[:3], key.shape[2])
        return _CudaEfficient.apply(query, key, value, bias, self._tracer)  # type: ignore[no-any-return,no-untyped-call]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where the mask allows, minus infinity where it does not: a tensor of its own."""
    allowed, forbidden = mask.new_empty((), dtype=dtype), mask.new_empty((), dtype=dtype)
    return torch.where(mask, allowed, forbidden)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """The memory-efficient kernel needs rows aligned to 16 bytes: other rows are padded, which copies them."""
    length = bias.shape[-1]
    return F.pad(bias, (0, -length % 8))[..., :length] if length % 8 else bias


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


class _FusedDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`_cuda_dropout` for C++ code, which no Python function replaces: there torch makes noise, scales it and multiplies by it.

    The noise becomes the boolean mask, and what is computed on it is left out (aten/src/ATen/native/Dropout.cpp, `_dropout_impl`).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ON_NOISE:
            return args[0]
        if func is _aten.empty_like.default:
            kwargs = {**(kwargs or {}), "dtype": torch.bool}
        return func(*args, **(kwargs or {}))


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
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        causal: bool,
        sequences: int = 1,
        tracer: Tracer | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Take [batch, heads, length, size]; save the three, the output, the logarithms of the row sums, and the state of dropout.

        `sequences` are packed into each row, and attend to themselves only. `tracer`: of torch's own kernel, not of the package flash-attn.
        Torch splits the keys over several blocks unless there is dropout. In backward it copies what is not in memory order
        [batch, length, heads, size].
        """
        batch, heads, length, size = query.shape
        out = torch.empty_like(query)  # in the query's own memory order
        logsumexp = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.is_own = tracer is not None
        if tracer is not None and dropout == 0.0:
            numbers = batch * heads, length, key.shape[2]
            tracer.transient(numbers, scratch_name("flash_forward", size))
        states = query.new_empty(2, dtype=torch.int64), query.new_empty((), dtype=torch.int64)
        ctx.save_for_backward(key, query, value, logsumexp, out, *states)  # in the order in which torch releases them
        ctx.share = (0.5 if causal else 1.0) / sequences
        note_attention(query, key, (query, key, value, out), share=ctx.share)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make three gradients, and scratch that lives until they are there."""
        key, query, value, logsumexp, out, *states = ctx.saved_tensors
        batch, heads, length, size = query.shape
        rounded = -(-length // 128) * 128
        in_order = [tensor.transpose(1, 2).contiguous() for tensor in (grad, out)] if ctx.is_own else []
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        # Scratch: the row sums, the accumulator of the query's gradient, and grouped heads' gradients before they are summed.
        row_sums = query.new_empty(batch, heads, rounded, dtype=torch.float32)
        accumulator = query.new_empty(batch, heads, rounded, -(-size // 32) * 32, dtype=torch.float32)
        if heads != key.shape[1]:
            expanded = [query.new_empty(batch, key.shape[2], heads, size) for _ in range(2)]
            del expanded
        touched = (query, key, value, grad, accumulator, grad_query, grad_key, grad_value)
        note_attention(query, key, touched, share=ctx.share, backward=True)
        del touched
        del accumulator
        del row_sums
        # With checkpointing only these names keep the saved tensors alive. As in C++, the last is released first, and copies before.
        del in_order
        del states, out, logsumexp, value, query, key
        return grad_query, grad_key, grad_value, None, None, None, None


class _CudaEfficient(torch.autograd.Function):
    """aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu (the memory-efficient kernel)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any, tracer: Tracer) -> torch.Tensor:
        batch, heads, length, _size = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        logsumexp = query.new_empty(batch, heads, -(-length // 32) * 32, dtype=torch.float32)
        ctx.save_for_backward(bias, key, query, value, logsumexp, out)  # in the order in which torch releases them
        ctx.tracer = tracer
        result: torch.Tensor = out
        note_attention(query, key, (query, key, value, bias, out))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        bias, key, query, value, logsumexp, out = ctx.saved_tensors
        batch, heads, length, size = query.shape
        grads = _heads_last(query), _heads_last(key), _heads_last(value)
        keys = key.shape[2]
        grad_bias = None
        if ctx.needs_input_grad[3]:
            grad_bias = query.new_empty(batch, heads, length, -(-keys // 16) * 16)[..., :keys]
        note_attention(query, key, (query, key, value, grad, *grads), backward=True)
        row_sums = _row_sums(grad, out)
        numbers = batch * heads, length, keys
        rule = scratch_name("efficient_backward", size, value.shape[-1], int(query.dtype in HALF))
        workspace = ctx.tracer.take(numbers, rule)
        del row_sums
        ctx.tracer.give(workspace)
        # With checkpointing only these names keep the saved tensors alive. As in C++, the last is released first.
        del out, logsumexp, value, query, key, bias
        return *grads, grad_bias, None


def _row_sums(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """In half precision the kernel itself computes it. Otherwise: a product, its sum, and a copy of that in another memory order."""
    batch, heads, length, _size = grad.shape
    if grad.dtype in HALF:
        return grad.new_empty(batch, heads, length, dtype=torch.float32)
    product = grad.new_empty(out.shape)
    summed = product.new_empty(batch, length, heads)
    row_sums = summed.new_empty(batch, heads, length) if heads > 1 else summed
    del summed
    del product
    return row_sums
