"""The random numbers of a process, taken at one moment and put back: so that a micro-batch that runs again draws the same dropout."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Randomness:
    """The state of every generator that a model or a collator may use."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor | None
    module: Any

    @classmethod
    def of(cls, device: torch.device) -> Randomness:
        """Take it now."""
        module = None if device.type == "cpu" else torch.get_device_module(device)
        return cls(
            random.getstate(), np.random.get_state(), torch.get_rng_state(),
            None if module is None else module.get_rng_state(device), module,
        )  # fmt: skip

    def restore(self, device: torch.device) -> None:
        """Put it back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.module is not None:
            self.module.set_rng_state(self.device, device)
