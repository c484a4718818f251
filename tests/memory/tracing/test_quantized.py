"""A quantised base takes the bytes that bitsandbytes stores, and writes weights out when it multiplies."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.memory.setup import Setup, Target
from brim.memory.stream import LOADED_WEIGHT, parameter_operator
from brim.memory.tracing.building import build_model
from brim.memory.tracing.quantized import QuantizedLinear, true_numel
from brim.memory.tracing.reference import trace_step
from brim.workload.words import Method, Precision

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip
TARGET = Target("cuda", (8, 0))


def a_setup(method: Method, **changes: Any) -> Setup:
    return Setup(
        **{"config": TINY, "task": "causal-lm", "micro_batch": 2, "length": 64, "method": method, "precision": "bf16", **changes}
    )


def held(model: nn.Module) -> int:
    tensors = [tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if "lora" not in name]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(("method", "bits"), [("qlora", 4), ("lora-8bit", 8)])
def test_stored_bytes_are_those_of_bitsandbytes(method: Method, bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing to compare the stored bytes with")
    transformers: Any = importlib.import_module("transformers")

    config = transformers.AutoConfig.for_model(**TINY)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    real = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    tensors: list[Any] = [*real.parameters(), *real.buffers()]
    for parameter in real.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        tensors.append(getattr(parameter, "SCB", None))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}
    assert held(build_model(a_setup(method, prepared=False))) == sum(sizes.values())


def test_head_and_embeddings_are_not_quantised_and_preparation_makes_them_float32() -> None:
    model: Any = build_model(a_setup("qlora"))
    assert not isinstance(model.get_output_embeddings(), QuantizedLinear)
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float32}
    unprepared: Any = build_model(a_setup("qlora", prepared=False))
    assert unprepared.get_output_embeddings().weight.dtype == torch.bfloat16


def test_a_tied_head_is_the_last_parameter_so_the_last_layer_is_quantised() -> None:
    """OLMo's norms have no weights: without the head, the last layer's projection would come last, and stay whole."""
    olmo = {**TINY, "model_type": "olmo", "tie_word_embeddings": True}
    model = build_model(a_setup("qlora", config=olmo))
    last = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)][-1]
    assert "layers.1.mlp.down_proj" in last


def test_a_base_is_loaded_cast_and_then_gets_adapters_in_an_emptied_cache() -> None:
    trace = trace_step(a_setup("qlora", prepared=True), TARGET).trace
    built = [
        trace.births[event]
        for event, place in zip(trace.events, trace.event_places, strict=True)
        if event >= 0 and trace.places[place].phase == "build"
    ]
    names = [birth.operator for birth in built]
    emptied = names.index("empty_cache")
    assert max(index for index, name in enumerate(names) if name == LOADED_WEIGHT) < emptied
    assert {name for name in names[emptied + 1 :] if name.startswith("build:")} <= {"build", parameter_operator(True, 4)}


@pytest.mark.parametrize("method", ["qlora", "lora-8bit"])
def test_packed_parameters_count_as_what_they_stand_for(method: Method) -> None:
    plain = sum(parameter.numel() for parameter in build_model(a_setup("lora")).parameters())
    assert true_numel(build_model(a_setup(method))) == plain


@pytest.mark.parametrize("method", ["qlora", "lora-8bit"])
def test_backward_writes_every_weight_out_again(method: Method) -> None:
    traced = trace_step(a_setup(method, checkpointing="full"), TARGET)
    down = TINY["intermediate_size"] * TINY["hidden_size"]
    places = traced.trace.places
    born = [birth for birth in traced.trace.births if places[birth.place].phase == "backward" and places[birth.place].round == 1]
    sizes = [birth.size for birth in born]
    itemsize = 2 if method == "qlora" else 4  # 8 bits write it out in the input's dtype, float32 after preparation
    assert sizes.count(down * itemsize) >= 3 * 2


def test_four_bits_take_less_than_eight_and_eight_less_than_half_precision() -> None:
    peaks = [
        max(trace_step(a_setup(method, length=8), TARGET).trace.peaks().values()) for method in ("qlora", "lora-8bit", "lora")
    ]
    assert peaks[0] < peaks[1]
    assert held(build_model(a_setup("lora-8bit", prepared=False))) < held(build_model(a_setup("lora")))


def test_a_dense_layer_with_a_bias_and_a_convolution_of_gpt2_are_replaced() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    model = build_model(a_setup("qlora", config=config, length=16))
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert [(layer.in_features, layer.out_features) for layer in layers[:2]] == [(64, 192), (64, 64)]
    assert trace_step(a_setup("qlora", config=config, length=16), TARGET).trainable_parameters > 0


def test_a_convolution_of_gpt2_is_made_contiguous_before_it_is_quantised() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    copies = {
        method: [birth.operator for birth in trace_step(a_setup(method, config=config, length=16), TARGET).trace.births].count(
            "aten::contiguous"
        )
        for method in ("qlora", "lora-8bit")
    }
    assert copies == {"qlora": 2 * 4, "lora-8bit": 0}  # bitsandbytes quantises to 8 bits from a copy on the host


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_eight_bits_are_made_from_a_second_copy_in_float16_of_any_weight(precision: Precision) -> None:
    """Transformers takes the loaded weight to the CPU, and bitsandbytes the one from there to the card."""
    births = trace_step(a_setup("lora-8bit", precision=precision), TARGET).trace.births
    loaded = [index for index, birth in enumerate(births) if birth.operator == LOADED_WEIGHT]
    assert len(loaded) == 2 * 7
    assert all((births[index + 1].operator, births[index + 1].size) == ("aten::_to_copy", births[index].size) for index in loaded)


def test_the_cache_is_emptied_also_where_nothing_is_cast() -> None:
    births = trace_step(a_setup("qlora", precision="fp32"), TARGET).trace.births
    assert [birth.operator for birth in births].count("empty_cache") == 1
