"""A base model whose linear layers are quantised, as bitsandbytes keeps and multiplies them, on tensors without memory.

4 bits (nf4, double quantisation; bitsandbytes/functional.py `quantize_4bit`): two weights a byte; one scale for 64 weights, itself kept in
8 bits with one float32 for 256 scales, an offset and two tables. A product first writes the whole weight out again in half precision,
and so does its backward (bitsandbytes/autograd/_functions.py `MatMul4Bit`, backends/cuda/ops.py `_dequant_linear_fallback`; below 1,537
rows newer releases have fused kernels that spare the forward's buffer, backward never).

8 bits (`MatMul8bitLt`): one byte a weight and one float32 a row. On CUDA the input is quantised too and the product is int32; backward
writes the weight out in the input's dtype. The input is kept in a plain attribute of the graph's node, which checkpointing does not see.

`prepare_model_for_kbit_training` (peft/utils/other.py) then holds everything that is not quantised in float32.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (the name that everybody uses)
from torch import nn

from brim.memory.tracing.counting import note

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 64
"""Weights that share one scale (bitsandbytes' default for CUDA)."""
NESTED_BLOCK = 256
"""Scales that share one scale."""
_CODE_4BIT = 16
_CODE_8BIT = 256

_HEADS = ("classifier", "score")
"""peft/utils/other.py: what trains whole beside the adapters of a classifier."""

Bits = Literal[4, 8]
BITS: dict[str, Bits] = {"qlora": 4, "lora-8bit": 8}
"""The methods whose base is quantised."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is packed. `in_features` and `out_features` are the true ones."""

    scales: torch.Tensor
    offset: torch.Tensor
    row_scales: torch.Tensor
    keeps_input = False
    """4 bits: whether the graph's node holds the layer's input, as old releases of bitsandbytes did (their backward never reads it)."""

    def __init__(self, source: nn.Module, bits: Bits, compute_dtype: torch.dtype, backend: str) -> None:
        weight: Any = source.weight
        out_features, in_features = weight.shape if isinstance(source, nn.Linear) else reversed(weight.shape)
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.is_transposed = not isinstance(source, nn.Linear)  # GPT-2's Conv1D
        self.bits, self.compute_dtype, self.dtype, self.backend = bits, compute_dtype, weight.dtype, backend
        self.bias = source.bias  # type: ignore[assignment]
        for name, tensor in _stored(weight, out_features, in_features, bits):
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, in the layer's compute dtype for 4 bits, in the input's for 8."""
        if self.bits == 8:
            product = _EightBitCuda if self.backend == "cuda" else _EightBit
            self._cast_bias(x.dtype)
            result: torch.Tensor = product.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
            return result
        dtype = x.dtype
        x = x.to(self.compute_dtype)  # alive until the result exists; freed after the tensor that the result is cast from
        self._cast_bias(self.compute_dtype)
        cast: torch.Tensor = _FourBit.apply(x, self.bias, self).to(dtype)  # type: ignore[no-untyped-call]
        return cast

    def written_out(self, like: torch.Tensor) -> torch.Tensor:
        """The whole weight, in the dtype of `like`."""
        weight = like.new_empty(self.out_features, self.in_features)
        note("dequantize", like, 0, (self.weight, weight))
        return weight

    def _cast_bias(self, dtype: torch.dtype) -> None:
        if self.bias is not None and self.bias.dtype != dtype:
            self.bias.data = self.bias.data.to(dtype)


def _stored(weight: torch.Tensor, rows: int, columns: int, bits: Bits) -> Iterator[tuple[str, torch.Tensor]]:
    if bits == 8:
        yield "weight", weight.new_empty(rows, columns, dtype=torch.int8)
        yield "row_scales", weight.new_empty(rows, dtype=torch.float32)
        return
    count = rows * columns
    blocks = -(-count // BLOCK)
    yield "weight", weight.new_empty((count + 1) // 2, 1, dtype=torch.uint8)
    yield "scales", weight.new_empty(blocks, dtype=torch.uint8)
    yield "scales_of_scales", weight.new_empty(-(-blocks // NESTED_BLOCK), dtype=torch.float32)
    yield "offset", weight.new_empty((), dtype=torch.float32)
    yield "code", weight.new_empty(_CODE_4BIT, dtype=torch.float32)
    yield "code_of_scales", weight.new_empty(_CODE_8BIT, dtype=torch.float32)


class _FourBit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: Any, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        ctx.input = x if layer.keeps_input else None
        scales = torch.empty_like(layer.scales, dtype=torch.float32)
        shifted = scales + layer.offset
        weight = layer.written_out(x)
        result = F.linear(x, weight, bias)
        del shifted
        del scales
        del weight
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        layer: QuantizedLinear = ctx.layer
        grad_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_bias, None
        scales = torch.empty_like(layer.scales, dtype=torch.float32)
        weight = layer.written_out(grad.new_empty(0, dtype=layer.dtype))
        del scales
        return torch.matmul(grad, weight.to(grad.dtype)), grad_bias, None


class _EightBit(torch.autograd.Function):
    """`MatMul8bitFp`, the CPU's: the weight is written out in forward too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: Any, layer: QuantizedLinear) -> torch.Tensor:
        ctx.x, ctx.layer = x, layer
        return F.linear(x, layer.written_out(x), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        if not ctx.needs_input_grad[0]:
            return None, grad_bias, None
        weight = ctx.layer.written_out(ctx.x)
        return torch.matmul(grad.to(ctx.x.dtype), weight).view(ctx.x.shape), grad_bias, None


class _EightBitCuda(_EightBit):
    """`MatMul8bitLt`: rows of the input are quantised after a search for outliers (assumed to find none: they are a few columns)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: Any, layer: QuantizedLinear) -> torch.Tensor:
        ctx.x, ctx.layer = x, layer
        rows = x.reshape(-1, x.shape[-1])
        quantised, row_scales = _quantised_rows(rows.to(torch.float16))
        product = rows.new_empty(rows.shape[0], layer.out_features, dtype=torch.int32)
        note("int8_mm", quantised, 2 * rows.numel() * layer.out_features, (quantised, layer.weight, product))
        out = torch.empty_like(product, dtype=torch.float16)
        result = out.to(x.dtype)
        del out
        del product
        del quantised, row_scales
        return result.reshape(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        if not ctx.needs_input_grad[0]:
            return None, grad_bias, None
        weight = ctx.layer.written_out(ctx.x)
        scaled = ctx.layer.row_scales * (1.0 / 127.0)
        del scaled
        return torch.matmul(grad.to(ctx.x.dtype), weight).view(ctx.x.shape), grad_bias, None


def _quantised_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row_scales = rows.new_empty(rows.shape[0], dtype=torch.float32)
    quantised = torch.empty_like(rows, dtype=torch.int8)
    magnitudes = rows.abs()
    outliers = magnitudes >= 6.0
    del magnitudes, outliers
    return quantised, row_scales


def quantize(model: Any, bits: Bits, compute_dtype: torch.dtype, backend: str) -> None:
    """Put stand-ins in the place of the layers that bitsandbytes would quantise."""
    for name, module in quantized_layers(model):
        model.set_submodule(name, QuantizedLinear(module, bits, compute_dtype, backend))


def quantized_layers(model: Any) -> list[tuple[str, Any]]:
    """The linear layers that transformers would give to bitsandbytes: all but the head and what is tied to it or kept in float32.

    A classifier's head trains with the adapters, so it must be left out by hand (`llm_int8_skip_modules`), or peft fails.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [*_not_converted(model), *(getattr(model, "_keep_in_fp32_modules", None) or ()), *_HEADS]
    return [
        (name, module)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    ]


def _not_converted(model: Any) -> set[str]:
    """`get_keys_to_not_convert` before weights are tied, as in loading: a tied head is then the last parameter, not the last layer."""
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = set(get_keys_to_not_convert(model))
    last, untied_last = (
        [name for name, _parameter in model.named_parameters(remove_duplicate=unique)][-1] for unique in (True, False)
    )
    if last != untied_last and last not in {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}:
        kept.discard(last.removesuffix(".weight"))
    return kept | {untied_last.removesuffix(".weight")}


def prepare(model: nn.Module) -> None:
    """`prepare_model_for_kbit_training`: nothing of the base trains, and what is not quantised is held in float32."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dtype in {torch.float16, torch.bfloat16}:
            parameter.data = parameter.data.to(torch.float32)


def follow_peft(model: nn.Module) -> None:
    """Let adapters on quantised layers compute as peft's for bitsandbytes do (peft/tuners/lora/bnb.py), not as those on plain layers."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, QuantizedLinear):
            module.forward = types.MethodType(_adapted, module)


def _adapted(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.base_layer(x)
    if self.base_layer.bits == 4:
        result = result.clone()
    for name in self.active_adapters:
        if name not in self.lora_A:
            continue
        must_convert = not torch.is_autocast_enabled()
        if must_convert:
            x = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
        output = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        result = result + (output.to(result.dtype) if must_convert else output)
    return result


def has_quantized(model: nn.Module) -> bool:
    """Whether any layer is quantised."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def true_numel(model: nn.Module) -> int:
    """How many parameters the model has, packed ones counted as what they stand for."""
    quantised = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    inside = {id(parameter) for layer in quantised for name, parameter in layer.named_parameters() if name != "bias"}
    plain = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    return plain + sum(layer.in_features * layer.out_features for layer in quantised)
