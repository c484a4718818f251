"""`BatchSizeOptimizer`: the largest batch that any module really trains with, in the words that people already use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from brim.errors import OutOfMemoryError, RunError, UsageError
from brim.locale import _
from brim.machine import child
from brim.prober.objects import MakeOptimizer, Objects, can_travel, largest_items
from brim.prober.promise import Promise
from brim.prober.runner import Runner
from brim.prober.search import Aim, next_size
from brim.prober.shapes import Shape
from brim.prober.snapshot import Generators
from brim.prober.trial import Exam, device_of
from brim.sizes import GIB, format_bytes, parse_size
from brim.step.accumulation import GradientAccumulation, calculate_gradient_accumulation

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.records import Trial

_MARGIN: Final = {"cpu": 0.005, "cuda": 0.02}
_FREE_SHARE: Final = 0.9
"""Of the host's free memory, where nothing else limits the CPU: the rest is the desktop's."""


class BatchSizeOptimizer:
    """Finds the largest batch that trains: every size that is returned has run, with its optimizer steps, an evaluation and a save.

    `device` is where the model trains (where it lies, if not given). `optimizer` makes one from parameters (AdamW if not given), or is one
    whose kind is taken; `memory` limits the CPU. The model, its gradients and modes, the random numbers and the data are afterwards as they
    were, to the bit.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device | None = None,
        *,
        optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        memory: int | str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(_("{kind} is not a torch.nn.Module.").format(kind=type(model).__name__))
        self.model = model
        self.device = _checked_device(model, device)
        self.memory_usage_history: list[tuple[int, float]] = []
        """Sizes that ran, and the GiB that each took at its peak."""
        self.trials: list[Trial] = []
        """Everything about the sizes of the last search, those that failed too."""
        self._make_optimizer = _maker(optimizer)
        self._collate, self._memory, self._say = collate_fn, memory, say

    def find_optimal_batch_size(
        self,
        dataset: Any,
        start_batch_size: int = 1,
        max_batch_size: int = 128,
        *,
        loss_fn: Callable[..., Any] | None = None,
    ) -> int:
        """The largest batch size up to `max_batch_size` that trains.

        `dataset` holds pairs `(inputs, targets)`, or dictionaries that the model takes by name; its largest items are tried.
        `loss_fn(outputs, targets)` is cross-entropy unless given.
        """
        start, most = _checked_sizes(start_batch_size, max_batch_size)
        generators = Generators()
        try:
            items, numbers = self._items(dataset)
        finally:
            generators.restore()
        if len(dataset) < most:
            self._say(_("The data have {count} items: no larger batch is tried.").format(count=len(dataset)))
            most = len(dataset)
        self.trials, self.memory_usage_history = [], []
        subject = Objects(self.model, tuple(items), loss_fn, self._collate, self._make_optimizer)
        limit = self._limit_bytes()
        margin = int(_MARGIN["cpu" if self.device == "cpu" else "cuda"] * limit)
        runner = Runner(subject, self.device, Promise(None, 1, numbers), limit - margin if self.device == "cpu" else None)
        travels = self.device == "cpu" and can_travel(subject)
        runner.is_here = not travels
        aim = Aim(limit_bytes=limit - margin, most=most, start=min(start, most))
        with runner:
            while (size := self._next(aim)) is not None:
                trial = runner.run(_exam(size, numbers, self.device))
                if not runner.is_exact:
                    # What a process with a past takes cannot be held against a limit: only failures tell.
                    aim = replace(aim, limit_bytes=None)
                self.trials.append(trial)
                self._tell(trial)
        return self._answer()

    def calculate_gradient_accumulation(self, target_batch_size: int, actual_batch_size: int) -> GradientAccumulation:
        """Which micro-batches make a step of `target_batch_size`, exactly: `brim.calculate_gradient_accumulation`."""
        return calculate_gradient_accumulation(target_batch_size, actual_batch_size)

    def _next(self, aim: Aim) -> int | None:
        """After a crash one larger size, because some layers refuse a batch of one; then no more."""
        ran = any(trial.verdict == "ok" for trial in self.trials)
        crashed = [trial.micro_batch for trial in self.trials if trial.verdict == "crash"]
        if crashed and not ran:
            second = max(2, aim.start or 1)
            return second if len(self.trials) == 1 and second not in crashed and second <= aim.most else None
        return next_size(aim, self.trials)

    def _items(self, dataset: Any) -> tuple[list[Any], int]:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(
                _("{kind} has no length or no items by index; a list or a map-style Dataset is needed.").format(
                    kind=type(dataset).__name__
                ),
                hint=_("Of a stream, give the first batches as a list of items."),
            )
        if not len(dataset):
            raise UsageError(_("The data are empty."))
        return largest_items(dataset)

    def _limit_bytes(self) -> int:
        """What training may take now."""
        if self.device != "cpu":
            reading = device_of(self.device).read()
            return reading.total_bytes
        if self._memory is not None:
            return parse_size(self._memory)
        limit = child.data_limit()
        if limit is not None:
            return max(1, limit - child.data_bytes())
        from brim.machine.host import host

        return int(_FREE_SHARE * host().available_bytes)

    def _tell(self, trial: Trial) -> None:
        peak = trial.peak_device_bytes or 0
        if trial.verdict == "ok":
            self.memory_usage_history.append((trial.micro_batch, peak / GIB))
            self._say(_("Batch size {size}: ok, {peak}").format(size=trial.micro_batch, peak=format_bytes(peak)))
            return
        where = _("in {phase}").format(phase=trial.phase) if trial.phase is not None else ""
        said = f"{trial.verdict} {where}".strip()
        self._say(_("Batch size {size}: {verdict}").format(size=trial.micro_batch, verdict=said))

    def _answer(self) -> int:
        ran = [trial.micro_batch for trial in self.trials if trial.verdict == "ok"]
        if ran:
            return max(ran)
        smallest = min(self.trials, key=lambda trial: trial.micro_batch)
        if smallest.verdict == "out-of-memory":
            raise OutOfMemoryError(
                _("Not even a batch of {size} trains here: out of memory in {phase}.").format(
                    size=smallest.micro_batch, phase=smallest.phase or "?"
                ),
                hint=_("Shorten the items, take a smaller model or an optimizer with less state, or use checkpointing."),
            )
        raise RunError(
            _("The model cannot be trained with these data ({verdict}): {message}").format(
                verdict=smallest.verdict, message=smallest.message
            ),
            hint=_("Pass loss_fn or collate_fn where the defaults, cross-entropy and torch's collation, do not fit."),
        )


