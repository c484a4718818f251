"""Gradient accumulation that equals one large batch, for a training loop of your own.

What one large batch would compute is `g = (1/N) * sum of the gradients of all items' losses`, with N the items (supervised tokens) over all
micro-batches and all ranks. To divide each micro-batch's mean loss by the number of micro-batches is the same only where all hold
equally many items; and N is known only at the end of the window. So each mean is weighted by its items as it comes, over a constant N0, and
gradients are multiplied by N0 / N once, before they are clipped.

N0 keeps numbers near those of a mean loss, which float16 needs. It is a power of two near the items that a window is expected to hold: such
a factor changes no digit of a gradient, so that neither the past of a run nor a resume shows in its result.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from brim.errors import RunError, UnsupportedError, UsageError
from brim.locale import _
from brim.step.arguments import norm_to_clip_at, whole
from brim.step.exchange import travels
from brim.step.ranks import Ranks


@travels
class _Fact(NamedTuple):
    """What a rank says about its window when an optimizer step is due."""

    calls: int
    """Micro-batches that it has seen, empty ones too."""
    items: float
    loss_sum: float
    counted: bool | None
    """Whether `num_items` was said; None before the first call."""
    gradients: bytes
    loss_scale: float
    ending: bool
    """It is in `finalize`."""
    ended: bool
    """It is in `finalize` and has taken its last optimizer step there."""


class GradientAccumulator:
    """Take one optimizer step for every `accumulation_steps` micro-batches, with the gradient that one large batch would have.

        accumulator = GradientAccumulator(model, optimizer, accumulation_steps=8)
        for batch in loader:
            updated, average_loss = accumulator.step(model(**batch).loss, num_items=(batch["labels"][:, 1:] != -100).sum())
            if updated:
                scheduler.step()
        accumulator.finalize()

    It runs backward, rescales, clips at `max_norm` (None: not at all), steps the optimizer and clears the gradients, those that are left
    from before included. Learning rate schedules stay with the loop. With a `scaler`, compute the loss under autocast and hand it over as
    it is; an optimizer step that the scaler skips, because numbers overflowed, counts as not updated.

    Where torch.distributed is initialised, all ranks train together: each makes an accumulator for the same model with the same weights and
    runs its own micro-batches, and gradients are summed once for each optimizer step. A model in DistributedDataParallel works; its own
    averaging, and its copying of buffers from rank 0, are switched off for good. Ranks need not have equally many items, but equally many
    optimizer steps, to which `finalize` may add one; where they have not, all of them stop with an error rather than wait.

    An error inside backward, such as running out of memory, is not caught here: part of that micro-batch is then in the gradients.
    `discard` forgets the window, if the loop wants to run it again; `brim.steps` does so by itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        accumulation_steps: int,
        *,
        max_norm: float | None = 1.0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        whole("accumulation_steps", accumulation_steps)
        norm_to_clip_at(max_norm)
        self.model = model
        self.optimizer = optimizer
        self.accumulation_steps = accumulation_steps
        self.max_norm = max_norm
        self.scaler = scaler
        self.last_grad_norm: float | None = None
        """Norm of the last optimizer step's gradient before it was clipped."""
        _take_over_reduction(model)
        self._ranks = Ranks([*model.parameters(), *self._trained()])
        self._expected_items = 0.0
        if scaler is not None:
            # A scaler makes its scale at first use, and a rank without a micro-batch would never use it.
            scaler.scale(torch.zeros((), device=next(iter(self._trained())).device))
        self.discard()

    @property
    def window(self) -> int:
        """How many micro-batches the present window has seen."""
        return self._calls

    def step(self, loss: torch.Tensor, num_items: float | torch.Tensor | None = None) -> tuple[bool, float]:
        """Add one micro-batch; take the optimizer step if it is the window's last. Returns (updated, average loss).

        `loss` is the mean over the micro-batch's items, `num_items` how many those are (supervised tokens, or examples); without it, every
        micro-batch weighs the same. Of a micro-batch without items (whose mean is not a number) nothing enters. The average is weighted by
        items: over this rank's window so far, or, with an optimizer step, over all ranks' windows.
        """
        _check_loss(loss)
        items = 1.0 if num_items is None else _count(num_items)
        self._check_same_use(counted=num_items is not None)
        if items:
            self._add(loss, items)
        self._calls += 1
        if self._calls < self.accumulation_steps:
            return False, self._loss_sum / self._items if self._items else 0.0
        return self._update(ending=False, ended=False)[1:]

    def finalize(self) -> tuple[bool, float]:
        """Take the optimizer step of a window that is not full, rightly scaled; (False, 0.0) if no micro-batch is waiting on any rank.

        With several ranks all must call it, at the end of the loop. A rank whose micro-batches were fewer joins in with what it has, or
        with nothing, so that all take the same optimizer step.
        """
        all_ending, updated, average_loss = self._update(ending=True, ended=False)
        while not all_ending:
            all_ending = self._update(ending=True, ended=True)[0]
        return updated, average_loss

    def discard(self) -> None:
        """Forget the present window: its gradients and its counts."""
        for parameter in self._ranks.parameters:
            parameter.grad = None
        self._calls = 0
        self._filled = 0
        self._items = 0.0
        self._loss_sum = 0.0
        self._counted: bool | None = None

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _check_same_use(self, *, counted: bool) -> None:
        if self._counted not in {None, counted}:
            raise UsageError(
                _("This window has micro-batches with num_items and without, so their weights cannot be compared."),
                hint=_("Give num_items with every call of step, or with none."),
            )
        self._counted = counted

    def _add(self, loss: torch.Tensor, items: float) -> None:
        if not self._expected_items:
            self._expected_items = _power_of_two(items * self.accumulation_steps)
        weighted = loss * (items / self._expected_items)
        (weighted if self.scaler is None else self.scaler.scale(weighted)).backward()  # type: ignore[no-untyped-call]
        self._loss_sum += float(loss.detach()) * items
        self._items += items
        self._filled += 1

    def _update(self, *, ending: bool, ended: bool) -> tuple[bool, bool, float]:
        """Talk, and step if there is something to step with. Returns whether all ranks are ending, then (updated, average loss)."""
        facts = self._ranks.gather(self._fact(ending, ended))
        _check_facts(facts)
        all_ending = all(fact.ending for fact in facts)
        if not any(fact.calls for fact in facts):
            return all_ending, False, 0.0
        items = math.fsum(fact.items for fact in facts)
        if not items:
            self._say_that_nothing_counts()
            self.discard()
            return all_ending, False, 0.0
        has_gradient = self._ranks.merge([fact.gradients for fact in facts])
        self._ranks.reduce(self._expected_items / items, has_gradient)
        updated = self._apply()
        if self._items:
            self._expected_items = _power_of_two(self._items / self._filled * self.accumulation_steps)
        self.discard()
        return all_ending, updated, math.fsum(fact.loss_sum for fact in facts) / items

    def _fact(self, ending: bool, ended: bool) -> _Fact:
        loss_scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        gradients = self._ranks.gradients()
        return _Fact(self._calls, self._items, self._loss_sum, self._counted, gradients, loss_scale, ending, ended)

    def _apply(self) -> bool:
        """Clip and step. A loss scale leaves the gradients after the sum over ranks, so that an overflow on one is seen by all."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        trained = self._trained()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
        if self.max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, self.max_norm, norm)
        self.last_grad_norm = float(norm)
        if self.scaler is None:
            self.optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # The scale falls when, and only when, the optimizer was skipped.
        return self.scaler.get_scale() >= before

    def _say_that_nothing_counts(self) -> None:
        if self._ranks.rank == 0:
            text = _(
                "No micro-batch of this window has an item to learn from (num_items is 0 in all), so no optimizer step is taken."
            )
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _power_of_two(items: float) -> float:
    return 2.0 ** round(math.log2(items))


def _take_over_reduction(model: torch.nn.Module) -> None:
    """Wrappers look at these switches before forward as well as before backward, so they are turned once and not for each call."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = False
            module.require_forward_param_sync = False
        elif type(module).__name__ in {"FullyShardedDataParallel", "DeepSpeedEngine"}:
            raise UnsupportedError(
                _("The model is wrapped in {wrapper}, which reduces gradients by itself.").format(wrapper=type(module).__name__),
                hint=_("Give the bare model, or one in DistributedDataParallel."),
            )


