"""The model of a setup, built and prepared as it would be for training; on the meta device it takes no memory."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.memory.losses import use_chunked_loss
from brim.memory.quantized import BITS, follow_peft, prepare, quantize

if TYPE_CHECKING:
    from brim.memory.setup import Setup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""What autocast casts to."""


def build_model(setup: Setup, device: str = "meta", backend: str = "cuda") -> nn.Module:
    """The model of the task, prepared as it would be for training; on the meta device it takes no memory."""
    import transformers

    facts = {key: value for key, value in setup.config.items() if key not in {"architectures", "torch_dtype", "dtype"}}
    if setup.task == "classification":
        facts["num_labels"] = setup.num_labels
        facts.setdefault("pad_token_id", 0)
    config = transformers.AutoConfig.for_model(**facts)
    automatic: Any = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "classification": transformers.AutoModelForSequenceClassification,
    }[setup.task]
    # Autocast keeps what trains in float32; a frozen base is held in the half dtype, and peft's adapters are float32.
    dtype = DTYPES.get(setup.precision) or (torch.float32 if setup.method == "full" else HALVES[setup.precision])
    with torch.device(device):
        model: Any = automatic.from_config(config, attn_implementation=setup.attention, dtype=dtype)
    model.train()
    if setup.method in BITS:
        quantize(model, BITS[setup.method], dtype, backend)
        if setup.prepared:
            prepare(model)
    if setup.checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if setup.checkpointing != "full":
            _checkpoint_every(model, int(setup.checkpointing.partition(":")[2]))
    if setup.method != "full":
        model = _with_lora(model, setup, device)
        follow_peft(model)
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in setup.freeze):
            parameter.requires_grad_(False)
    if setup.loss == "chunked":
        assert setup.task == "causal-lm", "the chunked loss is one of causal language models"
        use_chunked_loss(model)
    built: nn.Module = model
    return built


def _with_lora(model: Any, setup: Setup, device: str) -> Any:
    import peft

    targets: Any = setup.lora_targets or None
    if targets == ("all-linear",):
        targets = "all-linear"
    task = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}[setup.task]
    if setup.checkpointing != "none":
        model.enable_input_require_grads()
    with torch.device(device):
        return peft.get_peft_model(model, peft.LoraConfig(r=setup.lora_rank, target_modules=targets, task_type=task))


def _checkpoint_every(model: nn.Module, every: int) -> None:
    """Keep checkpointing on every `every`-th layer only."""
    layers = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is True and _is_layer(module)
    ]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]


def _is_layer(module: nn.Module) -> bool:
    import transformers

    layer = getattr(transformers.modeling_layers, "GradientCheckpointingLayer", None)
    return layer is not None and isinstance(module, layer)


def make_batch(setup: Setup, device: str = "meta") -> dict[str, Any]:
    """Token ids, labels, and a mask where there is padding (its last tokens); on the meta device shapes only."""

    def tokens(length: int) -> torch.Tensor:
        # Above the special tokens, of which some models count the occurrences.
        return torch.randint(3, int(setup.config.get("vocab_size", 4)), (setup.micro_batch, length), device=device)

    batch: dict[str, Any] = {"input_ids": tokens(setup.length)}
    if setup.padded:
        batch["attention_mask"] = torch.ones(setup.micro_batch, setup.length, dtype=torch.long, device=device)
        batch["attention_mask"][:, -1:] = 0
    if setup.task == "classification":
        batch["labels"] = torch.randint(setup.num_labels, (setup.micro_batch,), device=device)
        batch["input_ids"][:, -1] = setup.config.get("eos_token_id") or 0
    else:
        batch["labels"] = tokens(setup.target_length or setup.length)
    if setup.task != "classification":
        batch["use_cache"] = False
    return batch


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in the order in which they run: every list of modules that are all of one class."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            kinds = Counter(type(block) for block in module)
            if len(kinds) == 1 and any(True for _parameter in module[0].parameters()) and not _is_inside(module, found):
                found.extend(module)
    return found


def _is_inside(candidate: nn.Module, found: list[nn.Module]) -> bool:
    return any(candidate is inner for outer in found for inner in outer.modules())
