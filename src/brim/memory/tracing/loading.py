"""Records how a model is loaded onto the card. Loading leaves gaps in the allocator's segments, which training then uses.

A plain model is moved with `.to(device)`, children before their parents, parameters before buffers. For a quantised base,
`from_pretrained(quantization_config=...)` (transformers 5) first allocates and frees the memory of the whole base as one large segment
(modeling_utils.py, `caching_allocator_warmup`). Then it copies the weights in the order of their names and quantises each after its copy.
`prepare_model_for_kbit_training` replaces tensors that are not quantised by float32 copies and empties the cache. peft then adds its
adapters: first all in the dtype of their layers, then float32 copies that replace them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.memory.allocator import EMPTY_CACHE_BYTES
from brim.memory.scratch import scratch_name
from brim.memory.stream import LOADED_COPY, LOADED_WEIGHT
from brim.memory.tracing.building import kept_in_float32
from brim.memory.tracing.quantized import QuantizedLinear, has_quantized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.tracing.trace import Tracer

_ORDER = {
    4: ("weight", "code", "offset", "scales_of_scales", "scales", "code_of_scales"),
    8: ("row_scales", "weight"),
}
"""Tensors of a quantised weight, in allocation order (bitsandbytes: functional.py `quantize_4bit`, nn/modules.py `Int8Params`)."""


Visit = Callable[[torch.Tensor], None]


def load_on_card(tracer: Tracer, model: nn.Module, go: Visit, adopt: Visit) -> None:
    """Record the birth of every parameter and buffer. `go` sets the current place to that of a tensor, `adopt` records a parameter."""
    if has_quantized(model):
        _load_quantized(tracer, model, go, adopt)
    adapters = {id(parameter) for name, parameter in model.named_parameters() if "lora_" in name}
    for tensor in _in_move_order(model):
        if id(tensor) in adapters:
            continue
        go(tensor)
        if isinstance(tensor, nn.Parameter):
            adopt(tensor)
        else:
            tracer.adopt([tensor], "buffers")
    _load_adapters(tracer, model, go, adopt)


def _in_move_order(module: nn.Module) -> Iterator[torch.Tensor]:
    for child in module.children():
        yield from _in_move_order(child)
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _load_adapters(tracer: Tracer, model: nn.Module, go: Visit, adopt: Visit) -> None:
    copies = []
    for module in model.modules():
        base: Any = getattr(module, "base_layer", None)
        if base is None:
            continue
        dtype = base.compute_dtype if isinstance(base, QuantizedLinear) and base.bits == 4 else base.weight.dtype
        for name, parameter in module.named_parameters():
            if "lora_" not in name:
                continue
            go(parameter)
            is_cast = dtype.is_floating_point and dtype.itemsize < parameter.itemsize
            copies.append((parameter, tracer.take((parameter.numel() * dtype.itemsize,), "aten::_to_copy") if is_cast else []))
            if not is_cast:
                adopt(parameter)
    for parameter, copy in copies:
        go(parameter)
        adopt(parameter)
        tracer.give(copy)


def _load_quantized(tracer: Tracer, model: nn.Module, go: Visit, adopt: Visit) -> None:
    modules = {id(parameter): module for module in model.modules() for parameter in module.parameters(recurse=False)}
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    bits, loaded = layers[0].bits, layers[0].dtype
    named = [(_checkpoint_name(name), parameter) for name, parameter in model.named_parameters() if "lora_" not in name]
    base: Any = model
    tied = set(getattr(base, "all_tied_weights_keys", ()))  # the warm-up skips these, even if the checkpoint contains them
    kept = kept_in_float32(base, loaded)
    tracer.transient((1,), scratch_name("warmup", 8 * loaded.itemsize // bits))
    copies: dict[int, list[int]] = {}
    done: set[int] = set()
    for name, parameter in sorted(named, key=lambda pair: _natural_order(pair[0])):
        module: Any = modules[id(parameter)]
        if id(parameter) in done:
            continue
        go(parameter)
        if isinstance(module, QuantizedLinear) and parameter is not module.bias:
            done |= {id(tensor) for tensor in _load_weight(tracer, module, adopt)}
            continue
        operator = "aten::_to_copy" if name in tied else LOADED_COPY
        if parameter.dtype == loaded or kept & set(name.split(".")):
            tracer.transient((parameter.numel() * loaded.itemsize,), operator)  # so that the warm-up can count it
            adopt(parameter)
            continue
        copies[id(parameter)] = tracer.take((parameter.numel() * loaded.itemsize,), operator)
    for name, parameter in named:
        if name in tied:  # the checkpoint contains both: transformers compares them, and does not tie them if they differ
            tracer.transient((parameter.numel(),), "aten::eq")
    for parameter in model.parameters():
        if id(parameter) in copies:
            go(parameter)
            adopt(parameter)
            tracer.give(copies[id(parameter)])
    # `prepare_model_for_kbit_training` empties the cache even if it has not cast any tensor.
    tracer.transient((EMPTY_CACHE_BYTES,), "empty_cache")


def _load_weight(tracer: Tracer, layer: QuantizedLinear, adopt: Visit) -> list[torch.Tensor]:
    """Record a weight of the checkpoint, its quantised tensors and the temporary memory of quantisation."""
    count = layer.in_features * layer.out_features
    tensors: list[torch.Tensor] = [getattr(layer, name) for name in _ORDER[layer.bits]]
    taken = tracer.take((count * layer.dtype.itemsize,), LOADED_WEIGHT)
    if layer.bits == 8:
        halves = tracer.take((2 * count,), "aten::_to_copy")  # also of a float16 weight: transformers goes by way of the CPU
        for tensor in tensors:
            adopt(tensor)
        tracer.give(halves)
    else:
        scales = 4 * layer.scales.numel()
        if layer.is_transposed:  # the weight of a Conv1D is transposed, and bitsandbytes makes it contiguous
            taken = [*tracer.take((count * layer.dtype.itemsize,), "aten::contiguous"), *taken]
        taken = [*tracer.take((scales,), "aten::empty"), *taken]
        for tensor in tensors[:3]:
            adopt(tensor)
        shifted = tracer.take((scales,), "aten::sub")
        for tensor in tensors[3:]:
            adopt(tensor)
        tracer.give(shifted)
    tracer.give(taken)
    return tensors


def _checkpoint_name(name: str) -> str:
    """The name of a parameter in the checkpoint, without the parts that peft adds."""
    return name.replace("base_model.model.", "").replace(".base_layer", "").replace(".original_module", "")


def _natural_order(name: str) -> list[tuple[int, str | int]]:
    """Sort key for natural order: layer 10 after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"[.]", name)]
