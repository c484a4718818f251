"""The Trainer of `brim train`: brim's step, brim's checkpoints, and evaluations that do not depend on how they are sliced."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from brim.errors import OutOfMemoryError
from brim.locale import _
from brim.machine.screen import say
from brim.records import Evaluation, RunCard
from brim.step.micro import IGNORED
from brim.trainer.checkpoints import SafeSaving
from brim.trainer.evaluations import append_evaluation
from brim.trainer.hf import BrimMixin
from brim.trainer.optimizing import make_optimizer
from brim.trainer.request import EVALUATIONS_FILE
from brim.trainer.sharding.training import ShardedTraining

if TYPE_CHECKING:
    from brim.trainer.data.tokens import TokenData
    from brim.trainer.run_records import RunRecords

_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant-with-warmup": "constant_with_warmup",
    "inverse-sqrt": "inverse_sqrt", "polynomial": "polynomial",
}  # fmt: skip
"""In transformers' words."""


def training_arguments(card: RunCard, folder: Path) -> TrainingArguments:
    """What the card says, as the Trainer takes it. The optimizer is made by `optimizing.py`; the Trainer's accumulation stays 1."""
    recipe, options, settings = card.recipe, card.options, card.settings
    evaluates = card.evaluation_sequences > 0
    with_workers = card.num_workers > 0
    # An engine that cuts the model moves its pieces by itself, and computes in half precision without autocast.
    kind, autocasts = (_OnHost, False) if card.is_sharded else (TrainingArguments, True)
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=card.micro_batch,
        per_device_eval_batch_size=options.eval_batch,
        gradient_accumulation_steps=1,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=_SCHEDULES[recipe.schedule],
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm or 0.0,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        seed=recipe.seed,
        data_seed=recipe.seed,
        bf16=autocasts and settings.precision == "amp-bf16",
        fp16=autocasts and settings.precision == "amp-fp16",
        use_cpu=card.device == "cpu",
        logging_strategy="steps",
        logging_steps=options.logging_steps,
        logging_first_step=True,
        save_strategy="steps",
        save_steps=options.save_steps,
        save_total_limit=options.keep,
        eval_strategy="no" if not evaluates else "steps" if options.eval_steps else "epoch",
        eval_steps=options.eval_steps,
        prediction_loss_only=settings.task != "classification",
        dataloader_num_workers=card.num_workers,
        dataloader_prefetch_factor=card.prefetch_factor if with_workers else None,
        dataloader_persistent_workers=with_workers,
        dataloader_pin_memory=card.pin_memory,
        remove_unused_columns=False,
        report_to=list(options.report_to) or "none",
        run_name=options.run_name,
        disable_tqdm=True,
        log_level_replica="passive",  # as quiet as the first process
        label_names=["labels"],
    )


class _OnHost(TrainingArguments):
    """The Trainer leaves the model where it is."""

    @property
    def place_model_on_device(self) -> bool:
        """Not whole."""
        return False


@dataclass
class _Sums:
    """Of an evaluation, over all rows of a rank."""

    loss: float = 0.0
    items: int = 0
    right: int = 0
    rows: int = 0


