"""Autocast of CUDA (and of the CPU) on tensors that have no device: which operators cast, to what, and how long the copies live.

`torch.autocast("cuda")` switches itself off where there is no CUDA, and no autocast looks at meta tensors. Its rules are three lists
(aten/src/ATen/autocast_mode.{h,cpp}): operators that cast their floating inputs to the half dtype, operators that cast them to float32,
and operators that take the widest type among their inputs. A float32 leaf that trains is cast once and the copy is kept until autocast
ends, which is where the weights' half-precision copies in a forward come from; the graph keeps them longer, for backward.

The emulation stands where the real one stands, in the dispatcher above autograd: Python kernels on a dispatch key that nobody uses
for meta tensors, so that operators inside composite ones are met too. Whether autocast is on is torch's own flag for the CPU: checkpointing
saves and restores it around a recomputation without being told.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

Policy = Literal["half", "float32", "float32-result", "widest"]

# One key a list, of accelerators that a torch with CUDA or without any does not have: Graphcore's and Habana's.
_DEVICES = {"cuda": "ipu", "cpu": "hpu"}

_CUDA: Mapping[Policy, str] = {
    "half": """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
        chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention""",
    "float32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
        softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
        poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
        mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
        upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    "float32-result": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
        sum sum.dim_IntList""",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}
# Of the CPU's float32 list only what a language model or its loss may call.
_CPU: Mapping[Policy, str] = {
    "half": """
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm _addmm_activation addbmm
        linear _convolution.deprecated matmul conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu
        scaled_dot_product_attention""",
    "float32": """
        avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int cdist trace view_as_complex mse_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss
        huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss kl_div multilabel_margin_loss
        binary_cross_entropy_with_logits""",
    "widest": "stack cat index_copy",
}
LISTS: Mapping[str, Mapping[Policy, str]] = {"cuda": _CUDA, "cpu": _CPU}


def policies(backend: str) -> dict[str, Policy]:
    """What autocast does with each operator on this backend, by the operator's name (`name` or `name.overload`)."""
    return {name: policy for policy, names in LISTS[backend].items() for name in names.split()}


