"""The end of an optimizer step: unscale, clip, step. Here running out of memory cannot always be mended."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from brim.locale import _
from brim.step.oom import clipping_does_not_fit, failure_of, half_changed, nothing_to_save, release

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from brim.machine.device import Device
    from brim.step.rehearsal import Rehearsal


_Norm = TypeVar("_Norm")


class Updater:
    """Steps one optimizer, or says that it must not be gone on with."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        max_norm: float | None,
        parameters: Sequence[torch.nn.Parameter],
        device: Device,
        rehearsal: Rehearsal,
        *,
        is_alone: bool,
    ) -> None:
        self._optimizer, self._scaler, self._max_norm = optimizer, scaler, max_norm
        self._parameters, self._device, self._rehearsal = parameters, device, rehearsal
        self._is_alone = is_alone
        self._is_torn = False

    def clip(self, again: Callable[[], Any]) -> float:
        """The norm of the gradient, clipped. Nothing has been stepped yet, so out of memory here costs the accumulation once more."""
        return clip_or_again(self._clip, again, self._scaler, self._optimizer, self._device, is_alone=self._is_alone)

    def _clip(self) -> float:
        if self._scaler is not None and any(parameter.grad is not None for parameter in self._parameters):
            self._scaler.unscale_(self._optimizer)
        limit = float("inf") if self._max_norm is None else self._max_norm
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))

    def step(self, again: str) -> bool:
        """Whether it was skipped: fp16 overflowed, and the scaler took the scale down. `again`: what to go on from if memory runs out."""
        self._rehearsal.release()
        try:
            return self._step()
        except Exception as error:
            failure = failure_of(error, "optimizer")
            if failure is None:
                raise
            self._is_torn = True
            release(error, self._device)
        raise half_changed(failure, self._device, again)

    def _step(self) -> bool:
        if self._scaler is None:
            self._optimizer.step()
            return False
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return self._scaler.get_scale() < scale

    def refuse_if_torn(self) -> None:
        """After a failure in the middle of the optimizer's step there is nothing to go on with."""
        if self._is_torn:
            raise nothing_to_save()


def clip_or_again(
    clip: Callable[[], _Norm],
    again: Callable[[], Any],
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer,
    device: Device,
    *,
    is_alone: bool,
) -> _Norm:
    """Clip; if memory runs out, make the gradients anew and clip those, once.

    Several ranks cannot make them anew: the others are past this step. Gradients that were not unscaled are whole, and are clipped again.
    """
    for is_last in (False, True):
        try:
            return clip()
        except Exception as error:
            found = failure_of(error, "backward")
            if found is None:
                raise
            failure = found
            release(error, device)
        if is_last or not (is_alone or scaler is None):
            break
        warnings.warn(_("Out of memory while the gradient was clipped: it is computed once more."), stacklevel=2)
        forget_unscaling(scaler, optimizer)
        again()
    raise clipping_does_not_fit(failure, device)


def forget_unscaling(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """The gradients will be made anew: they are scaled again, whatever the scaler remembers of the old ones."""
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)  # noqa: SLF001 (torch has no other way to say it)


def rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate of its first group; None where the optimizer finds its own (Adafactor)."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)
