"""Python that loads the model as the plan has it: dtype, attention, quantisation, adapters, what is frozen, what is checkpointed.

These belong to the model and not to the training arguments, so a YAML cannot say them; a function can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.planner.emit.arguments import by_fsdp
from brim.planner.emit.loss_division import loss_division

if TYPE_CHECKING:
    from brim.planner.emit.recipe import Recipe

_AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
}
_TASK = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}


def load_model_code(recipe: Recipe) -> str:
    """A function `load_model`, complete with its imports."""
    if recipe.is_function:
        module, _colon, function = recipe.plan.workload.model.partition(":")
        torch = recipe.dtype != "float32"
        imports = [*_standard(recipe), *(["import torch"] if torch else []), f"from {module} import {function.partition('.')[0]}"]
        cast = [f"model = model.to(torch.{recipe.dtype})"] if torch else []
        body = [*imports, "", f"model = {function}()", *cast, *_loss_kwargs(recipe), *_freeze(recipe)]
    else:
        model = [*_loading(recipe), *_loss_kwargs(recipe), *_adapters(recipe)]
        body = [*_imports(recipe), "", *model, *_freeze(recipe), *_checkpointing(recipe)]
    signature = "def load_model(**changes):" if not recipe.is_function else "def load_model():"
    lines = [*body, "return model"]
    return f"{signature}\n" + "".join(f"    {line}\n" if line else "\n" for line in lines)


def _imports(recipe: Recipe) -> list[str]:
    lines = ["import torch"]
    names = [_AUTO[recipe.plan.workload.task]]
    if recipe.quantised_bits:
        names.append("BitsAndBytesConfig")
    if recipe.is_lora:
        peft = ["LoraConfig", "get_peft_model"] + (["prepare_model_for_kbit_training"] if recipe.quantised_bits else [])
        lines.append(f"from peft import {', '.join(peft)}")
    lines.append(f"from transformers import {', '.join(names)}")
    if recipe.every is not None:
        lines.append("from transformers.modeling_layers import GradientCheckpointingLayer")
    return [*_standard(recipe), *lines]


def _standard(recipe: Recipe) -> list[str]:
    used = (["import os"] if _is_placed(recipe) else []) + (["import re"] if recipe.plan.workload.freeze else [])
    return [*used, ""] if used else []


def _is_placed(recipe: Recipe) -> bool:
    """Whether each process loads a quantised base onto its own card; engines that cut it into shards place it themselves."""
    return bool(recipe.quantised_bits) and not recipe.is_fsdp and recipe.zero_stage != 3


def _loading(recipe: Recipe) -> list[str]:
    auto = _AUTO[recipe.plan.workload.task]
    lines = [f'settings = {{"dtype": torch.{recipe.dtype}, "attn_implementation": "{recipe.attention}"}}']
    if recipe.quantised_bits == 4:
        compute = recipe.dtype if recipe.half else "float32"
        storage = f", bnb_4bit_quant_storage=torch.{compute}" if recipe.is_fsdp or recipe.zero_stage == 3 else ""
        lines += [
            'settings["quantization_config"] = BitsAndBytesConfig(',
            '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,',
            f"    bnb_4bit_compute_dtype=torch.{compute}{storage},",
            ")",
        ]
    elif recipe.quantised_bits == 8:
        lines.append('settings["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)')
    if _is_placed(recipe):
        lines.append('settings["device_map"] = {"": int(os.environ.get("LOCAL_RANK", 0))}')
    return [
        *lines,
        f"model = {auto}.from_pretrained(MODEL, **{{**settings, **changes}})",
        "model.config.use_cache = False",
    ]


def _loss_kwargs(recipe: Recipe) -> list[str]:
    """On the model itself: the Trainer looks behind peft's wrapper."""
    return [] if loss_division(recipe).is_safe else ["model.accepts_loss_kwargs = False"]


def _adapters(recipe: Recipe) -> list[str]:
    if not recipe.is_lora:
        return []
    lines = []
    if recipe.quantised_bits:
        reentrant = '{"use_reentrant": False}'
        by_model = recipe.checkpoints and not by_fsdp(recipe)
        lines.append(
            "model = prepare_model_for_kbit_training("
            f"model, use_gradient_checkpointing={by_model}, gradient_checkpointing_kwargs={reentrant})"
        )
    elif recipe.checkpoints:
        lines.append("model.enable_input_require_grads()  # a frozen embedding would cut checkpointed layers off")
    lines += [
        "adapters = LoraConfig(",
        f"    r={recipe.lora_rank}, lora_alpha={recipe.lora_alpha}, lora_dropout={recipe.lora_dropout},",
        f"    target_modules={recipe.lora_targets!r},",
        f'    task_type="{_TASK[recipe.plan.workload.task]}",',
        ")",
        "model = get_peft_model(model, adapters)",
    ]
    if recipe.plan.workload.lora_dtype is not None:
        lines += [
            "for name, parameter in model.named_parameters():",
            '    if "lora_" in name:',
            f"        parameter.data = parameter.data.to(torch.{recipe.plan.workload.lora_dtype})",
        ]
    return lines


def _freeze(recipe: Recipe) -> list[str]:
    """A plain word that names a module means that module, as in brim: `encoder` is not a decoder's `encoder_attn`."""
    if not recipe.plan.workload.freeze:
        return []
    return [
        "named = dict(model.named_parameters())",
        f"for pattern in {list(recipe.plan.workload.freeze)!r}:",
        '    found = [name for name in named if pattern in name.split(".")] or [name for name in named if re.search(pattern, name)]',
        "    for name in found:",
        "        named[name].requires_grad_(False)",
    ]


def _checkpointing(recipe: Recipe) -> list[str]:
    if recipe.every is None:
        return []
    return [
        'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
        "layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]",
        "for index, layer in enumerate(layer for layer in layers if layer.gradient_checkpointing):",
        f"    layer.gradient_checkpointing = index % {recipe.every} == 0",
    ]
