"""From the words of the command line to what the engines of data-parallel training do with them.

DeepSpeed and FSDP2 do not run autocast: the module itself is held or gathered in half precision, and float32 lives in the optimizer's
shards. So `amp-bf16` under ZeRO means bfloat16 weights with a float32 master partition, and under FSDP2 float32 shards that are gathered in
bfloat16 (its mixed precision). DDP leaves the module alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from brim.memory.sharding.shard import Parallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.workload.settings import Settings

ENGINES = ("zero1", "zero2", "zero3", "fsdp")
_HALF_DTYPE = {"amp-bf16": "bfloat16", "amp-fp16": "float16", "bf16": "bfloat16", "fp16": "float16"}


def in_engine(settings: Settings) -> Settings:
    """The settings of the module as the engine runs it."""
    if settings.sharding not in ENGINES or settings.precision == "fp32":
        return settings
    dtype = _HALF_DTYPE[settings.precision]
    # ZeRO converts the whole module, and FSDP2's mixed precision gathers in half precision. Otherwise adapters keep peft's float32.
    is_rounded = settings.method != "full" and (settings.sharding != "fsdp" or has_master(settings))
    adapters = settings.lora_dtype or (dtype if is_rounded else None)
    return replace(settings, precision=cast("Any", settings.precision.removeprefix("amp-")), lora_dtype=cast("Any", adapters))


def has_master(settings: Settings) -> bool:
    """Whether what trains is also, or only, held in float32: always under ZeRO, under FSDP2 with mixed precision."""
    if settings.sharding == "fsdp":
        return settings.precision.startswith("amp-")
    return settings.sharding in ENGINES and settings.precision != "fp32"


def parallel_of(settings: Settings, config: Mapping[str, Any] | None, *, on_cpu: bool = False) -> Parallel | None:
    """How the step is spread; None for one device. On the CPU what is offloaded stays where it is, and counts."""
    if settings.sharding in {None, "none"}:
        return None
    return Parallel(
        sharding=cast("Any", settings.sharding),
        ranks=settings.ranks,
        offload="none" if on_cpu else settings.offload,
        master=has_master(settings),
        hidden=width_of(config),
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        synchronise_each=settings.sync_each_batch and settings.sharding == "fsdp",
    )


def width_of(config: Mapping[str, Any] | None) -> int | None:
    """The model's width, from which Hugging Face fills in DeepSpeed's `auto` buckets; None where its config has none."""
    inner: Mapping[str, Any] = (config or {}).get("text_config") or config or {}
    return next((inner[key] for key in ("hidden_size", "d_model", "n_embd", "dim") if isinstance(inner.get(key), int)), None)
