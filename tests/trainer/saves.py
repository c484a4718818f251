"""Runs that are cut, killed, starved of disk and taken up again: what tests of checkpoints train, here and in child processes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from brim.trainer.checkpoints import SafeSaving, last_checkpoint
from brim.trainer.hf import BrimMixin
from tests.trainer.small import llama, ragged, trainer_of, weights

ROWS = ragged(20)
"""Three steps an epoch, the last of four sequences."""
OPTIONS: dict[str, Any] = {
    "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "ledger": True,
}  # fmt: skip
"""Nine steps; saved after 2, 4, 6, 8 and 9."""


class SafeTrainer(SafeSaving, BrimMixin, Trainer):  # type: ignore[misc]
    """As `brim train` has it, without its card."""


def safe(folder: Path, model: Any = None, **changes: Any) -> Any:
    return trainer_of(folder, changes.pop("rows", ROWS), model, **{"kind": SafeTrainer, **OPTIONS, **changes})


def cut_at(trainer: Any, step: int) -> None:
    """Train, and stop after that step as a signal would have it."""
    end = trainer._bookkeeper.on_step_end

    def on_step_end(*args: Any, **keywords: Any) -> None:
        end(*args, **keywords)
        if trainer.state.global_step == step:
            trainer.stop_asked_by = signal.SIGTERM

    trainer._bookkeeper.on_step_end = on_step_end
    trainer.train()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def train_in_child(folder: str, kill: str = "", **changes: Any) -> tuple[list[float], float]:
    """Go on from wherever the folder is, to the last step: the weights, and the seconds that it took.

    `kill` names the moment of the first save at which this process is killed, or the seconds of training after which it is.
    """
    from brim.trainer import manifest

    torch.set_num_threads(1)
    path = Path(folder)
    trainer = safe(path, llama(attention_dropout=0.2), **changes)

    def die(*_details: Any, **_keywords: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if kill == "half-written":
        trainer._save_rng_state = die
    elif kill == "complete-not-renamed":
        manifest.put_in_place = die
    elif kill == "old-half-deleted":
        vars(manifest)["shutil"] = _Shutil(die)
    elif kill:
        trainer.add_callback(_KilledAfter(float(kill)))
    found = last_checkpoint(path)
    trainer.train(resume_from_checkpoint=None if found is None else str(found))
    return [float(value) for value in weights(trainer.model)], trainer.state.log_history[-1]["train_runtime"]


class _KilledAfter(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_begin(self, *_details: Any, **_keywords: Any) -> None:
        # By another process, so that any moment can be the last.
        subprocess.Popen(["sh", "-c", f"sleep {self._seconds}; kill -9 {os.getpid()}"])


class _Shutil:
    """The module, with a delete that dies after one file."""

    def __init__(self, die: Any) -> None:
        self._die = die

    def __getattr__(self, name: str) -> Any:
        import shutil

        return getattr(shutil, name)

    def rmtree(self, path: Path, **_keywords: Any) -> None:
        if Path(path).name.endswith("-old") and Path(path).is_dir():
            next(file for file in Path(path).iterdir()).unlink()
            self._die()
        import shutil

        shutil.rmtree(path, ignore_errors=True)