class Autocast:
    """Autocast on tensors without memory: `around` the whole step, `region` for each forward."""

    def __init__(self, backend: str, dtype: torch.dtype) -> None:
        self._backend = backend
        self._dtype = dtype
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    @property
    def is_on(self) -> bool:
        """Whether operators are cast at this moment."""
        return torch.is_autocast_enabled("cpu")

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Be ready to cast; nothing is cast outside of a region and of its recomputation."""
        global _current
        _register(self._backend)
        key, device = _key(self._backend), _DEVICES[self._backend]
        before, _current = _current, self
        torch.set_autocast_enabled(device, True)
        try:
            with self._follow_torch(), _follow_transformers(model), torch._C._IncludeDispatchKeyGuard(key):
                yield
        finally:
            torch.set_autocast_enabled(device, False)
            _current = before
            self._copies.clear()

    def region(self) -> torch.autocast:
        """One forward. The cached copies of weights are dropped at its end."""
        return torch.autocast("cpu", dtype=self._dtype)

    def lower(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, cast for an operator of the half-precision list."""
        return self._cast_arguments(args, kwargs, self._dtype) if self.is_on else (args, kwargs)

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """Inside an operator that was cast, nothing is cast again."""
        guard: contextlib.AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(_key(self._backend))
        )
        return guard

    def apply(self, operator: Any, policy: Policy, args: Any, kwargs: Any) -> Any:
        """Call an operator as autocast would."""
        if policy == "float32-result":
            return self._with_float32_result(operator, args, kwargs)
        to = {"half": self._dtype, "float32": torch.float32}.get(policy) or _widest(self._dtype, (*args, *kwargs.values()))
        args, kwargs = self._cast_arguments(args, kwargs, to)
        return operator(*args, **kwargs)

    def _cast_arguments(self, args: Any, kwargs: Any, to: torch.dtype) -> tuple[Any, Any]:
        """Cast in the order of the target: torch's wrapper casts in the call, and the compiler evaluates the last argument first."""
        if self._backend == "cpu":
            return tuple(self._cast(value, to) for value in args), {name: self._cast(value, to) for name, value in kwargs.items()}
        named = {name: self._cast(kwargs[name], to) for name in reversed(kwargs)}
        return tuple(reversed([self._cast(value, to) for value in reversed(args)])), {name: named[name] for name in kwargs}

    def _cast(self, value: Any, to: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(item, to) for item in value)
        if not _is_eligible(value) or value.dtype == to:
            return value
        is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and value._base is None
        if to != self._dtype or not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(to)
        key = id(value)
        found = self._copies.get(key)
        if found is None or found[0]() is not value:
            found = weakref.ref(value), value.to(to)
            self._copies[key] = found
        return found[1]

    def _with_float32_result(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Ask for a float32 result, unless the caller asked for a dtype."""
        schema = operator._schema.arguments
        position = next(index for index, argument in enumerate(schema) if argument.name == "dtype")
        given = args[position] if position < len(args) else kwargs.get("dtype")
        if given is not None or not _is_eligible(args[0]):
            return operator(*args, **kwargs)
        fused = {torch.ops.aten.softmax.int: torch.ops.aten._softmax, torch.ops.aten.log_softmax.int: torch.ops.aten._log_softmax}
        if operator in fused and args[0].dtype == torch.float16:
            # CUDA reads float16 and writes float32 in one kernel; every other pair of dtypes is converted first.
            return fused[operator](args[0], args[1], True)
        return operator(*args[:position], **{**kwargs, "dtype": torch.float32})

    @contextlib.contextmanager
    def _follow_torch(self) -> Iterator[None]:
        """Hear of the end of a region, and let code that asks for CUDA's flag see the CPU's."""
        set_enabled, clear = torch.set_autocast_enabled, torch.clear_autocast_cache
        cuda_before = torch.is_autocast_enabled("cuda")

        def set_both(device: str, enabled: bool) -> None:
            set_enabled(device, enabled)
            if device == "cpu" and self._backend == "cuda":
                set_enabled("cuda", enabled)

        def clear_both() -> None:
            clear()
            self._copies.clear()

        torch.set_autocast_enabled, torch.clear_autocast_cache = set_both, clear_both  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.set_autocast_enabled, torch.clear_autocast_cache = set_enabled, clear
            set_enabled("cuda", cuda_before)


_current: Autocast | None = None


@contextlib.contextmanager
def _follow_transformers(model: nn.Module) -> Iterator[None]:
    """Transformers does nothing where a module asks for autocast on meta tensors; rotary embeddings switch it off that way."""
    homes = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    changed = [(home, home.maybe_autocast) for home in homes if hasattr(home, "maybe_autocast")]

    def maybe_autocast(_device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> Any:
        if not (enabled or torch.is_autocast_enabled("cpu")):
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    for home, _original in changed:
        home.maybe_autocast = lambda device_type, *args, **kwargs: maybe_autocast(device_type, *args, **kwargs)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for home, original in changed:
            home.maybe_autocast = original  # type: ignore[attr-defined]


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point() and value.dtype != torch.float64


def _widest(half: torch.dtype, values: Any) -> torch.dtype:
    for value in values:
        if isinstance(value, list | tuple):
            if _widest(half, value) == torch.float32:
                return torch.float32
        elif _is_eligible(value) and value.dtype == torch.float32:
            return torch.float32
    return half


@functools.cache
def _register(backend: str) -> tuple[Any, Any]:
    """Give torch the kernels, once for the process; without a thread that includes the key they are never called."""
    key = _key(backend)
    library: Any = torch.library.Library
    everything = library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, key.name)
    kernels = library("aten", "IMPL")
    for name, policy in policies(backend).items():
        packet, _dot, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is not None:  # some are newer than the oldest torch that brim runs on
            kernels.impl(name, _kernel(operator, policy, torch._C.DispatchKeySet(key)), key.name)
    return everything, kernels


def _kernel(operator: Any, policy: Policy, keys: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if _current is None or not _current.is_on:
                return operator(*args, **kwargs)
            return _current.apply(operator, policy, args, kwargs)

    return kernel


def _key(backend: str) -> Any:
    return torch._C._dispatch_key_parse(f"Autocast{_DEVICES[backend].upper()}")


@contextlib.contextmanager
def meta_counts_as_cpu() -> Iterator[None]:
    """Let `torch.autocast("meta")`, which peft asks for by the device of a weight, be the CPU's: the flag that `Autocast` goes by."""
    original = torch.autocast

    def autocast(device_type: str, *arguments: Any, **settings: Any) -> Any:
        return original("cpu" if device_type == "meta" else device_type, *arguments, **settings)

    torch.autocast = autocast  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autocast = original  # type: ignore[misc]
