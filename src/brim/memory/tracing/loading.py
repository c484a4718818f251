"""How a quantised base comes onto the card, which leaves holes in the allocator's segments that the training then uses.

`from_pretrained(quantization_config=...)` (transformers 5) first takes and gives back as much as the whole base will need
(modeling_utils.py, `caching_allocator_warmup`): one large segment. Then it copies weight by weight, in the order of their names, and
quantises each as it comes. `prepare_model_for_kbit_training` replaces what is not quantised by float32 copies, and peft adds its adapters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from brim.memory.scratch import scratch_name
from brim.memory.stream import LOADED_COPY, LOADED_WEIGHT
from brim.memory.tracing.quantized import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from brim.memory.tracing.trace import Tracer

_ORDER = {
    4: ("weight", "code", "offset", "scales_of_scales", "scales", "code_of_scales"),
    8: ("row_scales", "weight"),
}
"""The tensors of a quantised weight as bitsandbytes allocates them (functional.py `quantize_4bit`, nn/modules.py `Int8Params`)."""


def load_quantized(
    tracer: Tracer, model: nn.Module, go: Callable[[torch.Tensor], None], adopt: Callable[[torch.Tensor], None]
) -> None:
    """Record the birth of every parameter; `go` enters a parameter's place, `adopt` counts it."""
    modules = {id(parameter): module for module in model.modules() for parameter in module.parameters(recurse=False)}
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    bits, loaded = layers[0].bits, layers[0].dtype
    named = [(name, parameter) for name, parameter in model.named_parameters() if "lora_" not in name]
    tracer.transient((1,), scratch_name("warmup", 8 * loaded.itemsize // bits))
    copies: dict[int, list[int]] = {}
    done: set[int] = set()
    for _name, parameter in sorted(named, key=lambda pair: _natural(pair[0])):
        module: Any = modules[id(parameter)]
        if id(parameter) in done:
            continue
        go(parameter)
        if isinstance(module, QuantizedLinear) and parameter is not module.bias:
            done |= {id(tensor) for tensor in _load_weight(tracer, module, adopt)}
            continue
        if parameter.dtype == loaded:
            adopt(parameter)
            continue
        copies[id(parameter)] = tracer.take((parameter.numel() * loaded.itemsize,), LOADED_COPY)
    for parameter in model.parameters():
        if id(parameter) in copies:
            go(parameter)
            adopt(parameter)
            tracer.give(copies[id(parameter)])
    for parameter in model.parameters():  # the adapters
        go(parameter)
        adopt(parameter)


def _load_weight(tracer: Tracer, layer: QuantizedLinear, adopt: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
    """A weight of the checkpoint, what it becomes, and what that takes in passing."""
    count = layer.in_features * layer.out_features
    tensors: list[torch.Tensor] = [getattr(layer, name) for name in _ORDER[layer.bits]]
    taken = tracer.take((count * layer.dtype.itemsize,), LOADED_WEIGHT)
    if layer.bits == 8:
        halves = tracer.take((2 * count,), "aten::_to_copy") if layer.dtype != torch.float16 else []
        for tensor in tensors:
            adopt(tensor)
        tracer.give(halves)
    else:
        scales = 4 * layer.scales.numel()
        taken = [*tracer.take((scales,), "aten::empty"), *taken]
        for tensor in tensors[:3]:
            adopt(tensor)
        shifted = tracer.take((scales,), "aten::sub")
        for tensor in tensors[3:]:
            adopt(tensor)
        tracer.give(shifted)
    tracer.give(taken)
    return tensors


def _natural(name: str) -> list[tuple[int, str | int]]:
    """Names in the order in which people count: layer 10 after layer 9. peft's wrappers are not in the checkpoint."""
    plain = name.replace("base_model.model.", "").replace(".base_layer", "").replace(".original_module", "")
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"[.]", plain)]