def _check_loss(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            _("The loss is of type {kind}, and must be a tensor.").format(kind=type(loss).__name__),
            hint=_("Give the loss itself: not loss.item(), and output.loss rather than output."),
        )
    if loss.numel() != 1:
        raise UsageError(
            _("The loss has shape {shape}, and must be one number.").format(shape=list(loss.shape)),
            hint=_("Give the mean over the micro-batch's items."),
        )
    if not loss.requires_grad:
        raise UsageError(
            _("The loss needs no gradient, so there is nothing to learn from it."),
            hint=_("Compute it with gradients on (no torch.no_grad(), no detach()), from parameters that are not frozen."),
        )


def _count(num_items: float | torch.Tensor) -> float:
    if isinstance(num_items, torch.Tensor) and num_items.numel() != 1:
        raise UsageError(
            _("num_items has shape {shape}, and must be one number.").format(shape=list(num_items.shape)),
            hint=_("Give the number of supervised tokens, such as (labels[:, 1:] != -100).sum()."),
        )
    count = float(num_items)
    if not 0 <= count < math.inf:
        raise UsageError(_("num_items is {count:g}, and must be 0 or more.").format(count=count))
    return count


def _check_facts(facts: list[_Fact]) -> None:
    """All ranks have heard the same, so all of them stop or none does."""
    if len({fact.counted for fact in facts if fact.counted is not None}) > 1:
        raise UsageError(
            _("Some ranks gave num_items in this window and some did not, so their weights cannot be compared."),
            hint=_("Give num_items with every call of step, or with none."),
        )
    scales = [fact.loss_scale for fact in facts]
    if len(set(scales)) > 1:
        raise UsageError(
            _("The ranks' gradient scalers differ: {scales}, by rank.").format(
                scales=", ".join(f"{scale:g}" for scale in scales)
            ),
            hint=_("Make the scaler with the same settings, or load the same state, on every rank."),
        )
    ended = [rank for rank, fact in enumerate(facts) if fact.ended]
    going = [rank for rank, fact in enumerate(facts) if fact.calls]
    if ended and going:
        raise RunError(
            _("Rank {ended} has taken its last optimizer step, and rank {going} has micro-batches left.").format(
                ended=ended[0], going=going[0]
            ),
            hint=_("Give the ranks equally many micro-batches, or at least so many that they take equally many optimizer steps."),
        )
