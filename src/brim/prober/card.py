"""Load a model onto a CUDA card with the same allocations as loading a checkpoint, but without a checkpoint.

The caching allocator keeps the segments that loading has used, and training fills the gaps in them. If a trial allocated its weights in a
different order, or with different temporary tensors, the gaps would differ, and near the limit so would its largest micro-batch. So a plain
model is built on the host and moved with `.to(device)`, and a quantised one is loaded by `from_pretrained` from a sparse file of zeros.

The weights are then filled in place with finite values, because GradScaler skips steps with infinities, and with values other than zero,
because a card computes faster with zeros.
"""

from __future__ import annotations

import tempfile
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from brim.emulator.training import write_zeros
from brim.memory.tracing.building import (
    automatic_class,
    base_dtype,
    compute_dtype,
    model_of_config,
    prepare_model,
    read_config,
    refusals,
)
from brim.memory.tracing.quantized import BITS, quantized_layers
from brim.step.four_bits import keep_trainable
from brim.workload.resolve import untie_output

if TYPE_CHECKING:
    from brim.memory.setup import Setup

_SPREAD: Final = 0.02
"""Standard deviation of the weights, as in the initialisation of most models."""


def load_on_card(setup: Setup, device: str) -> nn.Module:
    """The model of a setup, on this device and prepared for training."""
    with refusals():
        model = _load_quantized(setup, device) if setup.method in BITS else _build_and_move(setup, device)
    torch.cuda.empty_cache()  # release temporary tensors of the initialisation
    model.train()
    # Adapters are created on the host and follow the layers that they adapt, as in scripts that call peft.
    return prepare_model(model, setup, "cpu")


@torch.no_grad()
def _build_and_move(setup: Setup, device: str) -> Any:
    from transformers.initialization import no_init_weights

    with no_init_weights():  # tensors that are never written take no RAM on the host
        model = model_of_config(setup, read_config(setup))
    model.tie_weights()
    untie_output(model, setup.config)
    model.to(device)
    for parameter in model.parameters():
        parameter.zero_()
    model.initialize_weights()
    return model


def _load_quantized(setup: Setup, device: str) -> Any:
    from transformers.utils import logging

    config = read_config(setup)
    with torch.device("meta"):
        skeleton = model_of_config(setup, config)
    attention = {"attn_implementation": setup.attention} if setup.attention in {"eager", "sdpa"} else {}
    untyped_logging: Any = logging
    untyped_logging.disable_progress_bar()
    getLogger("bitsandbytes.autograd._functions").setLevel(ERROR)  # it warns about the cast in every matrix product
    with tempfile.TemporaryDirectory(prefix="brim-") as folder:
        config.save_pretrained(folder)
        write_zeros(Path(folder) / "model.safetensors", skeleton, base_dtype(setup))
        model = automatic_class(setup.task).from_pretrained(
            folder, config=config, dtype=base_dtype(setup), device_map={"": device}, local_files_only=True,
            quantization_config=_quantization(setup, skeleton), **attention,
        )  # fmt: skip
    keep_trainable(model)
    _fill(model)
    if not setup.prepared:
        return model
    import peft

    prepare: Any = peft.prepare_model_for_kbit_training
    return prepare(model, use_gradient_checkpointing=False)


def _quantization(setup: Setup, skeleton: nn.Module) -> Any:
    """The settings of `brim train`. A classifier's head trains with the adapters, so it is not quantised."""
    import transformers

    config_class: Any = transformers.BitsAndBytesConfig
    skipped = None
    if setup.task == "classification":
        quantized = {name for name, _layer in quantized_layers(skeleton)}
        skipped = [name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear) and name not in quantized]
    if BITS[setup.method] == 8:
        return config_class(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return config_class(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype(setup), llm_int8_skip_modules=skipped,
    )  # fmt: skip


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Replace the zeros by random values, in place."""
    for name, parameter in model.named_parameters():
        quantized: Any = parameter
        if parameter.dtype == torch.uint8:
            parameter.random_(0, 256)
            quantized.quant_state.state2.absmax.zero_()
            quantized.quant_state.offset.fill_(_SPREAD)  # with double quantisation: the mean of all scales
        elif parameter.dtype == torch.int8:
            parameter.random_(-127, 128)
            quantized.SCB.fill_(2 * _SPREAD)
        elif parameter.dim() > 1:
            parameter.normal_(0, _SPREAD)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
