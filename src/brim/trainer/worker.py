"""The process that trains: `python -m brim.trainer.worker RUN`. One of many, where a launcher started them.

Its memory is its own: what it holds after its imports and one warm-up does not count against the limit; the model and all after it does.
How it ended goes to the process that started it as one JSON document, so that an error is told once, in one voice.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from brim.errors import BrimError, OutOfMemoryError, RunError, UsageError, out_of_memory_family
from brim.locale import _, activate
from brim.machine import child
from brim.machine.screen import outlive_the_terminal, say
from brim.records import Measurement
from brim.sizes import format_bytes
from brim.step.exchange import broadcast
from brim.trainer.lessons import Lessons
from brim.trainer.ranks import World
from brim.trainer.request import LEDGER_FILE, PROBE_FILE
from brim.trainer.run_records import RunRecords
from brim.workload.settings import recorded_alpha

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.records import RunCard

OUTCOME_VARIABLE = "BRIM_OUTCOME_FD"
"""Where the parent listens."""
_FREE_SHARE = 0.8
"""Of the machine's free memory, for what runs before the limit is set."""


@dataclass(frozen=True)
class Ended:
    """How training ended, as far as the process could still say."""

    finished: bool = False
    stopped_by: int | None = None
    error: str = ""
    """The class of the error; empty where there was none."""
    message: str = ""
    hint: str | None = None
    again: bool = False
    """Whether the ranks may be started anew, with what they have learned."""
    is_echo: bool = False
    """Whether another process was the reason."""

    @classmethod
    def by(cls, error: BaseException, **facts: Any) -> Ended:
        """An error, as it is told to whoever waits."""
        if isinstance(error, BrimError):
            kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "brim.errors")
            return cls(error=kind.__name__, message=error.message, hint=error.hint, **facts)
        name = "RunError" if out_of_memory_family(error) is None else "OutOfMemoryError"
        return cls(error=name, message=f"{type(error).__name__}: {error}", **facts)


def work(folder: Path, world: World) -> Ended:
    """Train, evaluate and save what the folder's card says; from its last checkpoint where there is one."""
    return Worker.of(folder, world).run()


