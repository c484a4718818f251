"""DeepSpeed's JSON. All three batch figures are explicit: DeepSpeed checks that they multiply.

Every number is written out rather than left to `auto`, so that the file also runs without the Trainer; the Trainer checks that they
agree with its own arguments. Bucket sizes are those that the Trainer's `auto` would give, which the memory figures take as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.errors import UnsupportedError
from brim.locale import _
from brim.planner.emit.files import Files
from brim.planner.emit.loss_division import loss_division_notes
from brim.planner.emit.recipe import LION_BETA2, MOMENTUM, Recipe
from brim.planner.emit.text import json_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.workload.words import Offload

NAME = "deepspeed.json"
_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
_CLIENT = ("adafactor", "adamw-8bit", "paged-adamw-8bit")
"""Optimizers that DeepSpeed does not build itself: the Trainer, or the user's code, hands them in."""


def files(recipe: Recipe) -> Files:
    """`deepspeed.json`, for ZeRO or, at stage 0, for plain data parallelism."""
    _check(recipe)
    return Files({NAME: deepspeed_text(recipe)}, (*recipe.notes, *_notes(recipe)))


def deepspeed_text(recipe: Recipe) -> str:
    """The JSON alone, for the formats that lean on it."""
    settings: dict[str, Any] = {
        "train_batch_size": recipe.best.effective_batch,
        "train_micro_batch_size_per_gpu": recipe.cut.micro_batch,
        "gradient_accumulation_steps": recipe.cut.accumulation,
        "gradient_clipping": recipe.max_grad_norm,
        **_precision(recipe),
        **_optimizer(recipe),
        "zero_optimization": _zero(recipe),
    }
    if recipe.zero_stage is not None and recipe.best.optimizer in {*_CLIENT, "sgd", "sgd-momentum"}:
        settings["zero_allow_untested_optimizer"] = True
    return json_text(settings)


def _check(recipe: Recipe) -> None:
    if recipe.is_fsdp:
        raise UnsupportedError(
            _("The plan shards with FSDP2, and DeepSpeed would shard by ZeRO."),
            hint=_("Take --sharding zero3, or another format."),
        )
    if recipe.zero_stage is None and not recipe.is_lora and recipe.best.precision in {"bf16", "fp16"}:
        text = _("DeepSpeed keeps a float32 copy of weights in {precision}, more than the plan counts.")
        raise UnsupportedError(text.format(precision=recipe.best.precision), hint=_("Take --sharding zero2, or another format."))


def _notes(recipe: Recipe) -> list[str]:
    said = loss_division_notes(recipe, sets_it=False)
    if recipe.best.optimizer in _CLIENT:
        text = _("DeepSpeed does not build {optimizer}: the Trainer does, or your code hands it to deepspeed.initialize.")
        said.append(text.format(optimizer=recipe.best.optimizer))
    if recipe.zero_stage is None and recipe.is_lora and recipe.half:
        said.append(_("Without ZeRO, DeepSpeed holds adapters in half precision, with a float32 copy."))
    if recipe.best.num_workers:
        text = _("DeepSpeed's file has no loader: give your DataLoader {workers} workers.")
        said.append(text.format(workers=recipe.best.num_workers))
    if recipe.plan.workload.freeze or recipe.is_lora or recipe.checkpoints or recipe.plan.workload.loss == "chunked":
        said.append(_("DeepSpeed's file says nothing of the model: load it as training_arguments.py does (--emit transformers)."))
    return said


def _precision(recipe: Recipe) -> dict[str, Any]:
    if recipe.half is None:
        return {}
    if recipe.zero_stage is None and not recipe.is_lora:
        return {"torch_autocast": {"enabled": True, "dtype": _DTYPE[recipe.half]}}
    return _of_half(recipe.half)


def _of_half(half: str | None) -> dict[str, Any]:
    if half is None:
        return {}
    if half == "bf16":
        return {"bf16": {"enabled": True}}
    return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}


def _optimizer(recipe: Recipe) -> dict[str, Any]:
    word = recipe.best.optimizer
    if word in _CLIENT:
        return {}
    params: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": 0.0}
    if word.startswith("sgd"):
        return {"optimizer": {"type": "SGD", "params": params | ({"momentum": MOMENTUM} if word == "sgd-momentum" else {})}}
    if word == "lion":
        return {"optimizer": {"type": "Lion", "params": params | {"betas": [0.9, LION_BETA2]}}}
    params |= {"betas": [0.9, 0.999], "eps": 1e-8}
    # Offloaded, DeepSpeed's own AdamW works on the CPU; elsewhere torch's, which needs no compiler.
    if recipe.best.offload == "none":
        params["torch_adam"] = True
        if word == "adamw-fused":
            params["fused"] = True
        if word == "adamw-loop":
            params["foreach"] = False
    return {"optimizer": {"type": "AdamW", "params": params}}


def engine_text(stage: int, *, half: str | None, hidden: int | None, offload: Offload) -> str:
    """Of a training whose batches and optimizer are somebody else's: precision, and how ZeRO shards."""
    return json_text({**_of_half(half), "zero_optimization": _of_stage(stage, hidden, offload)})


def _zero(recipe: Recipe) -> dict[str, Any]:
    if recipe.zero_stage is None:
        return {"stage": 0}
    return _of_stage(recipe.zero_stage, hidden_size(recipe), recipe.best.offload)


def _of_stage(stage: int, hidden: int | None, offload: Offload) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if hidden is not None:
        # transformers/integrations/deepspeed.py, `trainer_config_finalize`.
        zero["reduce_bucket_size"] = hidden * hidden
        if stage == 3:
            zero["stage3_prefetch_bucket_size"] = int(0.9 * hidden * hidden)
            zero["stage3_param_persistence_threshold"] = 10 * hidden
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    on_host = {"device": "cpu", "pin_memory": True}
    if offload != "none":
        zero["offload_optimizer"] = on_host
    if offload == "parameters" and stage == 3:
        zero["offload_param"] = on_host
    return zero


def hidden_size(recipe: Recipe) -> int | None:
    """Width of the model, where its config tells."""
    return width_of(recipe.config() or {})


def width_of(config: Mapping[str, Any]) -> int | None:
    """As a config says it, under one of the names for it."""
    inner: Any = config.get("text_config") or config
    return next((inner[key] for key in ("hidden_size", "d_model", "n_embd", "dim") if isinstance(inner.get(key), int)), None)
