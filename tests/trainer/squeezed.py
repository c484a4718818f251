"""A worker that is really short of memory once: on one rank, at one step, in one phase. `BRIM_TEST_SQUEEZE=rank:step:phase`; the phase
`killed` kills it there instead, the name of a signal (`SIGSEGV`) ends it by that signal, and `saving` in the middle of the checkpoint of that step.

Just before that phase the limit of the process falls to what it holds, so that torch's own allocation fails. Where the run goes on in this
process, the next forward finds the memory as it was; where it is started anew, it happens only once, which a file remembers.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from brim.machine import child
from brim.trainer import worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from brim.trainer.ranks import World

VARIABLE = "BRIM_TEST_SQUEEZE"
_LITTLE_BYTES = 1 << 12
_BLOCKS = tuple(1 << bits for bits in range(24, 16, -2))


class Squeezed(worker.Worker):
    """As any worker, but for that moment."""

    def _trainer(self, budget: Any) -> tuple[Any, Any]:
        trainer, tokenizer = super()._trainer(budget)
        rank, step, phase = os.environ[VARIABLE].split(":")
        if int(rank) == self._world.rank:
            Moment(trainer, self._folder / "squeezed", int(step), phase).wait()
        return trainer, tokenizer


class Moment:
    """The one moment."""

    def __init__(self, trainer: Any, file: Path, step: int, phase: str) -> None:
        self._trainer, self._file, self._step, self._phase = trainer, file, step, phase
        self._lifted: tuple[int | None] | None = None
        self._held: list[Any] = []

    def wait(self) -> None:
        trainer = self._trainer
        forward, create = trainer.compute_loss, trainer.make_optimizer

        def compute_loss(model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            self._lift()
            if (self._phase in {"forward", "killed"} or self._phase in signal.Signals.__members__) and trainer.model.training:
                self._squeeze()
            loss = forward(model, inputs, *arguments, **keywords)
            if self._phase == "backward" and trainer.model.training:
                loss.register_hook(lambda _gradient: self._squeeze())
            return loss

        def make_optimizer() -> Any:
            optimizer = create()
            if self._phase == "optimizer":
                step = optimizer.step

                def squeezed(_optimizer: Any, *details: Any, **keywords: Any) -> Any:
                    self._squeeze()
                    try:
                        return step(*details, **keywords)
                    finally:
                        self._lift()

                optimizer.step = MethodType(squeezed, optimizer)
            return optimizer

        save = trainer._save_optimizer_and_scheduler

        def save_state(folder: str) -> None:
            if self._phase == "saving" and trainer.state.global_step == self._step and not self._file.exists():
                self._file.write_text(self._phase, encoding="utf-8")
                os.kill(os.getpid(), signal.SIGKILL)
            save(folder)

        trainer.compute_loss, trainer.make_optimizer, trainer._save_optimizer_and_scheduler = (
            compute_loss,
            make_optimizer,
            save_state,
        )

    def _squeeze(self) -> None:
        if self._trainer.state.global_step + 1 != self._step or self._file.exists():
            return
        self._file.write_text(self._phase, encoding="utf-8")
        if self._phase == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._phase in signal.Signals.__members__:
            os.kill(os.getpid(), signal.Signals[self._phase])
        self._lifted = (child.data_limit(),)
        child.give_back_memory()
        child.set_data_limit(child.data_bytes() + _LITTLE_BYTES)
        self._held = [block for size in _BLOCKS for block in _all_of(size)]

    def _lift(self) -> None:
        if self._lifted is not None:
            child.set_data_limit(self._lifted[0])
            self._held.clear()
            self._lifted = None


def _all_of(size: int) -> Iterator[Any]:
    """Blocks of this size, as long as there are any: what glibc has kept is room that the limit does not count."""
    with contextlib.suppress(RuntimeError, MemoryError):
        while True:
            yield torch.empty(size, dtype=torch.uint8)


def work(folder: Path, world: World) -> worker.Ended:
    """As `brim.trainer.worker.work`."""
    return Squeezed.of(folder, world).run()


def main(arguments: list[str]) -> None:
    """As `brim.trainer.worker.main`, for a process that is alone."""
    worker.main(arguments, work)
