"""What the engine and the launcher of several processes are told, written by the planner's own emitters into the run's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.planner.emit.deepspeed import NAME as DEEPSPEED_FILE, engine_text, width_of
from brim.planner.emit.text import yaml_text
from brim.trainer.group import ACCELERATE_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.records import RunCard

_HALF = {"amp-bf16": "bf16", "bf16": "bf16", "amp-fp16": "fp16"}


def launch_files(card: RunCard, config: Mapping[str, Any] | None) -> dict[str, str]:
    """By name; none for one process."""
    files = {}
    settings = card.settings
    if card.is_sharded and settings.sharding != "fsdp":
        files[DEEPSPEED_FILE] = engine_text(
            int(str(settings.sharding)[-1]),
            half=_HALF.get(settings.precision),
            hidden=width_of(config or {}),
            offload=settings.offload,
        )
    if card.launch == "accelerate":
        files[ACCELERATE_FILE] = _accelerate(card)
    return files


def _accelerate(card: RunCard) -> str:
    """Processes only: brim holds the engine and the precision itself."""
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_processes": card.world_size,
        "use_cpu": card.device == "cpu",
        "mixed_precision": "no",
        "rdzv_backend": "static",
        "same_network": True,
    }
    return yaml_text([], settings)
