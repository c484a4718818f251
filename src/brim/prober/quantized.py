"""The linear layers of a model, really quantised by bitsandbytes: the same layers that a trace replaces with stand-ins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from brim.errors import RunError
from brim.locale import _
from brim.memory.tracing.quantized import quantized_layers
from brim.step.four_bits import keep_trainable


def quantize(model: Any, bits: int, compute_dtype: torch.dtype, device: str) -> None:
    """Replace layer by layer, and move the rest to the device."""
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        text = _("The 8-bit optimizers and the quantised methods are bitsandbytes', which cannot be imported: {why}.")
        raise RunError(text.format(why=error), hint=_("Install it: pip install bitsandbytes.")) from error
    made: Any = bnb.nn
    for name, layer in quantized_layers(model):
        weight = _weight(layer)
        features = weight.shape[1], weight.shape[0]
        if bits == 4:
            quantized = made.Linear4bit(*features, bias=layer.bias is not None, compute_dtype=compute_dtype, quant_type="nf4")
            quantized.weight = made.Params4bit(weight.data, requires_grad=False, quant_type="nf4")
        else:
            quantized = made.Linear8bitLt(*features, bias=layer.bias is not None, has_fp16_weights=False)
            quantized.weight = made.Int8Params(weight.data.to(torch.float16), requires_grad=False, has_fp16_weights=False)
        if layer.bias is not None:
            quantized.bias = nn.Parameter(layer.bias.data, requires_grad=False)
        model.set_submodule(name, quantized.to(device))
    model.to(device)
    keep_trainable(model)
    setattr(model, "is_loaded_in_4bit" if bits == 4 else "is_loaded_in_8bit", True)


def _weight(layer: Any) -> torch.Tensor:
    """As [out, in]: GPT-2's Conv1D holds it the other way round."""
    weight: torch.Tensor = layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.t().contiguous()
