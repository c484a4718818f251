"""The step engine inside transformers' Trainer, and inside whatever is built on it.

    trainer = Trainer(...)            # or Seq2SeqTrainer, or TRL's SFTTrainer
    brim.attach(trainer)
    trainer.train()

The Trainer's loop pulls a fixed number of batches for each optimizer step, and accelerate deals foreign batches anew; so one item of
the loader is one rank's share of one whole optimizer step, and the Trainer's own accumulation is 1. Each micro-batch still goes
through the trainer's own `training_step` and `compute_loss`, with all that a subclass does there. Callbacks, logging, evaluation,
checkpoints and `resume_from_checkpoint` are the Trainer's.
"""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from brim.errors import UsageError
from brim.locale import _
from brim.machine.screen import say
from brim.step.agreement import tell_guard
from brim.step.arguments import ledger_file, lengths_for
from brim.step.batch import BatchPlan
from brim.step.book import reason_of
from brim.step.budget import Budget
from brim.step.devices import device_of
from brim.step.four_bits import keep_trainable
from brim.step.loading import StepDataset, StepItem, StepSampler, has_targets, lengths_of, the_only
from brim.step.oom import Guard, evaluation_does_not_fit, failure_of, release, saving_does_not_fit
from brim.step.randomness import Randomness
from brim.step.ranks import Ranks
from brim.trainer.callback import BrimBookkeeper
from brim.trainer.manifest import MANIFEST
from brim.trainer.options import Options
from brim.trainer.refusals import refuse_what_cannot_be_promised
from brim.trainer.resuming import ExactResume, SeededSteps
from brim.trainer.run import Run
from brim.trainer.stopping import Wish, stop_here
from brim.trainer.verifying import last_whole_checkpoint, refuse_damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.step.book import OnBroken


