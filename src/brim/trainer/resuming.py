"""What the Trainer does not bring back when a run goes on, so that it ends with the weights of one without a break, to the bit.

It restores weights, optimizer, schedule, scaler and random numbers. It does not see that

- making the iterator of a loader draws from the random numbers of the model, as often as there are epochs, workers that do not
  stay, and evaluations: here loaders have a generator of their own, and an evaluation leaves no trace;
- a collator that draws (masking, for example) draws in the worker that has the step, or in the training process: here each step has
  numbers of its own, wherever it is loaded;
- `load_state_dict` rounds an optimizer's float32 state to the type of a 16-bit weight;
- the loss that is logged is a mean since the last log, also where a checkpoint lies between;
- `save_steps`, `eval_steps` and `logging_steps` are what is asked for now, not what the checkpoint says;
- an evaluation may have been due when the checkpoint was written, and not have been made.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from brim.locale import _
from brim.machine.screen import say
from brim.step.loading import StepDataset, StepItem
from brim.step.randomness import Randomness

if TYPE_CHECKING:
    from collections.abc import Iterator

_CPU = torch.device("cpu")
# Whatever class of Trainer stands behind it; not one that mypy could know.
_AnyTrainer: Any = object


class ExactResume(_AnyTrainer):  # type: ignore[misc]
    """The part of BrimMixin that begins where another process ended."""

    def _init_training_state(self, max_steps: int, *args: Any, **keywords: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(max_steps, *args, **keywords)
        self.state.compute_steps(self.args, max_steps)
        self._may_owe_evaluation = self.state.global_step > 0
        return found

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As the Trainer's; where another number of ranks wrote the checkpoint, this rank may have no file in it."""
        if checkpoint is None:
            return
        rank, size = self.args.process_index, self.args.world_size

        def has_file(rank: int) -> bool:
            return (Path(checkpoint) / ("rng_state.pth" if size <= 1 else f"rng_state_{rank}.pth")).is_file()

        if has_file(rank):
            super()._load_rng_state(checkpoint)
            return
        seed_by(self.args.seed, self.state.global_step, rank, with_devices=True)
        if rank and not has_file(rank - 1):
            return  # that one says it, or one before it
        text = _(
            "brim: the checkpoint has no random numbers for rank {rank} of {size}, so they begin anew, by the seed and the step. "
            "Only dropout and the like can tell."
        )
        say(text.format(rank=rank, size=size))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not (Path(checkpoint) / "optimizer.pt").is_file():
            say(_("brim: {path} holds no state of the optimizer, which begins anew.").format(path=checkpoint))
        optimizer: Any = self.optimizer
        with types_kept(getattr(optimizer, "optimizer", optimizer)):
            super()._load_optimizer_and_scheduler(checkpoint)

    def logging_state(self) -> dict[str, Any]:
        """The loss since the last log, for a checkpoint."""
        return {"loss_sum": float(self._tr_loss), "logged_step": self._globalstep_last_logged}

    def restore_logging(self, saved: dict[str, Any]) -> None:
        """Go on with the mean that was begun. The mean over this call of `train` stays that of its own steps."""
        self._tr_loss += float(saved["loss_sum"])
        self._total_loss_scalar -= float(saved["loss_sum"])
        self._globalstep_last_logged = int(saved["logged_step"])

    def _evaluate_if_owed(self, trial: Any, ignore_keys: Any, steps_per_epoch: int) -> None:
        """Once, before the first step of a run that goes on."""
        if self._may_owe_evaluation and _evaluation_is_owed(self.args, self.state, steps_per_epoch):
            metrics = self._evaluate(trial, ignore_keys)
            self._determine_best_metric(metrics=metrics, trial=trial)
        self._may_owe_evaluation = False


class SeededSteps(StepDataset):
    """Each step is loaded with random numbers of its own, by the seed, the step and the rank; whoever loads it keeps his."""

    def __getitem__(self, step: int) -> StepItem:
        kept = Randomness.of(_CPU)
        seed_by(self.plan.seed, step, self.rank)
        try:
            return super().__getitem__(step)
        finally:
            kept.restore(_CPU)


def seed_by(seed: int, step: int, rank: int, *, with_devices: bool = False) -> None:
    """Set the random numbers of this process."""
    one, two, three = (int(word) for word in np.random.SeedSequence([seed, step, rank]).generate_state(3))
    random.seed(one)
    np.random.seed(two)
    if with_devices:
        torch.manual_seed(three)
    else:
        torch.default_generator.manual_seed(three)


@contextmanager
def types_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While its state is loaded: tensors stay of the type that they were saved with."""
    saved: dict[str, Any] = {}

    def before(_optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        saved.update(state)

    def after(loaded: torch.optim.Optimizer) -> None:
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in loaded.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in saved["state"].get(number, {}).items():
                there = loaded.state[parameter].get(name)
                if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor) and there.dtype != value.dtype:
                    loaded.state[parameter][name] = value.to(there.device)

    hooks = (optimizer.register_load_state_dict_pre_hook(before), optimizer.register_load_state_dict_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _evaluation_is_owed(args: Any, state: Any, steps_per_epoch: int) -> bool:
    strategy, step = str(getattr(args.eval_strategy, "value", args.eval_strategy)), state.global_step
    if strategy == "steps":
        due = step % state.eval_steps == 0 and args.eval_delay <= step
    else:
        due = strategy == "epoch" and step % steps_per_epoch == 0 and args.eval_delay <= step / steps_per_epoch
    made = (entry for entry in state.log_history if entry.get("step") == step)
    return due and not any(name.startswith("eval_") for entry in made for name in entry)
