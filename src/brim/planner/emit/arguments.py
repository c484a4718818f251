"""The keys of `TrainingArguments`, which TRL and LLaMA-Factory take as well (transformers 5.22, training_args.py)."""

from __future__ import annotations

from typing import Any

from brim.planner.emit.deepspeed import NAME as DEEPSPEED
from brim.planner.emit.recipe import LION_BETA2, MOMENTUM, Recipe


def batch(recipe: Recipe) -> dict[str, Any]:
    """The cut."""
    return {
        "per_device_train_batch_size": recipe.cut.micro_batch,
        "gradient_accumulation_steps": recipe.cut.accumulation,
        "per_device_eval_batch_size": recipe.eval_batch,
    }


def steps(recipe: Recipe) -> dict[str, Any]:
    """What the optimizer does."""
    settings: dict[str, Any] = {
        "num_train_epochs": recipe.plan.workload.epochs,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "linear",
        "optim": recipe.optim,
        "weight_decay": 0.0,
        "max_grad_norm": recipe.max_grad_norm,
        "seed": recipe.plan.workload.seed,
    }
    if recipe.plan.workload.warmup_steps is not None:
        settings["warmup_steps"] = recipe.plan.workload.warmup_steps
    if recipe.best.optimizer == "sgd-momentum":
        settings["optim_args"] = f"momentum={MOMENTUM}"
    if recipe.best.optimizer == "lion":
        settings["adam_beta2"] = LION_BETA2
    return settings


def precision(recipe: Recipe) -> dict[str, Any]:
    """Mixed precision; weights that are half precision themselves are loaded so, with both off."""
    return {"bf16": recipe.mixed == "bf16", "fp16": recipe.mixed == "fp16"}


def checkpointing(recipe: Recipe, *, code: bool) -> dict[str, Any]:
    """Layer by layer, by the model or by FSDP; with `code`, a model that keeps every N-th only switches it on itself."""
    if not recipe.checkpoints or by_fsdp(recipe) or (code and recipe.every is not None):
        return {"gradient_checkpointing": False}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def by_fsdp(recipe: Recipe) -> bool:
    """Whether FSDP's wrapper checkpoints: the model's own way would gather every layer twice in backward (transformers #30404)."""
    return recipe.is_fsdp and recipe.best.checkpointing == "full"


def loader(recipe: Recipe) -> dict[str, Any]:
    """DataLoader settings, per rank."""
    settings: dict[str, Any] = {
        "dataloader_num_workers": recipe.best.num_workers,
        "dataloader_pin_memory": recipe.best.pin_memory,
        "dataloader_drop_last": False,
    }
    if recipe.best.num_workers and recipe.best.prefetch_factor:
        settings["dataloader_prefetch_factor"] = recipe.best.prefetch_factor
    return settings


def engine(recipe: Recipe) -> dict[str, Any]:
    """Sharding, for a start by torchrun."""
    if recipe.zero_stage is not None:
        return {"deepspeed": DEEPSPEED}
    if not recipe.is_fsdp:
        return {}
    config = {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True, "state_dict_type": "FULL_STATE_DICT",
        "activation_checkpointing": by_fsdp(recipe), "cpu_offload": recipe.best.offload == "parameters",
    }  # fmt: skip
    return {"fsdp": True, "fsdp_config": config}
