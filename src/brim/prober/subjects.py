"""What is tried: it travels to the child process, and becomes a `Trainee` there.

Nothing heavy is imported here: the trials' server starts before this process has torch. Weights are fresh: memory and time do not depend on
their values, and nobody's weights are touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from brim.memory.setup import Setup
from brim.workload.words import Optimizer, Precision

if TYPE_CHECKING:
    from brim.prober.trainee import Trainee


class Subject(Protocol):
    """What is tried."""

    def build(self, device: str) -> Trainee:
        """On a device of torch."""
        ...


@dataclass(frozen=True)
class Configured:
    """A model of transformers."""

    setup: Setup

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages besides transformers. Importing them may initialise CUDA: peft imports bitsandbytes, which queries the card."""
        is_quantized = self.setup.method in {"qlora", "lora-8bit"} or self.setup.optimizer.endswith("8bit")
        return (*(("peft",) if self.setup.method != "full" else ()), *(("bitsandbytes",) if is_quantized else ()))

    def prepare(self) -> None:
        """Import the packages before the limit is set."""
        import contextlib
        import importlib

        for name in self.packages:
            with contextlib.suppress(ImportError):  # reported when it is built
                importlib.import_module(name)

    def build(self, device: str) -> Trainee:
        """On a device of torch."""
        from brim.prober.trainee import configured

        return configured(self.setup, device)


@dataclass(frozen=True, kw_only=True)
class OwnModule:
    """A module of somebody's own, called as transformers' models are, or by a step of its own."""

    optimizer: Optimizer = "adamw"
    precision: Precision = "fp32"
    max_grad_norm: float | None = 1.0
    step: Callable[[Any, int, int], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Factory(OwnModule):
    """A module that `module:function` builds."""

    given: str

    def prepare(self) -> None:
        """Import what the function imports, before the limit is set."""
        import contextlib

        from brim.errors import BrimError
        from brim.workload.resolve import find_model

        with contextlib.suppress(BrimError):  # reported when it is built
            find_model(self.given).build("meta")

    def build(self, device: str) -> Trainee:
        """On a device of torch."""
        import torch

        from brim.prober.trainee import trainee_of
        from brim.workload.resolve import find_model

        torch.manual_seed(0)
        # Moved to the card as `brim train` does: the order of allocations decides what fits near the limit.
        built = find_model(self.given).build("cpu" if device.startswith("cuda") else device)
        return trainee_of(built.to(device), self, device)


@dataclass(frozen=True, kw_only=True)
class Live(OwnModule):
    """A module that exists already, sent to the child as it is."""

    model: Any

    def build(self, device: str) -> Trainee:
        """On a device of torch."""
        from brim.prober.trainee import trainee_of

        return trainee_of(self.model.to(device), self, device)