class BrimMixin(ExactResume):
    """Put before a Trainer class: `class MyTrainer(BrimMixin, Trainer)`.

    `effective_batch` is by default what the arguments multiply to: batch size x accumulation x processes. `budget` is what a micro-batch
    may cost; by default as many padded tokens as the arguments' batch size would have at the longest sequence, so that memory peaks no
    higher than it would without brim. It is this rank's own, and ranks may differ; or a list with one for each. `speeds` says how fast each
    rank is, where that is not equal. `lengths` are the tokens of each training sequence, where they cannot be seen. The ledger is
    written to `ledger.jsonl` in the output folder, or to the file given, or not at all (False). `noise_scale` keeps the squared norm of
    each micro-batch's gradient there, for `brim doctor`; by default in every fourth step, and only where all gradients together are below
    64 MiB.
    """

    is_quiet = False
    """Whether the command prints the effective settings, so that the trainer does not."""

    def __init__(
        self,
        *args: Any,
        effective_batch: int | None = None,
        budget: Budget | Sequence[Budget] | None = None,
        speeds: Sequence[float] | None = None,
        lengths: Sequence[int] | None = None,
        ledger: str | Path | bool = True,
        on_broken: OnBroken = "stop",
        noise_scale: bool | None = None,
        **keywords: Any,
    ) -> None:
        options = Options(
            effective_batch=effective_batch, budget=budget, speeds=speeds, lengths=lengths, ledger=ledger, on_broken=on_broken,
            noise_scale=noise_scale,
        )  # fmt: skip
        super().__init__(*args, **keywords)
        self._begin(options)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        before = cls.__mro__[: cls.__mro__.index(BrimMixin)]
        if any(issubclass(kind, Trainer) and not issubclass(kind, BrimMixin) for kind in before):
            raise UsageError(
                _("{name} names BrimMixin after its Trainer, so the Trainer's own step would run.").format(name=cls.__name__),
                hint=_("Name it first: class {name}(BrimMixin, Trainer).").format(name=cls.__name__),
            )

    def _begin(self, options: Options) -> None:
        refuse_what_cannot_be_promised(self)
        self._options = options
        self._own_arguments()
        keep_trainable(self.model)
        args = self.args
        given = args.per_device_train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size)
        self.effective_batch = given if options.effective_batch is None else options.effective_batch
        args.gradient_accumulation_steps = 1
        self.accelerator.gradient_accumulation_steps = 1
        self._run: Run | None = None
        self._seen: tuple[Any, Any] | None = None
        self.saved_step: int | None = None
        """The last step that is in a checkpoint of this process."""
        self.verified_checkpoint: str | None = None
        """One that was read to its end already, and is as it was written."""
        self.stop_asked_by: int | None = None
        """A signal that asked this rank to finish its step, save and stop."""
        self.ended_because = ""
        """Why training ended early, where that is known."""
        self._bookkeeper = BrimBookkeeper(self)
        # First: a step that was taken is on record, whatever the callbacks after it do.
        self.callback_handler.callbacks.insert(0, self._bookkeeper)

    def _own_arguments(self) -> None:
        """The arguments may be those of other trainers too: what is changed here is changed for this one."""
        mine: Any = self
        mine.args = copy.copy(mine.args)

    # The data: one item is one rank's share of one step.

    def get_train_dataloader(self) -> DataLoader[StepItem]:
        """Numbers of steps go in; micro-batches that fit come out."""
        data, collate = self.train_dataset, self.data_collator
        if data is None:
            raise UsageError(_("There is no training data."), hint=_("Give the trainer train_dataset=..."))
        plan = self._plan(data)
        if hasattr(data, "column_names"):
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        guard = Guard(self._options.own_budget(self.args.process_index) or self._same_peak(plan))
        return DataLoader(
            SeededSteps(data, collate, plan, guard, self.args.process_index),
            batch_sampler=StepSampler(plan),
            collate_fn=the_only,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            # Its own: a loader that is made anew must not draw from the random numbers of the model.
            generator=torch.Generator().manual_seed(plan.seed),
        )

    def _plan(self, data: Any) -> BatchPlan:
        return BatchPlan(
            self._lengths_of(data),
            effective_batch=self.effective_batch,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
            ranks=max(1, self.args.world_size),
            together=getattr(self, "shards", None) is not None,
        )

    def _lengths_of(self, data: Any) -> Any:
        """As given, or as seen; looked at once for each data set."""
        if self._options.lengths is not None:
            lengths_for(self._options.lengths, data)
            return self._options.lengths
        if self._seen is None or self._seen[0] is not data:
            self._seen = data, lengths_of(data, column=self.args.length_column_name, has_targets=has_targets(self.model))
        return self._seen[1]

    def _same_peak(self, plan: BatchPlan) -> Budget:
        """Padded tokens of the arguments' own batch size at the longest sequence. Shorter rows never need more for as many tokens."""
        return Budget.tokens(self.args.per_device_train_batch_size * sum(plan.longest))

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Sequences, not steps."""
        data = dataloader.dataset
        return data.plan.n if isinstance(data, StepDataset) else int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, _args: Any) -> int:
        """Sequences in every optimizer step, over all processes: what the Trainer logs and counts samples by."""
        return self.effective_batch

    def _run_epoch(self, *args: Any, epoch: int, train_dataloader: DataLoader[Any], **keywords: Any) -> Any:
        cast("StepSampler", train_dataloader.batch_sampler).set_epoch(epoch)
        self._evaluate_if_owed(keywords["trial"], keywords["ignore_keys_for_eval"], len(train_dataloader))
        return super()._run_epoch(*args, epoch=epoch, train_dataloader=train_dataloader, **keywords)

    def get_batch_samples(self, epoch_iterator: Iterator[StepItem], _num_batches: int, _device: Any) -> tuple[list[Any], None]:
        """The next item, and how long it was waited for. An error is kept for the step, where the other ranks can hear of it."""
        began = time.perf_counter()
        try:
            item: Any = next(epoch_iterator)
        except StopIteration:
            return [], None
        except Exception as error:
            if self.running.ranks.size == 1:
                raise
            item = error
        self.running.wait_seconds = time.perf_counter() - began
        return [item], None

    # The step.

    @property
    def running(self) -> Run:
        """The engine of the training that is going on."""
        if self._run is None:
            raise UsageError(_("Training has not begun."))
        return self._run

    def state_of_run(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None before training has begun."""
        return None if self._run is None else self._run.state()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        data = cast("StepDataset", train_dataloader.dataset)
        tell_guard(data.guard, self._options.budget, Ranks([]), speeds=self._options.speeds, device=self.args.device)
        self._run = Run(self, data)
        self._run.check_resumed(self._bookkeeper.saved_in(resume_from_checkpoint))
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        self._run.prepare(
            plain,
            path=ledger_file(self._options.ledger, self.args.output_dir),
            on_broken=self._options.on_broken,
            noise_scale=self._options.noise_scale,
        )
        return model, loader

    def _load_callback_state(self) -> None:
        """Those of the others: brim reads its own when the model is there, and the Trainer would build the callback anew."""
        kept = self.state.stateful_callbacks.pop(BrimBookkeeper.__name__, None)
        super()._load_callback_state()
        # A checkpoint that was made without brim has none, and the Trainer wants one to write over.
        self.state.stateful_callbacks[BrimBookkeeper.__name__] = kept or self._bookkeeper.state()

    def train_one_micro_batch(self, model: torch.nn.Module, batch: Any, items: torch.Tensor) -> torch.Tensor:
        """Forward and backward as the Trainer does them, and whatever a subclass adds."""
        return cast("torch.Tensor", super().training_step(model, batch, items))

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One whole optimizer step's gradient, or, for a plain batch, what the Trainer does."""
        if isinstance(inputs, Exception):
            self.running.accumulate(None, inputs)
        if not isinstance(inputs, StepItem):
            return cast("torch.Tensor", super().training_step(model, inputs, num_items_in_batch))
        loss = self.running.accumulate(inputs)
        return torch.tensor(loss, device=self.args.device)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self.running.clip(lambda: super(BrimMixin, self)._clip_grad_norm(model))

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm = self.running.clip(lambda: super(BrimMixin, self)._get_grad_norm(model, grad_norm=grad_norm))
        self.running.grad_norm = None if norm is None else float(norm)
        return norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Of every micro-batch as it was planned."""
        if not isinstance(inputs, StepItem):
            return int(super().floating_point_ops(inputs))
        return sum(int(super(BrimMixin, self).floating_point_ops(micro.batch)) for micro in inputs.micro)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not isinstance(inputs, StepItem):
            super()._track_num_input_tokens(inputs)
        elif self.args.include_num_input_tokens_seen != "no":
            wants_real = self.args.include_num_input_tokens_seen == "non_padding"
            tallies = self.running.total.tallies
            self.state.num_input_tokens_seen += sum(tally.tokens if wants_real else tally.padded_tokens for tally in tallies)

    # What happens around the step.

    def ledger_was_restored(self) -> None:
        """The ledger was deleted while training, and is there again."""

    def wish(self) -> int:
        """What this rank wants all ranks to do at the end of the step."""
        return 0 if self.stop_asked_by is None else int(Wish.STOP)

    def _maybe_log_save_evaluate(self, *args: Any, **keywords: Any) -> None:
        """As the Trainer's, after each step and each epoch. All callbacks have spoken, so what the ranks agreed on has the last word."""
        heard = self.running.ranks.heard()
        if heard & Wish.SAVE:
            self.control.should_save = True
        if heard & Wish.STOP:
            stop_here(self)
        super()._maybe_log_save_evaluate(*args, **keywords)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **keywords: Any) -> Any:
        """As the Trainer's. `True` takes the last checkpoint that is whole."""
        if self.args.auto_find_batch_size:
            refuse_what_cannot_be_promised(self)
        if self.args.gradient_accumulation_steps != 1:
            raise UsageError(
                _("gradient_accumulation_steps was set to {steps} after brim was attached, which accumulates by itself.").format(
                    steps=self.args.gradient_accumulation_steps
                ),
                hint=_("Set it before brim.attach, or give effective_batch=... there."),
            )
        if self._run is not None and not resume_from_checkpoint:
            self._run.refuse_if_torn()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
        elif resume_from_checkpoint and resume_from_checkpoint != self.verified_checkpoint:
            refuse_damaged(resume_from_checkpoint)
        if resume_from_checkpoint and self.args.ignore_data_skip:
            raise UsageError(
                _("ignore_data_skip=True would take the epoch's first sequences again."),
                hint=_("Leave it out: skipping costs nothing here."),
            )
        reason = self.ended_because = ""
        try:
            return super().train(resume_from_checkpoint, *args, **keywords)
        except BaseException as error:
            reason = reason_of(error)
            if self._run is None or not self._run.is_updating:
                raise
            failure = failure_of(error, "optimizer")
            if failure is None:
                raise
            release(error, self.running.device)
            reason = _("Out of memory in the optimizer's step.")
        finally:
            if self._run is not None and reason:
                self._run.close(finished=False, reason=reason)
        raise self.running.half_changed(failure, last_whole_checkpoint(self.args.output_dir, missing_is_error=False))

    def evaluate(self, *args: Any, **keywords: Any) -> dict[str, float]:
        """As the Trainer's; when it runs out of memory, with half the evaluation batch. The training batch has nothing to do with it.

        Whatever it draws, training goes on with the random numbers that it had.
        """
        while True:
            randomness = Randomness.of(self.args.device)
            try:
                return cast("dict[str, float]", super().evaluate(*args, **keywords))
            except Exception as error:
                size = self.args.per_device_eval_batch_size
                if failure_of(error, "evaluation") is None:
                    raise
                if size == 1 or self.args.world_size > 1:
                    raise evaluation_does_not_fit(size, self.evaluation_hint()) from error
                self._free(error)
            finally:
                randomness.restore(self.args.device)
            self.args.per_device_eval_batch_size = size // 2
            # Loaders with workers that stay are kept by the Trainer, with their batch size.
            getattr(self, "_eval_dataloaders", {}).clear()
            text = _("Evaluation ran out of memory: its batch size goes from {old} to {new}. Training goes on as it was.")
            self._warn(text.format(old=size, new=size // 2))

    def save_model(self, *args: Any, **keywords: Any) -> None:
        """As the Trainer's; never of weights that are half changed."""
        if self._run is not None:
            self._run.refuse_if_torn()
        super().save_model(*args, **keywords)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if self._run is not None:
            self._run.refuse_if_torn()
        if self.args.should_save:
            # An old checkpoint of the same step is not whole any more from here on, until its state is written again.
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            for name in (TRAINER_STATE_NAME, MANIFEST):
                (folder / name).unlink(missing_ok=True)
        for is_last in (self.args.world_size > 1, True):
            try:
                super()._save_checkpoint(model, trial)
                break
            except Exception as error:
                if failure_of(error, "saving") is None:
                    raise
                if is_last:
                    raise saving_does_not_fit(self.state.global_step, self.saving_hint()) from error
                self._free(error)
            self._warn(_("Saving ran out of memory. Freed what can be freed; retrying once."))
        self.saved_step = self.state.global_step

    def evaluation_hint(self) -> str:
        """What helps where an evaluation does not fit."""
        return _("Set per_device_eval_batch_size lower, eval_accumulation_steps=1, or shorten the evaluation sequences.")

    def saving_hint(self) -> str:
        """What helps where a checkpoint does not fit in memory."""
        return _("Save less at once: save_only_model=True, or LoRA. You can resume from the last complete checkpoint.")

    def _warn(self, text: str) -> None:
        """The command's screen has no place for a warning's line of source."""
        if self.is_quiet:
            say(f"brim: {text}")
        else:
            warnings.warn(text, stacklevel=3)

    def _free(self, error: BaseException) -> None:
        release(error, device_of(self.args.device))


class BrimTrainer(BrimMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer with brim's step."""


def attach(
    trainer: Trainer,
    *,
    effective_batch: int | None = None,
    budget: Budget | Sequence[Budget] | None = None,
    speeds: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    ledger: str | Path | bool = True,
    on_broken: OnBroken = "stop",
    noise_scale: bool | None = None,
) -> Trainer:
    """Give a Trainer that exists already brim's step: `brim.attach(trainer)`, then `trainer.train()` as ever.

    See `BrimMixin` for the options. It works on any subclass, and returns the same object.
    """
    if isinstance(trainer, BrimMixin):
        raise UsageError(_("brim is attached to this trainer already."))
    if not isinstance(cast("object", trainer), Trainer):
        text = _("brim.attach takes a transformers Trainer, and this is a {kind}.")
        raise UsageError(text.format(kind=type(trainer).__name__), hint=_("For a loop of your own, see brim.steps."))
    options = Options(
        effective_batch=effective_batch, budget=budget, speeds=speeds, lengths=lengths, ledger=ledger, on_broken=on_broken,
        noise_scale=noise_scale,
    )  # fmt: skip
    kind = type(trainer)
    trainer.__class__ = type(f"Brim{kind.__name__}", (BrimMixin, kind), {})
    attached: Any = trainer
    try:
        attached._begin(options)  # noqa: SLF001 (the rest of its construction)
    except BaseException:
        trainer.__class__ = kind
        raise
    return trainer
