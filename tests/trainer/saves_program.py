"""What one of two ranks runs: `torchrun ... saves_program.py FOLDER SCENARIO...`. Each leaves what it found in the folder."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from brim.step.budget import Budget
from brim.trainer.checkpoints import last_checkpoint
from brim.trainer.stopping import StopOnSignal
from tests.torchrun import leave
from tests.trainer.saves import safe
from tests.trainer.small import weights

# Seven sequences one by one: two ranks cannot have the same number of micro-batches.
UNEQUAL: dict[str, Any] = {"effective_batch": 7, "budget": Budget.sequences(1)}


def found_in(trainer: Any) -> Any:
    return {"step": trainer.state.global_step, "weights": float(weights(trainer.model).double().abs().sum())}


def straight(folder: Path) -> Any:
    trainer = safe(folder, **UNEQUAL)
    trainer.train()
    return found_in(trainer)


def first_half(folder: Path) -> Any:
    trainer = safe(folder, **UNEQUAL, callbacks=[_StopAt(4)])
    trainer.train()
    return found_in(trainer)


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self._step


def second_half(folder: Path) -> Any:
    if folder.name == "second_half":
        folder = folder.with_name("from-one")
    trainer = safe(folder, **UNEQUAL)
    trainer.train(resume_from_checkpoint=str(last_checkpoint(folder)))
    return found_in(trainer)


def signalled(folder: Path) -> Any:
    """Only the second rank hears of it."""

    class Signal(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
            if state.global_step + 1 == 3 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = safe(folder, **UNEQUAL, callbacks=[Signal()])
    with StopOnSignal(trainer):
        trainer.train()
    return found_in(trainer)


def starved(folder: Path) -> Any:
    """The second rank cannot write its file at the first save."""
    saved: list[int] = []

    class Starve(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
            if args.process_index == 1:
                _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if state.global_step < 2 else hard, hard))

        def on_save(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
            if (folder / f"checkpoint-{state.global_step}").is_dir():
                saved.append(state.global_step)

    trainer = safe(folder, **UNEQUAL, callbacks=[Starve()])
    trainer.train()
    return {**found_in(trainer), "saved": saved}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        found = globals()[name](folder / name)
        rank = torch.distributed.get_rank()
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
