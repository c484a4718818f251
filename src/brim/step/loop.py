"""The step for people who write their own loop.

    for step in brim.steps(data, model, optimizer, effective_batch=64, budget=brim.Budget.tokens(4096), collate=collate):
        entry = step.run()        # every micro-batch, the exact gradient, clipped and applied
        scheduler.step()
        print(entry.step, entry.loss)

The loop stays the user's: what happens between steps, when to evaluate, when to save. What belongs to the promise is inside `run`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from brim.errors import UsageError
from brim.locale import _
from brim.machine.screen import say
from brim.step import arguments
from brim.step.agreement import tell_guard
from brim.step.batch import BatchPlan
from brim.step.book import Book, reason_of
from brim.step.budget import Budget
from brim.step.devices import device_of, to_device
from brim.step.engine import Engine, Mark, Total, warnings_of
from brim.step.loading import StepDataset, StepItem, has_targets, lengths_of, the_only
from brim.step.loss import counting_of
from brim.step.micro import Counting
from brim.step.oom import Guard
from brim.step.ranks import Ranks
from brim.step.rehearsal import rehearse
from brim.step.state import check_agreement, check_state, state_of
from brim.step.update import Updater, rate_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from brim.records import LedgerEntry
    from brim.step.book import OnBroken
    from brim.step.loading import Collate
    from brim.step.micro import MicroBatch


class Steps:
    """The optimizer steps of a run, each of exactly `effective_batch` sequences (the last of an epoch may be short).

    `loss(model, batch)` is the mean loss of a batch; by default what the model returns as `loss`. What it is the mean of (`counting`) is
    found out before the first step. `resume` is what `state()` gave when the weights were saved. `ledger` is a file or a folder.
    `noise_scale` keeps the squared norm of each micro-batch's gradient in the ledger, for `brim doctor`; by default in every fourth step,
    and only where all gradients together are below 64 MiB. `budget` is this rank's own, which may be another than those of other ranks, or
    a list with one for each; `speeds` says how fast each rank is, where that is not equal.
    """

    def __init__(
        self,
        data: Any,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        effective_batch: int,
        budget: Budget | Sequence[Budget],
        speeds: Sequence[float] | None = None,
        collate: Collate,
        loss: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
        counting: Counting | None = None,
        epochs: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
        max_norm: float | None = 1.0,
        scaler: torch.amp.GradScaler | None = None,
        ledger: str | Path | None = None,
        workers: int = 0,
        resume: Mapping[str, Any] | None = None,
        on_broken: OnBroken = "stop",
        noise_scale: bool | None = None,
    ) -> None:
        self._last = arguments.whole("epochs", epochs)
        arguments.function("collate", collate)
        arguments.norm_to_clip_at(max_norm)
        arguments.state_to_resume(resume)
        if counting is not None:
            arguments.word("counting", counting, Counting)
        path = arguments.ledger_file(ledger)
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer, self._scaler = optimizer, scaler
        self._loss = loss or _loss_of_model
        parameters = arguments.parameters_of(self._model, optimizer)
        self._torch_device = next(parameter.device for parameter in parameters if parameter.requires_grad)
        self.device = device_of(self._torch_device)
        self._ranks = Ranks(parameters)
        if lengths is not None:
            arguments.lengths_for(lengths, data)
        found = lengths_of(data, has_targets=has_targets(self._model)) if lengths is None else lengths
        self.plan = BatchPlan(found, effective_batch=effective_batch, seed=seed, drop_last=drop_last, ranks=self._ranks.size)
        budgets = arguments.budgets_of(budget)
        arguments.speeds_of(speeds)
        self.guard = Guard(budgets if isinstance(budgets, Budget) else budgets[min(self._ranks.rank, len(budgets) - 1)])
        tell_guard(self.guard, budgets, self._ranks, speeds=speeds, device=self._torch_device)
        self.done = check_state(self.plan, self.guard, resume)
        """Optimizer steps taken since the start of the run."""
        check_agreement(self.plan, self.guard, self._ranks)
        self._data = StepDataset(data, collate, self.plan, self.guard, self._ranks.rank)
        self._saved = self.done or None
        """The step after which the state was last asked for."""
        self._workers = workers
        self._last *= self.plan.steps_per_epoch
        rehearsal = rehearse(optimizer, self.device)
        self._engine = Engine(
            self._model, self._compute,
            counting=counting or self._find_counting(), guard=self.guard, ranks=self._ranks, device=self.device, collate=collate,
            on_split=say, noise_scale=noise_scale, loss_scale=self._loss_scale,
        )  # fmt: skip
        self._updater = Updater(
            optimizer, scaler, max_norm, parameters, self.device, rehearsal, is_alone=self._ranks.size == 1
        )  # fmt: skip
        self._book = Book(
            self.plan, self.guard, self._ranks, self.device,
            path=path, resumed_from_step=self.done, on_broken=on_broken, notes=(rehearsal.note,), warnings=warnings_of(self._model),
        )  # fmt: skip

    def __len__(self) -> int:
        return self._last - self.done

    def state(self) -> dict[str, Any]:
        """What continues this run elsewhere, on any number of GPUs: save it beside the weights. Plain values."""
        self._updater.refuse_if_torn()
        self._saved = self.done
        return state_of(self.plan, self.guard, self.done)

    def __iter__(self) -> Iterator[Step]:
        loader = DataLoader(
            self._data, batch_sampler=[[step] for step in range(self.done, self._last)], collate_fn=the_only,
            num_workers=self._workers, pin_memory=self._torch_device.type == "cuda",
        )  # fmt: skip
        self._refuse_if_left()
        self._reason = ""
        finished = False
        try:
            items = iter(loader)
            while self.done < self._last:
                self._updater.refuse_if_torn()
                before, began = self.done, time.perf_counter()
                item, error = _next(items, before)
                yield Step(self, item, time.perf_counter() - began, error)
                self._check_that_it_ran(before)
            finished = True
        except Exception as error:
            self._reason = reason_of(error)
            raise
        finally:
            # What `run` raised goes past this generator, straight to the user's loop.
            self._book.close(finished=finished, reason=self._reason or ("" if finished else _("The loop was left.")))

    def _refuse_if_left(self) -> None:
        self._updater.refuse_if_torn()
        if self._book.is_closed:
            raise UsageError(
                _("This loop has ended, after step {step}.").format(step=self.done),
                hint=_("Make a new one with resume=loop.state() to go on. Keep the iterator as long as you run its steps."),
            )

    def _check_that_it_ran(self, before: int) -> None:
        if self.done == before:
            raise UsageError(_("Step {step} was not run.").format(step=before + 1), hint=_("Call step.run() in the loop."))

    def _run(self, item: StepItem, wait_seconds: float, error: Exception | None) -> LedgerEntry:
        try:
            return self._take(item, wait_seconds, error)
        except Exception as raised:
            self._reason = reason_of(raised)
            raise

    def _take(self, item: StepItem, wait_seconds: float, error: Exception | None) -> LedgerEntry:
        self._updater.refuse_if_torn()
        self._refuse_if_left()
        if item.step != self.done:
            raise UsageError(_("Step {step} was run already.").format(step=item.step + 1))
        self._book.begin(wait_seconds)
        self._model.train()
        total = self._engine.accumulate(item, error)
        rate = rate_of(self._optimizer)
        totals = [total]
        norm = self._updater.clip(lambda: totals.append(self._engine.accumulate_again(item)))
        total = totals[-1]
        skipped = self._update(total)
        self.done += 1
        return self._book.end(item, total, grad_norm=norm, learning_rate=rate, skipped=skipped)

    def _update(self, total: Total) -> bool:
        if not total.items:
            self._engine.clear_gradients()
            return True
        try:
            return self._updater.step(self._go_on_from())
        finally:
            self._engine.clear_gradients()

    def _go_on_from(self) -> str:
        if self._saved is None:
            return _("No checkpoint was saved yet: start again.")
        text = _("Load what was saved with state() after step {step}, and go on with resume=...")
        return text.format(step=self._saved)

    def _compute(self, batch: Any, items: int, weight: float, mark: Mark) -> torch.Tensor:  # noqa: ARG002 (a trainer wants items)
        loss = self._mean_loss(batch)
        mark.phase = "backward"
        weighted = loss * weight
        (weighted if self._scaler is None else self._scaler.scale(weighted)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def _find_counting(self) -> Counting:
        return counting_of(self._data, self._model, lambda batch, _items: self._mean_loss(batch))

    def _mean_loss(self, batch: Any) -> torch.Tensor:
        loss: Any = self._loss(self._model, to_device(batch, self._torch_device))
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
            raise UsageError(
                _("The loss is {kind}, and must be one number, as a tensor.").format(kind=type(loss).__name__),
                hint=_("Return the mean over the labels that are not -100: loss.mean(), not loss.item()."),
            )
        return loss


steps = Steps
"""As a verb: `for step in brim.steps(...)`."""


class Step:
    """One optimizer step that is due."""

    def __init__(self, owner: Steps, item: StepItem, wait_seconds: float, error: Exception | None = None) -> None:
        self._owner, self._item, self._wait_seconds, self._error = owner, item, wait_seconds, error

    @property
    def number(self) -> int:
        """Counted from 1."""
        return self._item.step + 1

    @property
    def sequence_ids(self) -> list[int]:
        """The sequences of the global batch, on all ranks."""
        ids: list[int] = self._item.promised.tolist()
        return ids

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """This rank's share, as it was sliced."""
        return self._item.micro

    def run(self) -> LedgerEntry:
        """Take the step. Once."""
        return self._owner._run(self._item, self._wait_seconds, self._error)  # noqa: SLF001 (a step is a part of its loop)


def _next(items: Iterator[StepItem], step: int) -> tuple[StepItem, Exception | None]:
    """The next item, or why there is none: told to the other ranks before it is raised, for they would wait."""
    try:
        return next(items), None
    except Exception as error:  # noqa: BLE001 (raised by the engine)
        return StepItem(step, np.empty(0, np.int64), ()), error


def _loss_of_model(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    output: Any = model(**batch)
    loss: torch.Tensor | None = output.get("loss") if hasattr(output, "get") else output[0]
    if loss is None:
        raise UsageError(
            _("The model returned no loss."), hint=_("Give labels in the batch, or loss=..., a function of model and batch.")
        )
    return loss
