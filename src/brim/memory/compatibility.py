"""Which settings go together, on which device: refused with the reason and the alternative, or allowed with a warning.

Refused is what would not run, or would not be what was asked for; a warning is for what runs and is seldom wanted. A memory figure for a
step that cannot run would be worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from brim.errors import ConfigError, UnsupportedError, UsageError
from brim.locale import _
from brim.workload.settings import DEFAULT_LENGTH, check_patterns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.machine.records import GPU
    from brim.workload.settings import Settings

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_SIZES = (
    *_DEPTHS, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "d_model", "d_ff", "n_embd", "n_head", "num_heads", "max_position_embeddings", "n_positions",
)  # fmt: skip
_DEEPEST = 1000
_MOST_TOKENS = 10**9
_EIGHT_BIT = ("adamw-8bit", "paged-adamw-8bit")
_QUANTISED = ("qlora", "lora-8bit")
_HALF = ("bf16", "fp16", "amp-bf16", "amp-fp16")
_ZERO = ("zero1", "zero2", "zero3")
# Families whose positions are a table: a longer sequence fails. Keys of the table's length in their configs.
_LEARNED_POSITIONS = {
    "gpt2": "n_positions", "gpt_neo": "max_position_embeddings", "opt": "max_position_embeddings", "bert": "max_position_embeddings",
    "roberta": "max_position_embeddings", "xlm-roberta": "max_position_embeddings", "distilbert": "max_position_embeddings",
    "electra": "max_position_embeddings", "albert": "max_position_embeddings", "bart": "max_position_embeddings",
    "mbart": "max_position_embeddings", "gpt_bigcode": "n_positions", "mpt": "max_seq_len",
}  # fmt: skip
_OF_ANY_MODULE = frozenset(
    {
        "micro_batch", "seq_len", "accumulation", "precision", "optimizer", "max_grad_norm",
        "sharding", "offload", "gradient_as_bucket_view", "gpus", "nodes",
    }
)  # fmt: skip
_OFFSET = {"roberta": 2, "xlm-roberta": 2}
"""Positions that the padding takes away from the table."""


def check(settings: Settings, config: Mapping[str, Any] | None, gpu: GPU | None) -> list[str]:
    """Raise what is refused; return what should be said. `gpu` is None for the CPU; `config` is None for a module without one."""
    if gpu is None:
        _check_cpu(settings)
    else:
        _check_gpu(settings, gpu)
    _check_words(settings)
    _check_parallel(settings)
    if config is not None:
        _check_config(config)
        _check_length(settings, config)
    return [*_parallel_warnings(settings, gpu), *_precision_warnings(settings, gpu), *_length_warnings(settings, config)]


def check_module(given: Settings, *, has_step: bool) -> None:
    """What a module brings with it cannot be set from outside: better refused than passed over."""
    settable = _OF_ANY_MODULE if has_step else _OF_ANY_MODULE | {"padded"}
    for field in fields(given):
        if field.name not in settable and getattr(given, field.name) != field.default:
            text = _("{name} is a property of the module itself: build it so.").format(name=field.name)
            raise UsageError(text, hint=_("Of a module brim sets: {names}.").format(names=", ".join(sorted(settable))))
    if given.precision in {"bf16", "fp16"}:
        text = _("precision {word} holds the weights in half precision, and a module's dtype is its own.").format(
            word=given.precision
        )
        raise UsageError(text, hint=_("Build the module in that dtype, or take amp-bf16 or amp-fp16."))


def _check_words(settings: Settings) -> None:
    check_patterns(settings.freeze)
    given = {
        "--lora-rank": settings.lora_rank, "--lora-alpha": settings.lora_alpha, "--lora-dropout": settings.lora_dropout,
        "--lora-targets": settings.lora_targets, "--lora-dtype": settings.lora_dtype,
    }  # fmt: skip
    used = [name for name, value in given.items() if value]
    if settings.method == "full" and (used or settings.base_dtype):
        names = ", ".join(used or ["--base-dtype"])
        text = _("{options}: these belong to LoRA, and the method is full.").format(options=names)
        raise UsageError(text, hint=_("Add --method lora, qlora or lora-8bit."))
    if settings.target_len is not None and settings.task != "seq2seq":
        raise UsageError(_("--target-len belongs to seq2seq, and the task is {task}.").format(task=settings.task))
    if settings.loss == "chunked" and settings.task != "causal-lm":
        text = _("--loss chunked computes next-token losses without the logits, and the task is {task}.").format(
            task=settings.task
        )
        raise UnsupportedError(text, hint=_("Take --loss standard."))
    if settings.micro_batch * max(settings.seq_len or 1, settings.target_len or 1) > _MOST_TOKENS:
        raise UsageError(_("More than {count:,} tokens in one micro-batch: no device holds that.").format(count=_MOST_TOKENS))
    if settings.attention == "flash2" and settings.precision == "fp32":
        raise UnsupportedError(
            _("flash-attention 2 computes in half precision, and the precision is fp32."),
            hint=_("Take --precision amp-bf16 or bf16, or --attention sdpa."),
        )


def _check_parallel(settings: Settings) -> None:
    sharding, offload = settings.sharding or "none", settings.offload
    if sharding == "none" and settings.ranks > 1:
        text = _("--sharding none with {count} GPUs: they would not train together.").format(count=settings.ranks)
        raise UsageError(text, hint=_("Take --sharding ddp, fsdp, zero1, zero2 or zero3."))
    if settings.gradient_as_bucket_view and sharding != "ddp":
        raise UsageError(_("--gradient-as-bucket-view belongs to --sharding ddp."))
    if offload != "none" and sharding not in {*_ZERO, "fsdp"}:
        text = _("--offload {offload} needs an engine that moves tensors to the host.").format(offload=offload)
        raise UnsupportedError(text, hint=_("Add --sharding zero2 (optimizer), zero3 or fsdp (parameters); one GPU is enough."))
    if offload == "parameters" and sharding in {"zero1", "zero2"}:
        text = _("{sharding} holds whole parameters on every GPU and cannot offload them.").format(sharding=sharding)
        raise UnsupportedError(text, hint=_("Take --sharding zero3, or --offload optimizer."))
    if offload == "optimizer" and sharding == "fsdp":
        raise UnsupportedError(
            _("FSDP2 offloads parameters, gradients and optimizer together."), hint=_("Take --offload parameters, or zero2.")
        )
    if settings.method == "lora-8bit" and sharding in {"zero3", "fsdp"}:
        text = _("bitsandbytes' 8-bit layers cannot be cut into shards, as {sharding} would.").format(sharding=sharding)
        raise UnsupportedError(text, hint=_("Take --sharding ddp or zero2, or --method qlora."))
    if settings.optimizer in _EIGHT_BIT and sharding == "fsdp":
        raise UnsupportedError(
            _("bitsandbytes' 8-bit optimizers do not take FSDP2's shards (DTensor)."),
            hint=_("Take --optimizer adamw-fused, or --sharding zero2."),
        )
    if settings.optimizer not in {"adamw", "adamw-fused", "adamw-loop"} and offload == "optimizer":
        raise UnsupportedError(
            _("With an offloaded optimizer DeepSpeed runs its own AdamW on the CPU."), hint=_("Take --optimizer adamw.")
        )


def _check_config(config: Mapping[str, Any]) -> None:
    """Sizes that are none, and heads that do not divide: the model could not be built, or would fail in its first step."""
    text_config: Any = config.get("text_config") or config
    if not isinstance(text_config, Mapping):
        raise ConfigError(_("The config's text_config should be a mapping, and is {value!r}.").format(value=text_config))
    for key in _SIZES:
        value = text_config.get(key, 1)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(
                _("The config's {key} should be a positive integer, and is {value!r}.").format(key=key, value=value)
            )
        if key in _DEPTHS and value is not None and value > _DEEPEST:
            raise ConfigError(_("The config's {key} is {value}, more layers than any model has.").format(key=key, value=value))
    hidden, heads = text_config.get("hidden_size"), text_config.get("num_attention_heads")
    groups = text_config.get("num_key_value_heads")
    sizes = all(isinstance(value, int) for value in (hidden, heads))
    if sizes and (not heads or (hidden % heads and not text_config.get("head_dim"))):
        text = _("The config's hidden_size {hidden} does not divide by its {heads} attention heads.")
        raise ConfigError(text.format(hidden=hidden, heads=heads))
    if isinstance(heads, int) and isinstance(groups, int) and (not groups or heads % groups):
        text = _("The config's {heads} attention heads do not divide by its {groups} key-value heads.")
        raise ConfigError(text.format(heads=heads, groups=groups))


def default_length(config: Mapping[str, Any] | None) -> int:
    """The length of a sequence where none was given."""
    longest = longest_position(config) if config is not None else None
    return min(DEFAULT_LENGTH, longest[0]) if longest is not None else DEFAULT_LENGTH


def longest_position(config: Mapping[str, Any]) -> tuple[int, bool] | None:
    """The longest sequence that the positions allow, and whether a longer one fails."""
    kind = str(config.get("model_type"))
    if kind in _LEARNED_POSITIONS:
        length = config.get(_LEARNED_POSITIONS[kind])
        return (length - _OFFSET.get(kind, 0), True) if isinstance(length, int) else None
    length = (config.get("text_config") or config).get("max_position_embeddings")
    return (length, False) if isinstance(length, int) else None


def _check_length(settings: Settings, config: Mapping[str, Any]) -> None:
    longest = longest_position(config)
    wanted = max(settings.seq_len or 0, settings.target_len or 0)
    if longest is not None and longest[1] and wanted > longest[0]:
        text = _("{wanted} tokens, and this model's table of positions ends at {longest}.")
        raise UnsupportedError(
            text.format(wanted=wanted, longest=longest[0]), hint=_("Take --seq-len {longest}.").format(longest=longest[0])
        )


def _check_cpu(settings: Settings) -> None:
    if settings.attention == "flash2":
        raise UnsupportedError(_("flash-attention 2 has no CPU kernel."), hint=_("Take --attention sdpa."))
    if settings.optimizer == "paged-adamw-8bit":
        raise UnsupportedError(
            _("A paged optimizer pages between GPU and host; on the CPU there is nothing to page."),
            hint=_("Take --optimizer adamw-8bit."),
        )


def _check_gpu(settings: Settings, gpu: GPU) -> None:
    if settings.attention == "flash2" and not gpu.flash_attention:
        text = _("flash-attention 2 needs an NVIDIA GPU of compute capability 8.0 or newer (Ampere), and {gpu} is older.")
        if gpu.vendor == "unknown":
            return
        raise UnsupportedError(text.format(gpu=gpu.label), hint=_("Take --attention sdpa."))


def _parallel_warnings(settings: Settings, gpu: GPU | None) -> Iterator[str]:
    if settings.offload != "none" and gpu is None:
        yield _("On the CPU --offload saves nothing: what it moves is in the host's memory already, and is counted.")
    if settings.method == "qlora" and settings.sharding in {"zero3", "fsdp"}:
        yield _(
            "QLoRA under {sharding} is taken with bnb_4bit_quant_storage in the compute dtype (bitsandbytes 0.43 or newer); "
            "without it the 4-bit layers stay whole on every GPU, or fail."
        ).format(sharding=settings.sharding)
    if settings.optimizer in _EIGHT_BIT and settings.sharding in _ZERO:
        yield _("DeepSpeed takes an 8-bit optimizer only with zero_allow_untested_optimizer.")


def _precision_warnings(settings: Settings, gpu: GPU | None) -> Iterator[str]:
    if settings.base_dtype is not None and settings.method in _QUANTISED:
        yield _(
            "--base-dtype changes nothing under {method}: prepare_model_for_kbit_training holds what is not quantised in float32."
        ).format(method=settings.method)
    if settings.precision == "fp16" and gpu is not None:
        if settings.optimizer.startswith("adamw") and settings.method == "full":
            yield _(
                "Pure fp16 has no loss scaling, and AdamW's epsilon of 1e-8 is zero in fp16: expect NaN. Take --precision amp-fp16, "
                "which keeps float32 weights and scales."
            )
        else:
            yield _("Pure fp16 has no loss scaling: small gradients vanish. Take --precision amp-fp16.")
    if settings.precision in {"bf16", "amp-bf16"} and gpu is not None and gpu.vendor != "unknown" and not gpu.bf16:
        yield _(
            "{gpu} has no bfloat16: it is emulated, slowly, and attention falls to the math kernel. Take --precision amp-fp16."
        ).format(gpu=gpu.label)


def _length_warnings(settings: Settings, config: Mapping[str, Any] | None) -> Iterator[str]:
    longest = longest_position(config) if config is not None else None
    if longest is not None and settings.seq_len is not None and settings.seq_len > longest[0]:
        yield _("{wanted} tokens, and the model was made for {longest}.").format(wanted=settings.seq_len, longest=longest[0])
