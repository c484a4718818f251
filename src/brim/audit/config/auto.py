"""`auto` in a DeepSpeed config: a word for Hugging Face's integration. DeepSpeed itself does not know it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.config.code_names import CodeNames
    from brim.audit.config.kinds import Config
    from brim.audit.found import Found

RULE = "config-auto-open"
FILLED_BY_TRAINER: Final = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16.enabled",
        "bf16.enabled", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps", "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
    }
)  # fmt: skip
"""transformers/integrations/deepspeed.py, `trainer_config_process` and `trainer_config_finalize`."""
FILLED_BY_PLUGIN: Final = frozenset(
    {
        "zero_optimization.stage", "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
        "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    }
)  # fmt: skip
"""accelerate/utils/dataclasses.py, `DeepSpeedPlugin`: from what `accelerate launch` was told."""
_OWN_WORD: Final = ("data_types.", "pipeline.", "autotuning.", "inference.", "hybrid_engine.", "tensor_parallel.")
"""Where DeepSpeed gives the word a meaning of its own."""
_DROPPED: Final = ("zero_optimization.", "fp16.", "bf16.", "aio.", "flops_profiler.", "activation_checkpointing.", "compile.")
"""Sections whose reader leaves out every key that says `auto` (deepspeed/runtime/config_utils.py)."""


def check(config: Config, *, has_trainer: bool | None, code: CodeNames) -> Iterator[Found]:
    """`has_trainer`: whether the Hugging Face Trainer reads this file; None: not known, and assumed. What `code` changes is skipped."""
    if config.kind != "deepspeed":
        return
    open_fields = [
        (name, entry) for name, entry in config.entries.items() if entry.value == "auto" and not code.stores(entry.last_name)
    ]
    for name, entry in open_fields:
        if name in FILLED_BY_TRAINER or name in FILLED_BY_PLUGIN or name.startswith(_OWN_WORD):
            continue
        if name.startswith(_DROPPED):
            text = _(
                "{key} is auto, and neither the Trainer nor accelerate fills it: DeepSpeed drops the key and takes its default."
            )
        else:
            text = _("{key} is auto, and neither the Trainer nor accelerate fills it: the word itself reaches DeepSpeed.")
        yield config.found(RULE, entry, text.format(key=name))
    left = [(name, entry) for name, entry in open_fields if name in FILLED_BY_TRAINER]
    if has_trainer is False and left:
        text = _(
            "{keys}: auto is filled by the Hugging Face Trainer, and nothing here uses it. DeepSpeed alone stops at the word."
        )
        yield config.found(RULE, left[0][1], text.format(keys=", ".join(name for name, _entry in left)), confidence="medium")
