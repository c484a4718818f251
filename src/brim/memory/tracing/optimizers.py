"""Optimizers on tensors without memory: what each keeps for good, and what its step takes in passing.

torch's own implementations run as they are wherever they run on meta tensors, so that their temporaries are theirs and not ours. The
others are written here as the allocations that the real one makes: fused AdamW (one kernel, no temporaries), bitsandbytes' 8-bit
AdamW, Lion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, get_args

import torch

from brim.memory.tracing.counting import note
from brim.workload.words import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.memory.setup import Target

# bitsandbytes/optim/optimizer.py: state is quantised in blocks. Tensors below the first size keep a 32-bit state; those below the second
# are not paged.
_BNB_BLOCK = 256
_BNB_SMALLEST = 4096
_BNB_SMALLEST_PAGED = 100_000


class Stepper(Protocol):
    """The two calls that the reference step makes."""

    state: Any

    def step(self) -> Any:
        """Update the parameters."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        ...


def make_optimizer(word: Optimizer, parameters: list[torch.nn.Parameter], target: Target) -> Stepper:
    """The optimizer that this word means on this target."""
    foreach = target.backend == "cuda"
    makers: dict[str, Callable[[], Stepper]] = {
        "adamw": lambda: _AdamW(parameters, foreach=foreach),
        "adamw-loop": lambda: _AdamW(parameters, foreach=False),
        "adamw-fused": lambda: _Stateful(parameters, _two_moments),
        "adamw-8bit": lambda: _Stateful(parameters, _two_moments_8bit),
        "paged-adamw-8bit": lambda: _Stateful(parameters, _paged),
        "adafactor": lambda: _adafactor(parameters),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, foreach=foreach),
        "sgd-momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=foreach),
        "lion": lambda: _Lion(parameters),
    }
    assert set(makers) == set(get_args(Optimizer))
    return makers[word]()


class _AdamW(torch.optim.AdamW):
    """Without the check for CUDA graph capture, which creates a CUDA context: hundreds of MiB that a trial or a training started by this
    process could not use.
    """

    def _accelerator_graph_capture_health_check(self) -> None: ...

    def _cuda_graph_capture_health_check(self) -> None: ...


def _adafactor(parameters: list[torch.nn.Parameter]) -> Stepper:
    """The Trainer's `adafactor`: transformers' own, with the Trainer's settings."""
    from transformers.optimization import Adafactor

    made: Any = Adafactor
    optimizer: Stepper = made(parameters, lr=1e-4, scale_parameter=False, relative_step=False)
    return optimizer


class _Stateful:
    """An optimizer whose step is one kernel: it has a state, and no temporaries."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], make_state: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    ) -> None:
        self._parameters = parameters
        self._make_state = make_state
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}

    def step(self) -> None:
        """Create the state at the first call; after that the kernel works in place."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter not in self.state:
                self.state[parameter] = self._make_state(parameter)
            state = self.state[parameter].values()
            note("fused_step", parameter, 0, (parameter, parameter, parameter.grad, *state, *state))  # read, and written

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        assert set_to_none
        for parameter in self._parameters:
            parameter.grad = None


class _Lion(_Stateful):
    """One moment; the update is made from a copy of it, one parameter at a time (lion-pytorch's `update_fn`)."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lambda parameter: {"exp_avg": torch.zeros_like(parameter)})

    def step(self) -> None:
        """Compute `update = sign(b1 * m + (1 - b1) * g)`: a copy of the moment, and the sum."""
        super().step()
        for parameter in self._parameters:
            if parameter.grad is not None:
                update = self.state[parameter]["exp_avg"].clone().add(parameter.grad)
                del update


def _two_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": parameter.new_zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _two_moments_8bit(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if parameter.numel() < _BNB_SMALLEST:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    state = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
    return state | _scales(parameter)


def _scales(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = -(-parameter.numel() // _BNB_BLOCK)
    return {name: parameter.new_zeros(blocks, dtype=torch.float32) for name in ("absmax1", "absmax2")}


def _paged(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Paged state is in unified memory and can leave the device. Small states, and the block scales of large ones, stay on the device."""
    return _two_moments_8bit(parameter) if parameter.numel() < _BNB_SMALLEST_PAGED else _scales(parameter)
