"""Checkpoints that are complete or not there, on a disk that may be full: put before BrimMixin, `class T(SafeSaving, BrimMixin, Trainer)`.

`manifest.py` tells how a checkpoint comes to its name. Here is when: room is looked for first; a save that fails all the same (another
program was quicker, a quota, a limit on files) leaves nothing behind, and the last checkpoint as it was; training goes on, for what is in
memory is worth more than what is on the disk. After a failed check a save follows as soon as there is room; after a failed write, at the
next save point, for the system had said that there was room. Only a run that ends unsaved is an error.

A checkpoint waits for the ledger: with lines that could not be written, it is not completed, so that no step is in a checkpoint and not
in the ledger, whenever the power goes.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from brim.errors import RunError
from brim.locale import _, sentences
from brim.machine.screen import say
from brim.sizes import MIB, format_bytes
from brim.step.book import reason_of
from brim.step.exchange import travels
from brim.step.together import RanksApartError
from brim.trainer import disk, manifest
from brim.trainer.manifest import SAVING, last_checkpoint
from brim.trainer.saving import needed_bytes
from brim.trainer.stopping import Wish
from brim.trainer.summing import sums_while_writing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from brim.trainer.manifest import FileSum

__all__ = ["SafeSaving", "last_checkpoint"]

KEPT: Final = 2
"""Checkpoints that stay, where `save_total_limit` says nothing."""
_LITTLE_BYTES: Final = MIB
"""For configs, states and the tokenizer, until a first checkpoint says how much they take."""
_SHARE: Final = 1.01
"""Headers, and tensors that begin at round addresses."""

# Whatever class of Trainer stands behind it; not one that mypy could know.
_AnyTrainer: Any = object


@travels
@dataclass(frozen=True)
class _Room:
    """What a checkpoint needs, and what there is."""

    needed_bytes: int
    free_bytes: int

    @property
    def is_enough(self) -> bool:
        return self.free_bytes >= self.needed_bytes


@dataclass(frozen=True)
class _Unsaved:
    """A save that was due and failed."""

    step: int
    why: str
    """As a sentence, with its figures."""
    folder: Path
    waits_for_room: bool
    """Whether it was room that was looked for and not found."""


class SafeSaving(_AnyTrainer):  # type: ignore[misc]
    """The Trainer's checkpoints, each complete or not there. `save_total_limit` is 2 where it is not set."""

    saved_step: int | None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._keep = self.args.save_total_limit or KEPT
        self.args.save_total_limit = None  # ours: the Trainer would delete in place
        self._is_writing = False
        self._waiting_error: Exception | None = None
        self._unsaved: _Unsaved | None = None
        self._last_bytes = 0
        self._sums: Mapping[str, FileSum] = {}
        """Of the files of the checkpoint that is being written."""
        self._to_push: str | None = None
        self._lost_folder = False
        """The run's folder was deleted: what is in memory is all that there is, until it is saved."""

    def train(self, *args: Any, **keywords: Any) -> Any:
        """As the Trainer's; an error where the end of it could not be saved."""
        result = super().train(*args, **keywords)
        if self._unsaved is not None:
            self._save_checkpoint(self.model_wrapped, None)
        if self._unsaved is not None:
            raise _ended_unsaved(self._unsaved, self.state.global_step)
        return result

    def wish(self) -> int:
        """A save that waits for room is wished for when there is; at once where all checkpoints were deleted."""
        if self._lost_folder:
            return int(super().wish()) | Wish.SAVE
        unsaved = self._unsaved
        if unsaved is None or not unsaved.waits_for_room or not self.args.should_save:
            return int(super().wish())
        return int(super().wish()) | (Wish.SAVE if self._room(unsaved.folder).is_enough else 0)

    def ledger_was_restored(self) -> None:
        """With the ledger the whole folder may be gone."""
        self._lost_folder = not manifest.checkpoints(self._get_output_dir(None))

    def _prepare_for_training(self, *args: Any, **keywords: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **keywords)
        # The ledger is ours by now, so no other process is writing here.
        self._unsaved = None
        if self.args.should_save:
            manifest.clear(Path(self._get_output_dir(None)))
        return prepared

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial))
        self._lost_folder = False
        room = self._agreed_room(folder)
        if not room.is_enough:
            self._fail(folder, _no_room(self.state.global_step, folder, room), waits_for_room=True)
            return
        before, best = self.saved_step, self.state.best_model_checkpoint
        try:
            why = self._write(model, trial) or self._complete(folder)
        finally:
            if self.args.should_save:
                manifest.clear(folder)
        if why is not None:
            self.saved_step, self.state.best_model_checkpoint = before, best
            left = _Room(room.needed_bytes, disk.free_bytes(folder))
            self._fail(folder, _not_written(self.state.global_step, folder, left, why), waits_for_room=False)
            return
        if self._unsaved is not None:
            self._unsaved = None
            self._say(_("brim: the checkpoint of step {step} is saved.").format(step=self.state.global_step))
        if self._to_push is not None:
            super()._push_from_checkpoint(str(folder / self._to_push))
            self._to_push = None

    # Room.

    def checkpoint_bytes(self) -> int:
        """Of the tensors of a checkpoint."""
        state_bytes = 0 if self.args.save_only_model else _state_bytes(self.optimizer)
        return needed_bytes(self.model) + state_bytes

    def _room(self, folder: Path) -> _Room:
        computed = int(self.checkpoint_bytes() * _SHARE) + _LITTLE_BYTES
        return _Room(max(computed, self._last_bytes), disk.free_bytes(folder))

    def _agreed_room(self, folder: Path) -> _Room:
        """As the rank that writes sees it. What an earlier attempt has left is gone before any rank writes."""
        mine: _Room | None = None
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            manifest.clear(folder)
            mine = self._room(folder)
        said: list[_Room] = [room for room in self.running.ranks.gather(mine) if room is not None]
        return min(said, key=lambda room: room.free_bytes - room.needed_bytes)

    # Writing. The Trainer's own `_save_checkpoint` has collectives between its writes, so that with several ranks an error of one waits
    # until all have met.

    def _write(self, model: torch.nn.Module, trial: Any) -> str | None:
        """All files, under `.saving`. What of the disk was in the way on any rank; an error of another kind is raised on all."""
        self._is_writing, self._waiting_error, self._to_push = True, None, None
        error: Exception | None = None
        try:
            with sums_while_writing() as self._sums:
                super()._save_checkpoint(model, trial)
        except RanksApartError:
            raise
        except Exception as raised:  # noqa: BLE001 (told to the other ranks, then raised)
            error = raised
        finally:
            self._is_writing = False
        return self._agreed_trouble(self._waiting_error or error)

    def _complete(self, folder: Path) -> str | None:
        """Seal it and give it its name."""
        name = manifest.name_of(self.state.global_step)
        error: Exception | None = None
        is_best = self.state.best_model_checkpoint == str(folder / SAVING / name)
        if is_best:
            self.state.best_model_checkpoint = str(folder / name)
        if self.args.should_save:
            try:
                self._put_in_place(folder / SAVING / name, folder / name, is_best=is_best)
            except Exception as raised:  # noqa: BLE001 (told to the other ranks, then raised)
                error = raised
        return self._agreed_trouble(error)

    def _put_in_place(self, part: Path, final: Path, *, is_best: bool) -> None:
        if is_best:  # the Trainer has written where it was
            self.state.save_to_json(str(part / manifest.STATE))
        self.running.settle()
        self._last_bytes = manifest.seal(part, self.state.global_step, sums=self._sums)
        manifest.put_in_place(part, final)
        manifest.rotate(final.parent, keep=self._keep, newest=final, best=self.state.best_model_checkpoint)

    def _agreed_trouble(self, error: Exception | None) -> str | None:
        mine = None if error is None else (disk.disk_trouble(error) or self._deletion(error), reason_of(error))
        said = self.running.ranks.gather(mine)
        if error is not None and mine is not None and mine[0] is None:
            raise error
        for rank, words in enumerate(said):
            if words is not None and words[0] is None:
                text = _("Rank {rank} could not save its part of the checkpoint: {why}")
                raise RunError(text.format(rank=rank, why=words[1]))
        return next((words[0] for words in said if words is not None), None)

    def _deletion(self, error: BaseException) -> str | None:
        """Whether somebody has deleted the folder while it was written."""
        part = Path(self.args.output_dir) / SAVING / manifest.name_of(self.state.global_step)
        is_gone = not part.is_dir() or not all(Path(file).is_file() for file in self._sums)
        return _("the folder was deleted while it was written") if is_gone and disk.is_of_missing_file(error) else None

    @contextmanager
    def _errors_wait(self) -> Iterator[None]:
        try:
            yield
        except RanksApartError:
            raise
        except Exception as error:
            if not self._is_writing or self.args.world_size <= 1:
                raise
            self._waiting_error = self._waiting_error or error

    def _get_output_dir(self, trial: Any) -> str:
        folder = str(super()._get_output_dir(trial))
        return str(Path(folder) / SAVING) if self._is_writing else folder

    def save_model(self, *args: Any, **keywords: Any) -> None:
        """As the Trainer's."""
        with self._errors_wait():
            super().save_model(*args, **keywords)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._errors_wait():
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._errors_wait():
            super()._save_rng_state(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Later: a folder that is being uploaded must not be renamed."""
        self._to_push = Path(checkpoint_folder).name

    # Telling.

    def _fail(self, folder: Path, why: str, *, waits_for_room: bool) -> None:
        """Said once, until a save succeeds."""
        is_news = self._unsaved is None
        self._unsaved = _Unsaved(self.state.global_step, why, folder, waits_for_room)
        if not is_news:
            return
        if waits_for_room:
            then = _("Training goes on, and a checkpoint is saved as soon as there is room.")
            hint = _("Free some space there.")
        else:
            then = _("What was written of it is removed. Training goes on, and tries again at the next save point.")
            hint = _("See that this disk is well, and that your quota and limits allow it.")
        last = _last_kept(folder) if self.args.should_save else None
        there = _("There is no earlier checkpoint.") if last is None else _("The last one is {path}.").format(path=last)
        self._say(sentences(f"brim: {why}", then, there, hint))

    def _say(self, sentence: str) -> None:
        if self.is_world_process_zero():
            say(sentence)


def _last_kept(folder: Path) -> Path | None:
    """By sizes alone: this process wrote it, and reading all of it would hold up the training."""
    return last_checkpoint(folder, none_is_error=False, with_sums=False)


def _state_bytes(optimizer: Any) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _no_room(step: int, folder: Path, room: _Room) -> str:
    text = _("The checkpoint of step {step} was not saved: it takes {needed}, and {folder} has {free} free.")
    return text.format(
        step=step, needed=format_bytes(room.needed_bytes), folder=folder, free=format_bytes(room.free_bytes)
    )  # fmt: skip


def _not_written(step: int, folder: Path, room: _Room, why: str) -> str:
    text = _("The checkpoint of step {step} was not saved ({why}): it takes {needed}, and {folder} has {free} free.")
    return text.format(
        step=step, why=why, needed=format_bytes(room.needed_bytes), folder=folder, free=format_bytes(room.free_bytes)
    )  # fmt: skip


def _ended_unsaved(unsaved: _Unsaved, step: int) -> RunError:
    last = _last_kept(unsaved.folder)
    if last is None:
        there = _("There is no earlier checkpoint.")
        hint = _("Make room in {folder} and start again.").format(folder=unsaved.folder)
    else:
        there = _("The last checkpoint is {path}.").format(path=last)
        text = _(
            "Make room there, then go on: brim train --resume {folder}. The steps after {done} are taken again, up to {step}."
        )
        hint = text.format(folder=unsaved.folder, done=manifest.step_of(last), step=step)
    return RunError(sentences(_("The run ended unsaved."), unsaved.why, there), hint=hint)
