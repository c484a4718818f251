"""The processes of a run, as their launcher made them known: torchrun, accelerate and Slurm set the same variables."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

OF_A_LAUNCH: Final = (
    "RANK", "LOCAL_RANK", "GROUP_", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "PET_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_",
)  # fmt: skip
"""How the variables of a launcher begin: those of one launch must not reach the ranks of another."""
SECRET_VARIABLE: Final = "BRIM_RENDEZVOUS_SECRET"  # noqa: S105 (its name)
"""What the machines of a run share (`rendezvous.py`). The ranks, and the model's code in them, do not need it."""


@dataclass(frozen=True)
class World:
    """Which of how many processes this one is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    starts_before: int = 0
    """How often the launcher has started these processes before: torchrun does it by itself, with --max-restarts."""

    @classmethod
    def of_environment(cls) -> World:
        """As the launcher says; one process where nothing is said."""
        size = _number("WORLD_SIZE", 1)
        if size <= 1 or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
            return cls()
        before = _number("TORCHELASTIC_RESTART_COUNT", 0)
        return cls(_number("RANK", 0), size, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", size), before)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether no launcher started it."""
        return self.size == 1

    @property
    def nodes(self) -> int:
        """Machines, if all have equally many processes."""
        return max(1, self.size // self.local_size)


def sharding_of_environment() -> str | None:
    """The engine that `accelerate launch` was told to use; None where it was told nothing."""
    if _is_on("ACCELERATE_USE_FSDP"):
        return "fsdp"
    if not _is_on("ACCELERATE_USE_DEEPSPEED"):
        return None
    stage: Any = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    path = Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""))
    if path.is_file():
        stage = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {}).get("stage", stage)
    return f"zero{stage}" if str(stage) in {"1", "2", "3"} else "ddp"


def without_engines() -> None:
    """Brim holds the engine itself: accelerate must not wrap what is wrapped already."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes"}


def _number(name: str, default: int) -> int:
    said = os.environ.get(name, "")
    return int(said) if said.isdigit() else default
