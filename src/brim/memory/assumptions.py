"""What an estimate had to assume, in sentences: everything that the user did not say and that bears on the figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.locale import _
from brim.memory.parallel import has_master
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from brim.memory.obtain import Obtained
    from brim.memory.where import Where
    from brim.workload.settings import Settings

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def assumptions(
    given: Settings, settings: Settings, where: Where, config: Mapping[str, Any] | None, obtained: Obtained
) -> Iterator[str]:
    """Sentences, what the user left out first."""
    yield from _left_out(given, settings, obtained, has_config=config is not None)
    if where.gpu is not None and "math" in obtained.facts.kernels:
        yield _(
            "SDPA takes the math kernel here, which holds the scores of all pairs of tokens: the fused ones refuse this card with these "
            "heads, mask or dtype."
        )
    if "all-linear" in obtained.facts.notes:
        yield _("peft has no default modules for this model: every linear layer gets adapters.")
    if "head-not-quantised" in obtained.facts.notes:
        yield _("The classifier's head is not quantised (llm_int8_skip_modules): it trains with the adapters.")
    if "experts-not-quantised" in obtained.facts.notes:
        yield _(
            "transformers holds this model's experts as one tensor, which bitsandbytes does not quantise: they stay whole, and "
            "prepare_model_for_kbit_training casts them to float32."
        )
    if obtained.asked_values:
        yield _("The step looks at values of tensors, and a trace has none: every question was answered with yes, or one.")
    yield from where.assumptions
    yield from _of_the_model(config)
    yield from _of_the_engine(settings)
    if where.gpu is None:
        yield _(
            "Tensors only: Python and its libraries take a few hundred MiB more, and a hard limit needs 1 to 4 percent of headroom."
        )
        return
    around = where.outside(settings.ranks)
    text = _("Outside of torch's allocator: {size} for the CUDA context and the kernels' code")
    context = text.format(size=format_bytes(around.context_bytes))
    if around.communication_bytes:
        context += _(", {size} for NCCL").format(size=format_bytes(around.communication_bytes))
    yield context + _("; nothing else runs on the card.")


def _left_out(given: Settings, settings: Settings, obtained: Obtained, *, has_config: bool) -> Iterator[str]:
    if given.seq_len is None:
        yield _("{length} tokens a sequence: no --seq-len was given.").format(length=settings.seq_len)
    if given.target_len is None and settings.target_len is not None:
        yield _("Targets are as long as sources, {length} tokens: no --target-len was given.").format(length=settings.target_len)
    if given.task is None and has_config:
        yield _("Task: {task}.").format(task=settings.task)
    if given.sharding is None and settings.ranks > 1:
        yield _("{count} GPUs train with DDP: no --sharding was given.").format(count=settings.ranks)
    if given.attention is None and obtained.facts.attention == "eager":
        yield _("This model has no SDPA in transformers: attention is eager.")


def _of_the_model(config: Mapping[str, Any] | None) -> Iterator[str]:
    text_config: Mapping[str, Any] = (config or {}).get("text_config") or config or {}
    if any(isinstance(text_config.get(key), int) and text_config[key] > 1 for key in _EXPERTS):
        yield _("Mixture of experts: tokens are spread evenly over the experts, and none is dropped.")


def _of_the_engine(settings: Settings) -> Iterator[str]:
    if settings.method == "qlora":
        yield _("4-bit base: nf4 with double quantisation, prepared by prepare_model_for_kbit_training.")
    if settings.method == "lora-8bit":
        yield _("8-bit base: as bitsandbytes computes it, which holds the input of every quantised layer until its backward.")
    if settings.optimizer == "paged-adamw-8bit":
        yield _("The paged optimizer's state counts as paged out to the host.")
    if settings.sharding in {"zero1", "zero2", "zero3"}:
        yield _('DeepSpeed with the bucket sizes that the Trainer\'s "auto" gives it, and without overlap_comm.')
    if settings.sharding == "fsdp":
        yield _("FSDP2 shards each layer, gathers the next one ahead, and reshards after forward.")
    if has_master(settings) and settings.sharding == "fsdp":
        yield _("Mixed precision of FSDP2: float32 shards, gathered in half precision; no autocast.")
    elif has_master(settings):
        yield _("DeepSpeed holds half-precision weights and a float32 partition of what trains; no autocast.")
