"""One call of `train()`: the engine, the book and the optimizer's hooks, put together around a Trainer."""

from __future__ import annotations

import math
import shlex
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from brim.locale import _
from brim.machine.screen import say
from brim.step.arguments import parameters_of
from brim.step.book import Book
from brim.step.devices import device_of, to_device
from brim.step.engine import Engine, Mark, Total, warnings_of
from brim.step.loss import counting_of
from brim.step.oom import Failure, half_changed, nothing_to_save
from brim.step.ranks import Ranks
from brim.step.rehearsal import Rehearsal, rehearse
from brim.step.state import check_agreement, check_state, state_of
from brim.step.together import TogetherEngine
from brim.step.update import clip_or_again, rate_of
from brim.trainer.metrics import metrics_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.errors import OutOfMemoryError
    from brim.step.book import OnBroken
    from brim.step.loading import StepDataset, StepItem
    from brim.step.micro import Counting
    from brim.trainer.sharding.shards import Shards

_TOLD = (
    "learning_rate", "lr_scheduler_type", "optim", "max_grad_norm", "fp16", "bf16", "gradient_checkpointing", "num_train_epochs",
    "max_steps",
)  # fmt: skip
"""Arguments that the ledger's header repeats."""


class Run:
    """Lives from the preparation of the model to the end of training."""

    def __init__(self, trainer: Any, data: StepDataset) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self.plan, self.guard, self._data = data.plan, data.guard, data
        self.device = device_of(trainer.args.device)
        self.ranks: Ranks
        self.total = Total(())
        """What all ranks did in the step that was accumulated last."""
        self.grad_norm: float | None = None
        self.wait_seconds = 0.0
        self.is_updating = False
        """Inside the optimizer's step: what fails now leaves the weights half changed."""
        self._is_torn = False
        self._done = 0
        self._item: StepItem | None = None
        self._rate: float | None = None
        self._has_stepped = False
        self._rehearsal = Rehearsal()
        self._book: Book | None = None
        self._times_restored = 0
        self._hooks: tuple[Any, ...] = ()
        self._engine: Engine | None = None
        self._model: Any = None
        self._shards: Shards | None = None

    def check_resumed(self, saved: dict[str, Any] | None) -> None:
        """A run that goes on must have the same data, seed and effective batch."""
        self._done = self._trainer.state.global_step
        if saved is not None:
            check_state(self.plan, self.guard, saved)
        elif self._done:
            text = _("This checkpoint was made without brim: from step {step} on the order of the data is another.")
            warnings.warn(text.format(step=self._done + 1), stacklevel=2)

    def prepare(self, model: torch.nn.Module, *, path: Path | None, on_broken: OnBroken, noise_scale: bool | None) -> None:
        """The model and the optimizer are there: rehearse, ask what the loss counts, open the ledger."""
        self._model = model
        shards = self._shards = getattr(self._trainer, "shards", None)
        # What is in pieces is summed by its own engine.
        self.ranks = Ranks([] if shards is not None else parameters_of(model, self._optimizer))
        trainer = self._trainer  # weak: what the ranks keep may not hold it
        self.ranks.wish = lambda: int(trainer.wish())
        check_agreement(self.plan, self.guard, self.ranks)
        self._rehearsal = rehearse(self._optimizer, self.device)
        shared: dict[str, Any] = {
            "counting": getattr(trainer, "counting", None) or self._counting(),
            "guard": self.guard, "ranks": self.ranks, "device": self.device,
        }  # fmt: skip
        if shards is not None:
            self._engine = TogetherEngine(
                model,
                self._compute,
                begin_round=lambda is_last: shards.begin_round(is_last=is_last),
                clear=shards.clear,
                **shared,
            )
        else:
            self._engine = Engine(
                model, self._compute, collate=self._data.collate, on_split=say, noise_scale=noise_scale, loss_scale=self._loss_scale,
                **shared,
            )  # fmt: skip
        self._hooks = (
            self._optimizer.register_step_pre_hook(self._begin_update),
            self._optimizer.register_step_post_hook(self._end_update),
        )
        args = self._trainer.args
        self._book = Book(
            self.plan, self.guard, self.ranks, self.device,
            path=path, resumed_from_step=self._done, on_broken=on_broken, is_quiet=getattr(self._trainer, "is_quiet", False),
            notes=(self._rehearsal.note,), warnings=warnings_of(model),
            configuration={name: _plain(getattr(args, name, None)) for name in _TOLD},
        )  # fmt: skip

    @property
    def _at_work(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        wrapped = self._trainer.optimizer
        found: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        return found

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self._trainer.accelerator, "scaler", None)

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def accumulate(self, item: StepItem | None, error: Exception | None = None) -> float:
        """The gradient of one whole step; its mean loss, the same on every rank."""
        assert self._book is not None
        self._book.begin(self.wait_seconds)
        if self._book.times_restored > self._times_restored:
            self._times_restored = self._book.times_restored
            self._trainer.ledger_was_restored()
        self._item, self.grad_norm, self._rate, self._has_stepped = item, None, None, False
        with self._one_micro_batch_at_a_time():
            self.total = self._at_work.accumulate(item, error)
        metrics_of(self._trainer).add(self.total)
        if not self.total.items:
            return 0.0
        return self.total.loss

    def clip(self, clip: Callable[[], Any]) -> Any:
        """Clip, or measure. Nothing has been stepped yet, so out of memory costs the accumulation once more."""
        return clip_or_again(
            clip, self._accumulate_again, self._scaler, self._optimizer, self.device, is_alone=self.ranks.size == 1
        )  # fmt: skip

    def _accumulate_again(self) -> None:
        assert self._item is not None
        with self._one_micro_batch_at_a_time():
            self.total = self._at_work.accumulate_again(self._item)

    def end_step(self) -> None:
        """Write down what happened."""
        assert self._book is not None
        assert self._item is not None
        skipped = not self._has_stepped or not self.total.items or self._has_overflowed
        norm = self.grad_norm
        if self._shards is not None and self.total.items:
            norm, skipped = norm if norm is not None else self._shards.norm, skipped or self._shards.has_skipped
        rate = self._rate if self._rate is not None else rate_of(self._optimizer)
        self._book.end(self._item, self.total, grad_norm=norm, learning_rate=rate, skipped=skipped)
        self._done += 1

    @property
    def _has_overflowed(self) -> bool:
        """Fused optimizers are called all the same, and leave the weights as they are by themselves."""
        return self._scaler is not None and self.grad_norm is not None and not math.isfinite(self.grad_norm)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return state_of(self.plan, self.guard, self._done)

    def settle(self) -> None:
        """Every step up to here is in the ledger, on the disk. An OSError where it cannot be."""
        if self._book is not None:
            self._book.settle()

    def close(self, *, finished: bool, reason: str = "") -> None:
        """The last line of the ledger. Nothing of the model is held any longer."""
        if self._book is not None:
            self._book.close(finished=finished, reason=reason)
        for hook in self._hooks:
            hook.remove()
        self._engine = self._model = None

    def half_changed(self, failure: Failure, checkpoint: str | None) -> OutOfMemoryError:
        """The error for a failure inside the optimizer's step, and the mark that nothing of it may be saved."""
        self._is_torn = True
        if checkpoint is None:
            again = _("No checkpoint was saved yet: start again.")
        elif getattr(self._trainer, "is_quiet", False):  # `brim train`, which has no such argument
            text = _("{name} is whole: continue from it with brim train --resume {folder}.")
            again = text.format(name=Path(checkpoint).name, folder=shlex.quote(str(Path(checkpoint).parent)))
        else:
            again = _("The last checkpoint is whole: go on with resume_from_checkpoint={path!r}.").format(path=checkpoint)
        return half_changed(failure, self.device, again)

    def refuse_if_torn(self) -> None:
        """Weights that are half changed are not saved, and not gone on with."""
        if self._is_torn:
            raise nothing_to_save()

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_details: Any) -> None:
        self._rehearsal.release()
        self._rate, self._has_stepped = rate_of(optimizer), True
        self.is_updating = True

    def _end_update(self, *_details: Any) -> None:
        self.is_updating = False

    @contextmanager
    def _one_micro_batch_at_a_time(self) -> Iterator[None]:
        """While micro-batches run, the trainer's collectives are off: ranks run different numbers of them."""
        accelerator, args = self._trainer.accelerator, self._trainer.args
        self._backward = accelerator.backward
        averages = args.average_tokens_across_devices
        with ExitStack() as stack:
            accelerator.backward = self._weighted_backward
            stack.callback(vars(accelerator).pop, "backward", None)
            accelerator.gather_for_metrics = _as_it_is
            stack.callback(vars(accelerator).pop, "gather_for_metrics", None)
            args.average_tokens_across_devices = False
            stack.callback(setattr, args, "average_tokens_across_devices", averages)
            yield

    def _weighted_backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        self._mark.phase = "backward"
        if self._shards is not None:
            self._shards.backward(loss * self._weight)
        else:
            self._backward(loss * self._weight, **keywords)

    def _compute(self, batch: Any, items: int, weight: float, mark: Mark) -> torch.Tensor:
        self._mark, self._weight = mark, weight
        count = torch.tensor(items, device=self._trainer.args.device)
        with metrics_of(self._trainer).of_one_micro_batch(mark):
            found: torch.Tensor = self._trainer.train_one_micro_batch(self._model, batch, count)
            return found

    def ask_counting(self, model: torch.nn.Module) -> Counting:
        """What the loss of this model is a mean of, wherever it is now."""
        self._model = model
        return self._counting()

    def _counting(self) -> Counting:
        trainer, device = self._trainer, next(self._model.parameters()).device
        # The Trainer says it when it fetches a step; some losses want to know before.
        trainer.current_gradient_accumulation_steps = 1

        def mean_loss(batch: Any, items: int | None) -> torch.Tensor:
            inputs = trainer._prepare_inputs(dict(batch))  # noqa: SLF001 (what training_step does)
            if trainer.args.device != device:  # a model that is still to be cut waits on the host
                inputs = to_device(inputs, device)
            count = None if items is None else torch.tensor(items, device=device)
            with trainer.compute_loss_context_manager():
                loss: torch.Tensor = trainer.compute_loss(self._model, inputs, num_items_in_batch=count)
            return loss

        self._mark, self._weight = Mark(), 1.0
        with self._one_micro_batch_at_a_time(), metrics_of(trainer).kept(), _without_balance(trainer):
            return counting_of(self._data, self._model, mean_loss, is_half=str(trainer.accelerator.mixed_precision) != "no")


@contextmanager
def _without_balance(trainer: Any) -> Iterator[None]:
    """TRL adds the routers' auxiliary loss itself, and it is no mean over tokens."""
    coefficient = getattr(trainer, "router_aux_loss_coef", None)
    if coefficient is None:
        yield
        return
    trainer.router_aux_loss_coef = 0.0
    try:
        yield
    finally:
        trainer.router_aux_loss_coef = coefficient


def _as_it_is(value: Any, *_arguments: Any, **_keywords: Any) -> Any:
    return value


def _plain(value: Any) -> str | int | float | bool | None:
    """Enumerations of the arguments as their words."""
    value = getattr(value, "value", value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