class Worker:
    """One process of a run, from its first import to the saved model."""

    def __init__(self, folder: Path, records: RunRecords, world: World) -> None:
        self._folder, self._records, self._card, self._world = folder, records, records.card(), world

    @classmethod
    def of(cls, folder: Path, world: World) -> Self:
        """Of a run that was prepared, also where its folder was deleted since."""
        worker = cls(folder, RunRecords.of(folder), world)
        if world.is_first and worker._records.restore():
            say(_("brim: {folder} was deleted before the first step. Its records are written again.").format(folder=folder))
        return worker

    def run(self) -> Ended:
        """Everything, in order."""
        from brim.trainer.manifest import step_of
        from brim.trainer.stopping import StopOnSignal

        quiet_libraries()
        card, folder = self._card, self._folder
        if card.world_size != self._world.size:
            text = _("{size} processes came, and the run was prepared for {planned}.")
            raise UsageError(
                text.format(size=self._world.size, planned=card.world_size),
                hint=_("Give the same --gpus and --nodes on every machine."),
            )
        if card.device == "cpu":
            os.environ.setdefault(
                "DS_ACCELERATOR", "cpu"
            )  # else DeepSpeed, which transformers imports, says that it found no GPU
        budget = self._taught(self.budget())
        self._warm_up()
        trainer, tokenizer = self._trainer(budget)
        found = self._agreed(self._checkpoint)
        checkpoint = None if found is None else Path(found)
        trainer.verified_checkpoint = found
        if card.device == "cpu" and not card.is_sharded:
            self._check_loss(trainer)
        self._count_from_here(trainer.model)
        if card.is_sharded:
            trainer.shard(folder, checkpoint)
        self._limit()
        if checkpoint is not None and (step_of(checkpoint) or 0) >= card.total_steps:
            # Only the end was missing: nothing is trained any more.
            trainer.take_up(str(checkpoint))
            return self._finish(trainer, tokenizer)
        # One process hears a press once: only launchers hand it on a second time.
        same_press = {"same_press_seconds": 0.0} if self._world.is_alone else {}
        with StopOnSignal(trainer, signals=self._signals(), **same_press) as stop:
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
            except KeyboardInterrupt:
                return Ended(stopped_by=stop.stopped_by or signal.SIGINT)
        if trainer.state.global_step < card.total_steps:
            # Without a signal of its own, this rank stopped because another one was asked to.
            return Ended(stopped_by=stop.stopped_by or signal.SIGTERM)
        return self._finish(trainer, tokenizer)

    def _signals(self) -> tuple[signal.Signals, ...]:
        """Those that stop this process in good order. A launcher that brim started ends what is left of its ranks by SIGTERM."""
        from brim.trainer.rank import OUTBOX_VARIABLE
        from brim.trainer.stopping import SIGNALS

        return tuple(each for each in SIGNALS if each != signal.SIGTERM or OUTBOX_VARIABLE not in os.environ)

    def _finish(self, trainer: Any, tokenizer: Any) -> Ended:
        from brim.trainer.saving import save_model

        save_model(trainer, tokenizer, self._folder)
        # Last: an evaluation that does not fit must not cost the model.
        if self._card.evaluation_sequences and not self._has_evaluated(trainer):
            trainer.evaluate()
        trainer.restore_records()
        return Ended(finished=True)

    def _has_evaluated(self, trainer: Any) -> bool:
        from brim.trainer.evaluations import read_evaluations

        step = trainer.state.global_step
        return bool(self._agreed(lambda: any(entry.step == step for entry in read_evaluations(self._folder))))

    def _checkpoint(self) -> str | None:
        """Where to continue: the last checkpoint of which every byte is as it was written."""
        from brim.step.ledger_repair import last_step_of
        from brim.trainer.manifest import last_checkpoint
        from brim.trainer.verifying import TellReading, where_it_resumes

        found = last_checkpoint(self._folder, progress=TellReading())
        sentence = where_it_resumes(found, last_step_of(self._folder / LEDGER_FILE), self._card.total_steps)
        if sentence:
            self._say(sentence)
        return None if found is None else str(found)

    def _agreed(self, look: Callable[[], Any]) -> Any:
        """What the first process finds in the folder, on all of them: another may look a moment earlier, or on a machine that sees a
        shared folder as it was; and what follows from it is collective.
        """
        if self._world.is_alone:
            return look()
        return broadcast(look() if self._world.is_first else None)

    def budget(self) -> Any:
        """What a micro-batch may cost; of each process, where they differ."""
        from brim.trainer.slicing import budgets_of

        text = self._records.text(PROBE_FILE) if self._card.probed else None
        probe = None if text is None else Measurement.from_json(text, where=str(self._folder / PROBE_FILE))
        return budgets_of(self._card, probe, self._say)

    def _taught(self, budget: Any) -> Any:
        """Below what has failed before, where ranks cannot learn by themselves."""
        if not self._card.is_sharded:
            return budget
        lessons = Lessons.of(self._folder)
        if isinstance(budget, list):
            return [lessons.taught(each, self._card) for each in budget]
        return lessons.taught(budget, self._card)

    def _warm_up(self) -> None:
        """To the footprint that does not count: everything imported that training imports, thread pools started, freed memory returned."""
        import numpy as np
        import torch

        import brim.trainer.running
        from brim.machine.device import CpuDevice
        from brim.workload.resolve import find_model

        card = self._card
        if card.settings.method != "full":
            import peft  # noqa: F401
        if card.is_sharded:
            from brim.trainer.sharding.shards import import_engine

            import_engine(card)
        if card.settings.method in {"qlora", "lora-8bit"} or card.settings.optimizer.endswith("8bit"):
            import bitsandbytes  # noqa: F401
        assert brim.trainer.running is not None
        find_model(card.model, trust_remote_code=card.options.trust_remote_code).build("meta")
        child.warm_up_torch(torch)
        square = np.ones((64, 64))
        square @ square
        if card.device == "cpu":
            CpuDevice.count_from_here()

    def _trainer(self, budget: Any) -> tuple[Any, Any]:
        from brim.trainer.data.tokens import Collate, TokenData
        from brim.trainer.loading import load_model, load_tokenizer
        from brim.trainer.running import RunTrainer, training_arguments
        from brim.trainer.telling import TellProgress
        from brim.workload.resolve import find_model

        card, options = self._card, self._card.options
        arguments = training_arguments(card, self._folder)
        tokenizer = load_tokenizer(card.data.tokenizer, trust_remote_code=options.trust_remote_code)
        rows = TokenData.open(card.data)
        evaluation = TokenData.open(card.evaluation) if card.evaluation is not None else None
        if options.eval_split is not None:
            rows, evaluation = rows.held_out(options.eval_split, card.recipe.seed)
        model = load_model(
            find_model(card.model, trust_remote_code=options.trust_remote_code),
            _as_loaded(card),
            # What is cut into pieces is cut on the host, and only the pieces go to the device.
            device="cpu" if card.is_sharded else str(arguments.device),
            labels=card.data.labels,
            from_scratch=options.from_scratch,
            seed=card.recipe.seed,
            trust_remote_code=options.trust_remote_code,
            pad_token_id=tokenizer.pad_token_id,
            say=self._say,
        )
        collate = Collate(
            _padding(tokenizer, model),
            has_targets=card.settings.task == "seq2seq",
            is_classifier=card.settings.task == "classification",
            packed=options.packed,
        )
        trainer = RunTrainer(
            model, arguments, card=card, records=self._records, evaluation=evaluation,
            train_dataset=rows, data_collator=collate, processing_class=tokenizer,
            effective_batch=card.effective_batch, budget=budget, speeds=card.speeds or None, lengths=rows.lengths,
            ledger=self._folder / LEDGER_FILE,
        )  # fmt: skip
        if self._world.is_first:
            trainer.add_callback(TellProgress(card, trainer))
        return trainer, tokenizer

    def _check_loss(self, trainer: Any) -> None:
        """Before the limit is set: the check runs two sequences at once, which a micro-batch of one never does; where oneDNN gets no memory
        for its code, it crashes (SIGSEGV); and what it compiles here, and the heap that grows, is no memory of the step. Only what the
        machine has left limits it.
        """
        from brim.machine.host import host

        if self._card.limit_is_hard:
            free = int(_FREE_SHARE * host().available_bytes / self._world.local_size)
            child.set_data_limit(child.data_bytes() + free)
        trainer.ask_counting()
        if self._card.limit_is_hard:
            child.set_data_limit(None)

    def _count_from_here(self, model: Any) -> None:
        """The model counts; the Trainer around it does not."""
        from brim.machine.device import CpuDevice

        if self._card.device == "cpu":
            held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in _tensors(model)}
            CpuDevice.count_from_here(but_bytes=sum(held.values()))

    def _limit(self) -> None:
        """From here on the memory is as large as was said, and not larger."""
        from brim.machine.device import CpuDevice

        card, limit = self._card, self._card.limit_of(self._world.rank)
        gc.collect()
        child.give_back_memory()
        if not card.limit_is_hard or limit is None:
            return
        own = CpuDevice.footprint
        assert own is not None
        if child.data_bytes() >= own.data_bytes + limit:
            raise OutOfMemoryError(
                _("The model takes {used} by itself, and {limit} may be taken.").format(
                    used=format_bytes(child.data_bytes() - own.data_bytes), limit=format_bytes(limit)
                ),
                hint=_("Give a larger --memory."),
            )
        CpuDevice.process_bytes = card.process_bytes
        child.set_data_limit(own.data_bytes + limit + card.process_bytes)

    def _say(self, sentence: str) -> None:
        if self._world.is_first:
            say(sentence)


