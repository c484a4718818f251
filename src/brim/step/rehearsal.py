"""The optimizer's step, rehearsed before the first: its state is made and its peak measured while nothing can be lost.

An optimizer makes its state in its first step, when the weights are already being changed; running out of memory there leaves them half
changed (seen: all 75 parameters with foreach AdamW, 7 of 75 with its loop). So it steps once with zero gradients, no learning rate
and no decay, which changes no weight. Where the state is then what a fresh one would be (zeros), it stays; where it is not,
it is taken away again, and memory of the same size is held until the real first step.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from brim.errors import OutOfMemoryError
from brim.locale import _, sentences
from brim.machine.sharing import others_on
from brim.sizes import format_bytes
from brim.step.oom import failure_of, release

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.machine.device import Device

_KNOWN: Final = ("torch.optim", "transformers.optimization", "bitsandbytes.optim")
_STILL: Final = {"lr": 0.0, "weight_decay": 0.0}
_BEGIN_WITH_ZEROS: Final = {"Adam", "AdamW", "SGD", "RMSprop", "Adadelta"}
"""Optimizers of torch whose fresh state is zeros. Others begin with the learning rate, with ones, or with codes of their own."""


@dataclass
class Rehearsal:
    """What was learned. `held` is released just before the first real step."""

    note: str = ""
    """What it took, or why there was none: for the ledger."""
    held: list[torch.Tensor] = field(default_factory=list)

    def release(self) -> None:
        """The real step begins: what was held is its."""
        self.held.clear()


def rehearse(optimizer: torch.optim.Optimizer, device: Device) -> Rehearsal:
    """Step without moving a weight. Out of memory here is an error that has cost nothing."""
    if optimizer.state:
        return Rehearsal(_("The optimizer's state was there already."))
    if not type(optimizer).__module__.startswith(_KNOWN) or _would_move(optimizer):
        text = _(
            "The memory of the optimizer's step was not rehearsed: brim does not know how {name} behaves without a learning rate."
        )
        return Rehearsal(text.format(name=type(optimizer).__name__))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    device.reset_peak()
    try:
        _step_in_place(optimizer, parameters)
    except Exception as error:  # noqa: BLE001 (told in a note, or as out of memory)
        failure = failure_of(error, "optimizer")
        optimizer.state.clear()
        release(error, device)
        if failure is None:  # it wants a closure, sparse gradients, or something else that a rehearsal does not have
            return Rehearsal(_("The memory of the optimizer's step was not rehearsed: {why}.").format(why=error))
        raise _too_much(optimizer, parameters, device, failure.family) from None
    finally:
        for parameter in parameters:
            parameter.grad = None
    state_bytes, peak_bytes = _state_bytes(optimizer), device.read().peak_allocated_bytes
    text = _("The optimizer's state takes {state}; its step peaks at {peak}, measured before the first.")
    rehearsal = Rehearsal(text.format(state=format_bytes(state_bytes), peak=format_bytes(peak_bytes)))
    if not _is_fresh(optimizer):
        held_bytes = _state_bytes(optimizer, pages=False)
        optimizer.state.clear()
        gc.collect()
        rehearsal.held = [torch.empty(held_bytes, dtype=torch.uint8, device=parameters[0].device)]
    return rehearsal


def _would_move(optimizer: torch.optim.Optimizer) -> bool:
    """Adafactor may choose its own rate, and then moves weights without one; where eps is 0, zeros are divided by zeros."""
    return any(group.get("relative_step") or group.get("eps") == 0 for group in optimizer.param_groups)


def _step_in_place(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    with _still(optimizer):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        # The class's own method, without what torch wraps around it: schedulers and hooks count steps, and this is none.
        step: Any = type(optimizer).step
        with torch.no_grad():
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


@contextmanager
def _still(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """No rate, no decay; everything as it was afterwards."""
    kept = [{key: group[key] for key in _STILL if key in group} for group in optimizer.param_groups]
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        # A rate that is a tensor (capturable optimizers) must stay one.
        group.update({key: torch.zeros_like(old) if torch.is_tensor(old) else _STILL[key] for key, old in values.items()})
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state is what an optimizer makes before its first step: counters at zero (after this), the rest zeros."""
    if type(optimizer).__name__ not in _BEGIN_WITH_ZEROS:
        return False
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        return False  # its first step copies the gradient undamped
    for state in optimizer.state.values():
        for name, value in state.items():
            if name == "step":
                state[name] = torch.zeros_like(value) if torch.is_tensor(value) else type(value)(0)
            elif not _is_zero(value):
                return False
    return True


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor that is spread over ranks."""
    piece: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return piece


def _is_zero(value: Any) -> bool:
    if torch.is_tensor(value):
        value = _here(value)
        return value.is_floating_point() and not bool(torch.count_nonzero(value))
    return value is None or value == 0


def _state_bytes(optimizer: torch.optim.Optimizer, *, pages: bool = True) -> int:
    """Of all its tensors; without those that the driver pages in and out (bitsandbytes), if so asked."""
    tensors = (_here(value) for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if pages or not getattr(tensor, "is_paged", False))


def _too_much(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], device: Device, family: str | None
) -> OutOfMemoryError:
    reading = device.read()
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    text = _(
        "The optimizer {name} does not fit: its state and the gradients ({gradients}) do not go beside the model "
        "({used} of {total} in use). Nothing was changed yet."
    )
    told = text.format(
        name=type(optimizer).__name__,
        gradients=format_bytes(gradients),
        used=format_bytes(reading.total_bytes - reading.free_bytes),
        total=format_bytes(reading.total_bytes),
    )
    return OutOfMemoryError(
        sentences(told, str(others_on(device))),
        family=family,
        hint=_("A smaller micro-batch does not help here. Use an 8-bit optimizer or Adafactor, LoRA, or a smaller model."),
    )