class RunTrainer(SafeSaving, BrimMixin, ShardedTraining, Trainer):  # type: ignore[misc]
    """One run of `brim train`."""

    is_quiet = True
    """The command says what is in force before, and promise against fact after."""

    def __init__(self, *args: Any, card: RunCard, records: RunRecords, evaluation: TokenData | None, **keywords: Any) -> None:
        self._card = card
        self._batches_that_count = 0
        self._records = records
        self._unwritten: list[Evaluation] = []
        """Evaluations that the disk has not taken yet."""
        self._told_unwritten = False
        super().__init__(*args, eval_dataset=evaluation, **keywords)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        # brim sums gradients by itself: the wrapper that does it while backward runs would only hold buckets as large as all of them.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def create_optimizer(self, *_details: Any, **_keywords: Any) -> torch.optim.Optimizer:
        """Of the word that was asked for, the same as the memory model counts."""
        found: torch.optim.Optimizer | None = self.optimizer
        self.optimizer = self.make_optimizer() if found is None else found
        return self.optimizer

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Of what trains in the model as it is now."""
        recipe, model = self._card.recipe, cast("torch.nn.Module", self.model)
        return make_optimizer(
            self._card.settings.optimizer, model, learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay,
            betas=(recipe.adam_beta1, recipe.adam_beta2), epsilon=recipe.adam_epsilon,
        )  # fmt: skip

    def checkpoint_bytes(self) -> int:
        """Whole, whatever holds it."""
        return super().checkpoint_bytes() if self.shards is None else self.shards.whole_bytes

    def _prepare_for_training(self, *args: Any, **keywords: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **keywords)
        if self.restore_records():  # the ledger is there by now, in a folder that it made
            text = _("brim: {folder} was deleted before the first step. Its records are written again.")
            say(text.format(folder=self.args.output_dir))
        return prepared

    def ledger_was_restored(self) -> None:
        """As SafeSaving's, and the other records of the run are put back."""
        super().ledger_was_restored()
        if self.restore_records() and self._lost_folder:
            text = _(
                "brim: {folder} was deleted while training. It is there again with its records; a checkpoint follows this step."
            )
            say(text.format(folder=self.args.output_dir))

    def restore_records(self) -> bool:
        """Write those that were deleted, and the evaluations that wait; whether there were any."""
        restored = self.is_world_process_zero() and self._records.restore()
        self._write_evaluations()
        return restored

    def take_up(self, checkpoint: str) -> None:
        """The weights and the state of a checkpoint, without training any further."""
        self._load_from_checkpoint(checkpoint)
        self.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Checkpoints are known by their sums; what they leave out is a weight that is tied to another."""

    # Evaluation: a mean over supervised tokens, whatever the batch.

    def evaluate(self, *args: Any, **keywords: Any) -> dict[str, float]:
        """As BrimMixin's. The Trainer evaluates before it saves: if not even one sequence fits, the steps so far are saved first."""
        try:
            return super().evaluate(*args, **keywords)
        except OutOfMemoryError:
            if self._run is not None and self.args.world_size <= 1 and self.saved_step != self.state.global_step:
                self._save_checkpoint(self.model_wrapped, None)
            raise

    def evaluation_hint(self) -> str:
        """In the words of the command."""
        text = _("Resume with a smaller --eval-batch, or with shorter sequences: brim train --resume {folder} --eval-data FILE")
        return text.format(folder=self.args.output_dir)

    def saving_hint(self) -> str:
        """In the words of the command."""
        text = _("Free memory on the GPU, then resume from the last checkpoint: brim train --resume {folder}")
        return text.format(folder=self.args.output_dir)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This rank's rows, neighbours by length together: the mean does not depend on their order, and little is padded."""
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        lengths = np.asarray(data.lengths)
        order = np.argsort(-(lengths if lengths.ndim == 1 else lengths.sum(axis=1)), kind="stable")
        mine = order[self.args.process_index :: max(1, self.args.world_size)]
        size = self.args.per_device_eval_batch_size
        batches = [mine[start : start + size].tolist() for start in range(0, len(mine), size)]
        self._batches_that_count = len(batches)
        if self.shards is not None:
            # A forward is collective: who has fewer batches runs a short row until all are through.
            ranks = max(1, self.args.world_size)
            batches += [order[-1:].tolist()] * (-(-len(order) // (ranks * size)) - len(batches))
        return DataLoader(data, batch_sampler=batches, collate_fn=self.data_collator)

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *_details: Any, metric_key_prefix: str = "eval", **_keywords: Any
    ) -> Any:
        """The loss over all rows, and for a classifier the share of rows that it has right."""
        began = time.perf_counter()
        model = self._wrap_model(cast("torch.nn.Module", self.model), training=False, dataloader=dataloader)
        was_training = model.training
        model.eval()
        sums = _Sums()
        try:
            for number, batch in enumerate(dataloader):
                self._evaluate_batch(model, batch, sums if number < self._batches_that_count else _Sums())
        finally:
            model.train(was_training)
        if self.shards is not None:
            self.shards.settle()
        total = self._of_all_ranks(sums)
        loss = total.loss / total.items if total.items else float("nan")
        metrics = {f"{metric_key_prefix}_loss": loss}
        others: dict[str, float] = {}
        if self._card.settings.task == "classification" and total.rows:
            others["accuracy"] = total.right / total.rows
        metrics |= {f"{metric_key_prefix}_{name}": value for name, value in others.items()}
        self._note_evaluation(loss, others, total.rows, time.perf_counter() - began)
        return EvalLoopOutput(predictions=cast("Any", None), label_ids=None, metrics=metrics, num_samples=total.rows)

    def _evaluate_batch(self, model: Any, batch: Any, sums: _Sums) -> None:
        inputs = self._prepare_inputs(batch)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        labels = inputs["labels"]
        is_classifier = self._card.settings.task == "classification"
        counted = labels if is_classifier or self._card.settings.task == "seq2seq" else labels[..., 1:]
        items = int((counted != IGNORED).sum())
        sums.rows += len(outputs.logits) if is_classifier else self._rows_of(inputs)
        if items:
            sums.loss += float(outputs.loss.float()) * items
            sums.items += items
        if is_classifier:
            sums.right += int((outputs.logits.argmax(dim=-1) == labels).sum())

    def _rows_of(self, inputs: Any) -> int:
        positions = inputs.get("position_ids")
        return int((positions == 0).sum()) if positions is not None else len(inputs["input_ids"])

    def _of_all_ranks(self, sums: _Sums) -> _Sums:
        if self.args.world_size <= 1:
            return sums
        values = torch.tensor([sums.loss, sums.items, sums.right, sums.rows], dtype=torch.float64, device=self.args.device)
        torch.distributed.all_reduce(values)
        loss, items, right, rows = values.tolist()
        return _Sums(loss, int(items), int(right), int(rows))

    def _note_evaluation(self, loss: float, metrics: dict[str, float], rows: int, seconds: float) -> None:
        """One more line beside the ledger."""
        if not self.is_world_process_zero():
            return
        entry = Evaluation(step=self.state.global_step, loss=loss, metrics=metrics, sequences=rows, seconds=seconds)
        self._unwritten.append(entry)
        self._write_evaluations()

    def _write_evaluations(self) -> None:
        """Those that wait. Training is worth more than a line that a disk does not take, or that a deleted folder has no place for."""
        if not self._unwritten:
            return
        folder = Path(cast("str", self.args.output_dir))
        try:
            while self._unwritten:
                append_evaluation(folder, self._unwritten[0])
                del self._unwritten[0]
            self._records.keep()
        except OSError as error:
            if not self._told_unwritten:
                self._told_unwritten = True
                text = _("brim: Cannot write {path}: {why}. Training continues, and the evaluation is written later.")
                say(text.format(path=folder / EVALUATIONS_FILE, why=error.strerror or error))