def _as_loaded(card: RunCard) -> Any:
    """DeepSpeed rounds weights by itself, and keeps float32 ones beside them: they are loaded as exact as they are."""
    settings = replace(card.settings, lora_alpha=recorded_alpha(card.settings))
    is_rounded = card.is_sharded and settings.sharding != "fsdp" and settings.precision in {"bf16", "amp-fp16"}
    return replace(settings, precision="amp-bf16") if is_rounded else settings


def _tensors(model: Any) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()


def _padding(tokenizer: Any, model: Any) -> int:
    """What fills rows up. It is masked and never learnt, so any token of the model would do."""
    for token in (getattr(tokenizer, "pad_token_id", None), getattr(model.config, "pad_token_id", None)):
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def main(arguments: list[str], work: Callable[[Path, World], Ended] = work) -> None:
    """Train in a process that somebody started for it."""
    outlive_the_terminal(stdout=True)
    child.die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_here)
    activate(os.environ.get("BRIM_LANG") or "en")
    folder = Path(arguments[0])
    try:
        ended = work(folder, World())
    except KeyboardInterrupt:
        ended = Ended(stopped_by=signal.SIGINT)
    except _Signalled as error:
        ended = Ended(stopped_by=error.number)
    except Exception as error:  # noqa: BLE001 (told by the parent, in brim's form)
        ended = Ended.by(error)
        show_traceback()
    if child.HAS_DATA_LIMIT:
        child.set_data_limit(None)
    os.write(int(os.environ[OUTCOME_VARIABLE]), json.dumps(vars(ended)).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to be done, and taking torch and transformers apart takes a second.
    os._exit(0 if ended.finished else 1)


class _Signalled(BaseException):
    """A signal that came before training could be asked to stop in good order, or after it has."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end_here(number: int, _frame: object) -> None:
    raise _Signalled(number)


def quiet_libraries() -> None:
    """Their bars would be drawn over brim's own lines; what they warn of on resuming (tied weights, other save steps) is meant, and so are
    workers that outnumber the cores: they read rows and wait. bitsandbytes misses a package that brim does not need.
    """
    import logging
    import warnings

    from transformers.utils import logging as said_by_transformers

    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes")
    said: Any = said_by_transformers
    said.disable_progress_bar()
    said.set_verbosity_error()


def show_traceback() -> None:
    """Of the error that is handled now, for who wants it."""
    if os.environ.get("BRIM_DEBUG", "") not in {"", "0"}:
        import traceback

        traceback.print_exc()


def error_of(ended: Ended) -> BrimError:
    """What the process that trained ran into, as the error that it was there."""
    import brim.errors

    kind = getattr(brim.errors, ended.error, RunError)
    error: BrimError = kind(ended.message, hint=ended.hint)
    return error


if __name__ == "__main__":
    main(sys.argv[1:])
