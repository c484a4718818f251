"""What a config asks for, in one set of words whatever the tool, each with the key that says it.

None means that the file does not say: then the tool's own default is in force, and nothing is concluded from it, except where a default is
part of what a reader of this view asks (see `prediction.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from brim.audit.config.reading import Entry

if TYPE_CHECKING:
    from brim.audit.config.kinds import Config, Kind


@dataclass(frozen=True)
class Said:
    """A value in brim's words, and the key that says it."""

    value: Any
    entry: Entry


@dataclass(frozen=True, kw_only=True)
class View:
    """One config, normalised."""

    micro_batch: Said | None = None
    accumulation: Said | None = None
    effective_batch: Said | None = None
    """Where the file itself says the product."""
    world_size: Said | None = None
    precision: Said | None = None
    """bf16, fp16, fp8 or fp32."""
    optimizer: Said | None = None
    """As the tool spells it."""
    learning_rate: Said | None = None
    schedule: Said | None = None
    clipping: Said | None = None
    checkpointing: Said | None = None
    attention: Said | None = None
    """flash2, flash3, sdpa, eager, flex or xformers."""
    packing: Said | None = None
    length: Said | None = None
    model: Said | None = None
    adapter: Said | None = None
    """lora, or none."""
    quantisation: Said | None = None
    """Bits: 4 or 8."""
    offload: Said | None = None
    """optimizer or parameters."""
    zero_stage: Said | None = None


_LENGTHS: Final = ("max_length", "max_seq_length", "model_max_length", "cutoff_len", "block_size")
"""What TRL and scripts around the Trainer call the most tokens of a sequence."""
_NAMES: Final[dict[Kind, dict[str, tuple[str, ...]]]] = {
    "transformers": {
        "micro_batch": ("per_device_train_batch_size", "per_gpu_train_batch_size"),
        "accumulation": ("gradient_accumulation_steps",),
        "optimizer": ("optim",),
        "learning_rate": ("learning_rate",),
        "schedule": ("lr_scheduler_type",),
        "clipping": ("max_grad_norm",),
        "checkpointing": ("gradient_checkpointing",),
        "model": ("model_name_or_path",),
        "world_size": ("num_processes",),
        "length": _LENGTHS,
    },
    "trl": {"packing": ("packing",)},
    "llama-factory": {"packing": ("packing",), "length": ("cutoff_len",)},
    "axolotl": {
        "micro_batch": ("micro_batch_size",),
        "accumulation": ("gradient_accumulation_steps",),
        "effective_batch": ("batch_size",),
        "optimizer": ("optimizer",),
        "learning_rate": ("learning_rate",),
        "schedule": ("lr_scheduler",),
        "clipping": ("max_grad_norm",),
        "checkpointing": ("gradient_checkpointing",),
        "packing": ("sample_packing",),
        "length": ("sequence_len",),
        "model": ("base_model",),
    },
    "deepspeed": {
        "micro_batch": ("train_micro_batch_size_per_gpu",),
        "accumulation": ("gradient_accumulation_steps",),
        "effective_batch": ("train_batch_size",),
        "optimizer": ("optimizer.type",),
        "learning_rate": ("optimizer.params.lr",),
        "schedule": ("scheduler.type",),
        "clipping": ("gradient_clipping",),
        "zero_stage": ("zero_optimization.stage",),
    },
    "accelerate": {
        "accumulation": ("deepspeed_config.gradient_accumulation_steps",),
        "clipping": ("deepspeed_config.gradient_clipping",),
        "zero_stage": ("deepspeed_config.zero_stage",),
        "world_size": ("num_processes",),
    },
}
_ATTENTION: Final = {
    "flash_attention_2": "flash2", "fa2": "flash2", "flash_attention_3": "flash3", "sdpa": "sdpa", "eager": "eager",
    "disabled": "eager", "flex_attention": "flex", "xformers": "xformers",
}  # fmt: skip
_AXOLOTL_ATTENTION: Final = {
    "flash_attention": "flash2", "sdp_attention": "sdpa", "flex_attention": "flex", "xformers_attention": "xformers",
    "eager_attention": "eager",
}  # fmt: skip
_OFFLOAD: Final = {
    "deepspeed": ("zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"),
    "accelerate": ("deepspeed_config.offload_param_device", "deepspeed_config.offload_optimizer_device"),
}


def view_of(config: Config) -> View:
    """The config in brim's words."""
    names = {**(_NAMES["transformers"] if config.kind in {"trl", "llama-factory"} else {}), **_NAMES[config.kind]}
    said = {field: _first(config, keys) for field, keys in names.items()}
    return View(
        **said,
        precision=_precision(config),
        attention=_attention(config),
        adapter=_adapter(config),
        quantisation=_quantisation(config),
        offload=_offload(config),
    )


def _first(config: Config, keys: tuple[str, ...]) -> Said | None:
    for key in keys:
        entry = config.get(key)
        if entry is not None and entry.value is not None and entry.value != "auto" and not isinstance(entry.value, dict | list):
            return Said(entry.value, entry)
    return None


def _precision(config: Config) -> Said | None:
    if config.kind == "accelerate":
        entry = config.get("mixed_precision")
        if entry is None or entry.value is None:
            return None
        # `mixed_precision: no` without quotes is YAML for false.
        return Said("fp32" if entry.value in (False, "no") else entry.value, entry)
    names = {"deepspeed": ("bf16.enabled", "fp16.enabled")}.get(config.kind, ("bf16", "fp16", "bfloat16", "float16", "pure_bf16"))
    for name in names:
        if config.is_on(name):
            return Said("bf16" if "bf" in name else "fp16", config.entries[name])
    if config.is_on("fp8"):
        return Said("fp8", config.entries["fp8"])
    off = [config.entries[name] for name in names[:2] if config.value(name) is False]
    return Said("fp32", off[0]) if len(off) == len(names[:2]) else None


def _attention(config: Config) -> Said | None:
    for name in ("attn_implementation", "flash_attn"):
        entry = config.get(name)
        if entry is not None and isinstance(entry.value, str) and entry.value != "auto":
            word = "flash2" if "flash-attn2" in entry.value else "flash3" if "flash-attn3" in entry.value else entry.value
            return Said(_ATTENTION.get(word, word), entry)
    if config.kind == "axolotl":
        for name, word in _AXOLOTL_ATTENTION.items():
            if config.is_on(name):
                return Said(word, config.entries[name])
    return None


def _adapter(config: Config) -> Said | None:
    name = {"axolotl": "adapter", "llama-factory": "finetuning_type"}.get(config.kind, "use_peft")
    entry = config.get(name)
    if entry is None:
        return None
    if isinstance(entry.value, bool) or entry.value is None:
        return Said("lora" if entry.value else "none", entry)
    return Said({"qlora": "lora", "full": "none", "": "none"}.get(str(entry.value), str(entry.value)), entry)


def _quantisation(config: Config) -> Said | None:
    for bits in (4, 8):
        if config.is_on(f"load_in_{bits}bit"):
            return Said(bits, config.entries[f"load_in_{bits}bit"])
    entry = config.get("quantization_bit")
    return Said(entry.value, entry) if entry is not None and entry.value in (4, 8) else None


def _offload(config: Config) -> Said | None:
    for name, word in zip(_OFFLOAD.get(config.kind, ()), ("parameters", "optimizer"), strict=False):
        entry = config.get(name)
        if entry is not None and entry.value in ("cpu", "nvme"):
            return Said(word, entry)
    return None
