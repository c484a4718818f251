"""LLaMA-Factory: one YAML for `llamafactory-cli train`. Keys: src/llamafactory/hparams of its repository, on top of TrainingArguments.

It trains what trains in float32 under `bf16` and `fp16` and holds the rest in half precision (model/adapter.py); `pure_bf16` leaves all in
bfloat16. Gradient checkpointing is on unless it is switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.errors import UnsupportedError
from brim.locale import _
from brim.planner.emit import arguments, deepspeed, launchers, sft
from brim.planner.emit.files import Files
from brim.planner.emit.loss_division import check_loss_division
from brim.planner.emit.said import head
from brim.planner.emit.text import json_text, yaml_text

if TYPE_CHECKING:
    from brim.planner.emit.recipe import Recipe

NAME = "llama_factory.yaml"
DATASETS = "dataset_info.json"
_DATASET = "training_data"
_TOOL = "LLaMA-Factory"
_ATTENTION = {"eager": "disabled", "sdpa": "sdpa", "flash2": "fa2"}


def files(recipe: Recipe) -> Files:
    """`llama_factory.yaml`, its `dataset_info.json`, and the engine's file."""
    _check(recipe)
    notes = [*sft.notes(recipe, _TOOL), *_notes(recipe)]
    settings = {
        **_model(recipe),
        "stage": "sft",
        "do_train": True,
        **_method(recipe),
        "dataset": _DATASET,
        "dataset_dir": ".",
        "cutoff_len": recipe.plan.workload.max_length,
        "packing": False,
        "output_dir": "outputs",
        **arguments.batch(recipe),
        **arguments.steps(recipe),
        **_precision(recipe),
        **arguments.loader(recipe),
    }
    if recipe.zero_stage is not None:
        settings["deepspeed"] = deepspeed.NAME
    texts = {NAME: yaml_text(head(recipe, _how(recipe), *notes), settings), DATASETS: json_text({_DATASET: _dataset(recipe)})}
    if recipe.zero_stage is not None:
        texts[deepspeed.NAME] = deepspeed.deepspeed_text(recipe)
    if recipe.is_fsdp:
        texts[launchers.ACCELERATE] = launchers.accelerate_text(recipe)
    return Files(texts, (*recipe.notes, *notes))


def _check(recipe: Recipe) -> None:
    sft.check(recipe, _TOOL)
    check_loss_division(recipe, _TOOL)
    sft.check_half_base(recipe, _TOOL)
    if recipe.best.precision == "fp16" and recipe.mixed is None:
        raise UnsupportedError(_("LLaMA-Factory trains in pure bf16, not in pure fp16."), hint=_("Take --precision amp-fp16."))


def _notes(recipe: Recipe) -> list[str]:
    said = []
    if recipe.plan.workload.loss == "chunked":
        said.append(_("LLaMA-Factory's chunked loss comes with all of Liger's kernels, which take other memory than planned."))
    if recipe.data is not None and sft.shape(recipe) not in {"alpaca", "messages"}:
        said.append(_("LLaMA-Factory reads alpaca or sharegpt records: name your columns in {file}.").format(file=DATASETS))
    return said


def _how(recipe: Recipe) -> str:
    if recipe.is_fsdp:
        command = f"accelerate launch --config_file {launchers.ACCELERATE} LLaMA-Factory/src/train.py {NAME}"
        return _("In this folder: {command}").format(command=command)
    environment = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={recipe.gpus_per_node}"
    if recipe.plan.machine.nodes > 1:
        environment += f" NNODES={recipe.plan.machine.nodes} NODE_RANK=0 MASTER_ADDR=... MASTER_PORT=29500"
    return _("In this folder: {command}").format(command=f"{environment} llamafactory-cli train {NAME}")


def _model(recipe: Recipe) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model_name_or_path": recipe.model,
        "flash_attn": _ATTENTION[recipe.best.attention],
    }
    by_model = recipe.checkpoints and not arguments.by_fsdp(recipe)
    settings |= {"use_reentrant_gc": False} if by_model else {"disable_gradient_checkpointing": True}
    if recipe.plan.workload.loss == "chunked":
        settings["enable_liger_kernel"] = True
    return settings


def _method(recipe: Recipe) -> dict[str, Any]:
    if not recipe.is_lora:
        return {"finetuning_type": "full"}
    targets = recipe.lora_targets
    settings: dict[str, Any] = {
        "finetuning_type": "lora",
        "lora_rank": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": recipe.lora_dropout,
        "lora_target": "all" if isinstance(targets, str) else ",".join(targets),
    }
    if recipe.quantised_bits:
        settings |= {"quantization_bit": recipe.quantised_bits, "quantization_method": "bnb"}
    if recipe.quantised_bits == 4:
        settings |= {"quantization_type": "nf4", "double_quantization": True}
    return settings


def _precision(recipe: Recipe) -> dict[str, Any]:
    pure = {"pure_bf16": True} if recipe.mixed is None and recipe.half == "bf16" else {}
    return {**arguments.precision(recipe), **pure}


def _dataset(recipe: Recipe) -> dict[str, Any]:
    """The description that LLaMA-Factory wants of every dataset (its data/README.md)."""
    where = (
        {"file_name": recipe.data or sft.NO_DATA} if sft.is_local(recipe) or recipe.data is None else {"hf_hub_url": recipe.data}
    )
    if sft.shape(recipe) != "messages":
        return {**where, "formatting": "alpaca"}
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    }
    return {**where, "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