def _exam(size: int, numbers: int, device: str) -> Exam:
    full = Shape(size, numbers)
    parts = [replaced for replaced in (max(1, size // 2),) if 1 < replaced < size]
    return Exam(
        longest=full,
        masks=(True, True),
        mixed=tuple(Shape(part, numbers) for part in parts),
        evaluation=full,
        first=0 if device.startswith("cuda") else min(size, 2),
    )


def _checked_device(model: nn.Module, device: str | torch.device | None) -> str:
    first = next(iter(model.parameters()), None)
    if first is None:
        raise UsageError(_("The model has no parameters: there is nothing to train."))
    try:
        asked = torch.device(device) if device is not None else first.device
    except RuntimeError as error:
        raise UsageError(_("{device!r} is no device of torch.").format(device=device)) from error
    if asked.type in {"cpu", "meta"}:
        if asked.type == "meta":
            raise UsageError(_("The model lies on the meta device and has no weights: nothing can be run."))
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != asked.type:
        raise UsageError(
            _("There is no device {device} here.").format(device=asked), hint=_('Give "cpu", or leave the device out.')
        )
    return f"{asked.type}:{asked.index or 0}"


def _checked_sizes(start: Any, most: Any) -> tuple[int, int]:
    for name, value in (("start_batch_size", start), ("max_batch_size", most)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(_("{name} is {value!r}, and must be a whole number of at least 1.").format(name=name, value=value))
    if start > most:
        raise UsageError(_("start_batch_size is {start}, more than max_batch_size, {most}.").format(start=start, most=most))
    return start, most


def _maker(optimizer: Any) -> MakeOptimizer | None:
    """From a class, a function, or an optimizer of the same kind."""
    if optimizer is None or not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return _Alike(type(optimizer), dict(optimizer.defaults))


class _Alike:
    """Makes optimizers of one class and one set of defaults."""

    def __init__(self, kind: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
        self._kind, self._defaults = kind, defaults

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: Any = self._kind
        return made(parameters, **self._defaults)  # type: ignore[no-any-return]
