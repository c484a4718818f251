"""axolotl: one YAML for `axolotl train`. Its keys: docs/config-reference, docs/attention, docs/multi-gpu, integrations/liger.

axolotl loads the weights in the half precision that it computes in (utils/config/__init__.py, `torch_dtype`), so float32 weights under
autocast exist there only where an engine keeps them.
"""

from __future__ import annotations

from typing import Any

from brim.errors import UnsupportedError
from brim.locale import _
from brim.planner.emit import arguments, deepspeed, sft
from brim.planner.emit.files import Files
from brim.planner.emit.loss_division import check_loss_division
from brim.planner.emit.recipe import LION_BETA2, MOMENTUM, Recipe
from brim.planner.emit.said import head
from brim.planner.emit.text import yaml_text

NAME = "axolotl.yaml"
_TOOL = "axolotl"
_TYPE = {"messages": "chat_template", "alpaca": "alpaca", "text": "completion", "other": "chat_template"}


def files(recipe: Recipe) -> Files:
    """`axolotl.yaml`, and `deepspeed.json` where ZeRO needs it."""
    _check(recipe)
    notes = [*sft.notes(recipe, _TOOL), *_notes(recipe)]
    settings = {
        "base_model": recipe.model,
        "attn_implementation": recipe.attention,
        **_adapter(recipe),
        **_data(recipe),
        **_training(recipe),
        **_precision(recipe),
        **arguments.checkpointing(recipe, code=False),
        **arguments.loader(recipe),
        **_engine(recipe),
        **_loss(recipe),
    }
    command = f"axolotl train {NAME} --launcher torchrun -- --nproc_per_node={recipe.gpus_per_node} --nnodes={recipe.plan.machine.nodes}"
    how = _("In this folder: {command}").format(command=command)
    texts = {NAME: yaml_text(head(recipe, how, *notes), settings)}
    if recipe.zero_stage is not None:
        texts[deepspeed.NAME] = deepspeed.deepspeed_text(recipe)
    return Files(texts, (*recipe.notes, *notes))


def _check(recipe: Recipe) -> None:
    sft.check(recipe, _TOOL)
    check_loss_division(recipe, _TOOL)
    sft.check_half_base(recipe, _TOOL)
    if not recipe.is_lora and recipe.best.precision.startswith("amp-") and recipe.best.sharding in {"none", "ddp"}:
        text = _("axolotl holds weights in the half precision that it computes in, and {precision} keeps them in float32.")
        raise UnsupportedError(
            text.format(precision=recipe.best.precision), hint=_("Take --precision bf16, --sharding zero2, or another format.")
        )


def _notes(recipe: Recipe) -> list[str]:
    said = []
    if recipe.plan.workload.loss == "chunked":
        said.append(_("axolotl's chunked loss is Liger's kernel, which takes other memory than planned."))
    if recipe.data is not None and sft.shape(recipe) == "other":
        said.append(_("axolotl must know how a record looks: datasets.type is a guess, see its page on dataset formats."))
    if recipe.plan.machine.nodes > 1:
        said.append(_("For several nodes add torchrun's --rdzv_endpoint, --rdzv_id and --rdzv_backend after the two dashes."))
    return said


def _adapter(recipe: Recipe) -> dict[str, Any]:
    if not recipe.is_lora:
        return {}
    targets = recipe.lora_targets
    settings: dict[str, Any] = {
        "adapter": "qlora" if recipe.quantised_bits == 4 else "lora",
        "lora_r": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": recipe.lora_dropout,
        **({"lora_target_linear": True} if isinstance(targets, str) else {"lora_target_modules": targets}),
    }
    if recipe.quantised_bits:
        settings[f"load_in_{recipe.quantised_bits}bit"] = True
    return settings


def _data(recipe: Recipe) -> dict[str, Any]:
    dataset: dict[str, Any] = {"path": recipe.data or sft.NO_DATA, "type": _TYPE[sft.shape(recipe)]}
    kind = sft.file_kind(recipe)
    if kind is not None:
        dataset["ds_type"] = kind
    return {
        "datasets": [dataset],
        "val_set_size": 0.0,
        "output_dir": "outputs",
        "sequence_len": recipe.plan.workload.max_length,
        "sample_packing": False,
        "pad_to_sequence_len": False,
    }


def _training(recipe: Recipe) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "micro_batch_size": recipe.cut.micro_batch,
        "gradient_accumulation_steps": recipe.cut.accumulation,
        "eval_batch_size": recipe.eval_batch,
        "num_epochs": recipe.plan.workload.epochs,
        "optimizer": recipe.optim,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler": "linear",
        "warmup_steps": recipe.plan.workload.warmup_steps or 0,
        "weight_decay": 0.0,
        "max_grad_norm": recipe.max_grad_norm,
        "seed": recipe.plan.workload.seed,
    }
    if recipe.best.optimizer == "sgd-momentum":
        settings["optim_args"] = {"momentum": MOMENTUM}
    if recipe.best.optimizer == "lion":
        settings["adam_beta2"] = LION_BETA2
    return settings


def _precision(recipe: Recipe) -> dict[str, Any]:
    """`bf16` is `auto` unless it is said; `bfloat16` and `float16` are the ways without autocast."""
    settings: dict[str, Any] = {"bf16": recipe.mixed == "bf16", "fp16": recipe.mixed == "fp16"}
    if recipe.mixed is None and recipe.half is not None:
        settings["bfloat16" if recipe.half == "bf16" else "float16"] = True
    return settings


def _engine(recipe: Recipe) -> dict[str, Any]:
    if recipe.zero_stage is not None:
        return {"deepspeed": deepspeed.NAME}
    if not recipe.is_fsdp:
        return {}
    config = {
        "offload_params": recipe.best.offload == "parameters",
        "cpu_ram_efficient_loading": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
        "activation_checkpointing": arguments.by_fsdp(recipe),
    }
    return {"fsdp_version": 2, "fsdp_config": config}


def _loss(recipe: Recipe) -> dict[str, Any]:
    if recipe.plan.workload.loss == "standard":
        return {}
    return {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
