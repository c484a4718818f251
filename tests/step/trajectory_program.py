"""The runs whose trajectories are compared: the same thirty optimizer steps, each time taken in another way.

A run leaves `ledger.jsonl` and `weights.pt` in its folder. In this process, in a child under a memory limit, or on several ranks:
`torchrun --nproc-per-node=2 -m tests.step.trajectory_program RECIPE...`, each recipe as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM, TrainerCallback, TrainingArguments

from brim.step.batch import BatchPlan, Slices
from brim.step.budget import Budget, ShapeCost
from brim.step.ledger import ids_of_slices, read_ledger
from brim.step.loop import Steps
from brim.trainer.hf import BrimTrainer
from tests.step import toys
from tests.torchrun import leave

SEQUENCES, EFFECTIVE_BATCH, EPOCHS, STEPS = 150, 16, 3, 30
"""Ten steps an epoch, the last of them with 6 sequences."""
SEED = 5
SAVE_EVERY = 4
MAX_NORM = 0.5
"""Low enough to clip every step."""
_NO_LIMIT = Budget.sequences(SEQUENCES)

Way = Literal["steps", "trainer"]
Family = Literal["llama", "gpt2", "qwen2"]


@dataclass(frozen=True)
class Recipe:
    """One way through the thirty steps. What it does not name is the same in all."""

    folder: str
    way: Way = "steps"
    unit: Literal["sequences", "tokens", "bytes"] = "sequences"
    limit: int = 8
    family: Family = "llama"
    epochs: int = EPOCHS
    wide: bool = False
    """Activations that a memory limit can tell from nothing."""
    dropout: float = 0.0
    saves: bool = False
    resumes: bool = False
    killed_at: int | None = None
    """In the forward of this step, on the last rank."""
    slices_of: str | None = None
    """The ledger of a run whose slices are taken, in their order, without any limit."""

    def budget(self) -> Budget:
        if self.slices_of is not None:
            return _NO_LIMIT
        if self.unit == "bytes":
            return Budget(
                ShapeCost(fixed=5e3, per_token=1e3, per_squared_length=20), self.limit, ShapeCost(fixed=64, per_token=1)
            )
        if self.unit == "tokens":
            # Starting a micro-batch is dear: as few as the limit allows.
            return Budget.tokens(self.limit, fixed_tokens=1e4)
        return Budget.sequences(self.limit)

    def model(self) -> Any:
        torch.manual_seed(1)
        if self.family == "gpt2":
            off: dict[str, Any] = {"resid_pdrop": self.dropout, "embd_pdrop": self.dropout, "attn_pdrop": self.dropout}
            sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
            return GPT2LMHeadModel(GPT2Config(vocab_size=toys.VOCABULARY, **sizes, **off))  # type: ignore[no-untyped-call]
        if self.family == "qwen2":
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            tied: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": True}
            return Qwen2ForCausalLM(Qwen2Config(vocab_size=toys.VOCABULARY, **sizes, **tied))  # type: ignore[no-untyped-call]
        sizes = {"intermediate_size": 4096, "num_hidden_layers": 1} if self.wide else {}
        return toys.model(self.dropout, **sizes)


class Killer:
    """Ends this process in the forward of one step, without a word to anyone, as the system or an administrator does."""

    def __init__(self, recipe: Recipe, model: torch.nn.Module) -> None:
        self.step = 0
        self._at = recipe.killed_at
        self._ledger = Path(recipe.folder, "ledger.jsonl")
        if self._at is not None:
            model.register_forward_hook(self._end)

    def _end(self, *_details: Any) -> None:
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if self.step == self._at and is_last:
            if dist.is_initialized():
                self._wait_for_the_first()
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_the_first(self) -> None:
        """The launcher ends the first rank as soon as this one is gone: it must have told of the step before."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.step - 1 not in {entry.step for entry in read_ledger(self._ledger).steps}:
            time.sleep(0.02)


def run(recipe: Recipe) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    Path(recipe.folder).mkdir(exist_ok=True)
    model = recipe.model()
    (with_steps if recipe.way == "steps" else with_trainer)(recipe, model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(model.state_dict(), Path(recipe.folder, "weights.pt"))


def with_steps(recipe: Recipe, model: Any) -> None:
    """A loop as a user writes it, with checkpoints as a user saves them."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    optimizer = toys.adamw(model)
    checkpoint = Path(recipe.folder, "checkpoint.pt")
    resume = None
    if recipe.resumes:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        resume = saved["steps"]
    torch.manual_seed(SEED)
    steps = Steps(
        toys.data(SEQUENCES), model, optimizer,
        effective_batch=EFFECTIVE_BATCH, budget=recipe.budget(), collate=toys.collate, epochs=recipe.epochs, seed=SEED,
        max_norm=MAX_NORM, ledger=recipe.folder, resume=resume,
    )  # fmt: skip
    take_slices(recipe, steps.plan)
    killer = Killer(recipe, model)
    for step in steps:
        killer.step = step.number
        step.run()
        if recipe.saves and step.number % SAVE_EVERY == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
            part = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps.state()}, part)
            part.replace(checkpoint)


class TrajectoryTrainer(BrimTrainer):
    """Takes the slices of another run, where the recipe says so."""

    recipe: Recipe

    def _plan(self, data: Any) -> BatchPlan:
        plan = super()._plan(data)
        take_slices(self.recipe, plan)
        return plan


class Announce(TrainerCallback):
    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_details: Any) -> None:
        self._killer.step = state.global_step + 1


def with_trainer(recipe: Recipe, model: Any) -> None:
    arguments = TrainingArguments(
        output_dir=recipe.folder, use_cpu=True, ddp_backend="gloo" if "RANK" in os.environ else None, seed=SEED,
        num_train_epochs=recipe.epochs, lr_scheduler_type="constant", max_grad_norm=MAX_NORM, save_strategy="steps" if recipe.saves else "no",
        save_steps=SAVE_EVERY, logging_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    TrajectoryTrainer.recipe = recipe
    trainer = TrajectoryTrainer(
        model, arguments,
        data_collator=toys.collate, train_dataset=toys.data(SEQUENCES), optimizers=(toys.adamw(model), None),
        callbacks=[Announce(Killer(recipe, model))], effective_batch=EFFECTIVE_BATCH, budget=recipe.budget(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=recipe.resumes or None)


def take_slices(recipe: Recipe, plan: BatchPlan) -> None:
    """Let the plan cut every step as another run's ledger says that it was cut."""
    if recipe.slices_of is None:
        return
    steps = read_ledger(Path(recipe.slices_of, "ledger.jsonl")).steps
    recorded = {entry.step - 1: [np.array(ids) for _slice, ids in ids_of_slices(entry)] for entry in steps}

    def slices(step: int, _budget: Budget) -> Slices:
        return [recorded[step]]

    plan.slices = slices  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="+", type=lambda text: Recipe(**json.loads(text)))
    for recipe in parser.parse_args().recipe:
        run(recipe)
    leave()


if __name__ == "__main__":
    main()
