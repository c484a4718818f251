"""Several processes that a launcher started: the first one prepares, all of them train.

What the first finds out, an error too, is told to the others through the process group, so that all end alike.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from brim.errors import UsageError
from brim.locale import _
from brim.machine.budget import MALLOC_ENVIRONMENT
from brim.machine.screen import say as say_on_screen
from brim.step.exchange import broadcast
from brim.trainer.rank import exit_now, join, meet, watched
from brim.trainer.ranks import World, without_engines
from brim.trainer.train import done_already, nothing_left, only_one, prepare, result_of, written
from brim.trainer.verifying import repair_records
from brim.trainer.worker import Ended, error_of, work

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.records import RunCard, TrainingResult
    from brim.trainer.request import TrainRequest


def with_calibrated_memory() -> None:
    """Linux under a limit: begin this process again with the allocator's thresholds, which glibc reads only at its start."""
    if sys.platform == "linux" and any(os.environ.get(name) != value for name, value in MALLOC_ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **MALLOC_ENVIRONMENT})  # noqa: S606


def train_together(
    request: TrainRequest, folder: Path, say: Callable[[str], None], before: Callable[[RunCard], None] | None
) -> TrainingResult:
    """One rank of a run."""
    if request.memory is not None and request.device == "cpu":
        with_calibrated_memory()
    without_engines()
    world, store = World.of_environment(), meet()
    place = [folder]
    with contextlib.ExitStack() as stack:
        with watched(lambda: place[0], world, _leave) as said:
            join(store, world, request.device)
            place[0] = Path(broadcast(str(folder)))
            told = _prepared(request, place[0], world, say, before, stack) if world.is_first else None
            instead = broadcast(None if told is None else vars(told))
            said.append(work(place[0], world) if instead is None else Ended(**instead))
            broadcast(None)
        ended = said[0]
        if ended.error:
            raise error_of(ended)
        return result_of(place[0], stopped_by=ended.stopped_by, finished=ended.finished)


def _leave(ended: Ended, speaks: bool) -> None:
    """In the middle of something that will never end."""
    if speaks:
        say_on_screen(f"brim: {ended.message}")
        if ended.hint:
            say_on_screen(f"  {ended.hint}")
    exit_now(ended)


def _prepared(
    request: TrainRequest,
    folder: Path,
    world: World,
    say: Callable[[str], None],
    before: Callable[[RunCard], None] | None,
    stack: contextlib.ExitStack,
) -> Ended | None:
    """Prepare and write the folder. What the others must be told instead of beginning: that it failed, or is finished already."""
    if request.dry_run:
        return Ended.by(UsageError(_("--dry-run is for one process: leave the launcher out.")))
    try:
        stack.enter_context(only_one(folder))
        if request.resumes is not None:
            repair_records(folder, say)
        if done_already(request, folder) is not None:
            say(nothing_left(folder))
            return Ended(finished=True)
        prepared = prepare(request, world, say)
        if before is not None:
            before(prepared.card)
        stack.enter_context(written(folder, prepared))
    except Exception as error:  # noqa: BLE001 (the other ranks wait to be told)
        return Ended.by(error)
    return None
