"""One of several processes of a run: `python -m brim.trainer.rank RUN [WORKER]`, started by torchrun or accelerate.

How it ended goes into the folder that whoever launched it looks into, one file a rank.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from brim.locale import _, activate
from brim.machine import child
from brim.machine.screen import outlive_the_terminal
from brim.record import write_atomically
from brim.records import RunCard
from brim.trainer.lessons import learn
from brim.trainer.ranks import World, without_engines
from brim.trainer.request import RUN_FILE
from brim.trainer.starting import bind_stores
from brim.trainer.watching import MEET_SECONDS, Notice, Watch, born
from brim.trainer.worker import Ended, quiet_libraries, show_traceback

OUTBOX_VARIABLE: Final = "BRIM_RANKS_OUTBOX"
"""The folder for what ranks have to say: `pid-N` when they begin, `ended-N.json` when they end."""
DEVICE_VARIABLE: Final = "BRIM_RANKS_DEVICE"
"""Where they train: the run's folder may not be there yet when they meet."""
_WAIT: Final = dt.timedelta(hours=4)
"""How long ranks wait for each other: the first may have a large file to tokenise, or a large checkpoint to write."""
_REASON_SECONDS: Final = 5.0
_CONNECTION = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "gloo",
    "nccl",
    "broken pipe",
    "socket",
    "store",
)
"""What a collective says when another rank is gone."""

Work = Callable[[Path, World], Ended]


def meet() -> Any:
    """Where the ranks talk: the launcher's store, or the first rank's own. It is there, or will be in a moment."""
    import torch.distributed as dist

    bind_stores()
    distributed: Any = dist
    store, _rank, _size = next(distributed.rendezvous("env://", timeout=dt.timedelta(seconds=MEET_SECONDS)))
    return store


def join(store: Any, world: World, device: str | None) -> None:
    """Make the process group, once all ranks are known to be there."""
    import torch
    import torch.distributed as dist

    is_cpu = (device or "").startswith("cpu") or not torch.cuda.is_available()
    if not is_cpu:
        torch.cuda.set_device(world.local_rank)
    store.set_timeout(_WAIT)
    dist.init_process_group(
        "gloo" if is_cpu else "cpu:gloo,cuda:nccl", store=store, rank=world.rank, world_size=world.size, timeout=_WAIT
    )


@contextlib.contextmanager
def watched(folder: Callable[[], Path], world: World, leave: Callable[[Ended, bool], Any]) -> Iterator[list[Ended]]:
    """Nobody waits for a rank that is gone, while this is open. What goes wrong inside ends up in the list that comes out, told to all.

    `leave(ended, speaks)` is called where this rank must go in the middle of whatever it is doing; it does not return.
    """
    watch = Watch(world, lambda notice, speaks: leave(_of(notice), speaks))
    ended: list[Ended] = []
    try:
        yield ended
    except BaseException as error:  # noqa: BLE001 (told to the other ranks, and to whoever waits)
        _go_deaf()
        show_traceback()
        ended[:] = [_explained(error, folder, watch)]
        mine = ended[0]
        if not mine.is_echo and (mine.error or mine.stopped_by is not None):
            message = mine.message or _("Another process was asked to stop.")
            watch.tell(Notice(world.rank, message, mine.error, mine.hint, stopped_by=mine.stopped_by))
    else:
        watch.stop()
    finally:
        watch.leave()


def _go_deaf() -> None:
    """This process is on its way out already: a launcher that asks for it must not keep it from saying why."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _explained(error: BaseException, folder: Callable[[], Path], watch: Watch) -> Ended:
    from brim.step.together import TooLargeError

    if isinstance(error, TooLargeError):
        card = RunCard.read(folder() / RUN_FILE)
        if card.is_pinned:
            hint = _("--micro-batch is used as given: give a smaller one with --resume, or leave it out of another run.")
            return Ended(error="OutOfMemoryError", message=error.message, hint=hint)
        if learn(folder(), error, card):
            return Ended.by(error, again=True)
        hint = _("One sequence alone is too much: shorten it (--seq-len), or spread the model over more GPUs.")
        return Ended(error="OutOfMemoryError", message=error.message, hint=hint)
    if isinstance(error, KeyboardInterrupt):
        return Ended(stopped_by=signal.SIGINT)
    if isinstance(error, Signalled):
        reason = watch.reason(_REASON_SECONDS)
        return Ended(stopped_by=error.number) if reason is None else _of(reason)
    if _is_of_connection(error):
        reason = watch.reason(_REASON_SECONDS)
        if reason is not None:
            return _of(reason)
    return Ended.by(error)


def _is_of_connection(error: BaseException | None) -> bool:
    """Whether a collective failed because another rank is gone, be it that a save or an engine has put words of its own around that."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, RuntimeError) and any(word in words for word in _CONNECTION):
            return True
        error = error.__cause__ or error.__context__
    return False


def _of(notice: Notice) -> Ended:
    return Ended(error=notice.error, message=notice.message, hint=notice.hint, stopped_by=notice.stopped_by, is_echo=True)


class Signalled(BaseException):
    """A signal that ends this process at once."""

    def __init__(self, number: int) -> None:
        self.number = number


def end_here(number: int, _frame: object) -> None:
    """A launcher ends what is left, when a rank has failed."""
    raise Signalled(number)


class Outbox:
    """What this rank says to whoever launched it. The first word counts."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._lock, self._has_spoken = threading.Lock(), False

    def begin(self) -> None:
        """Where signals can be sent to."""
        write_atomically(self._folder / f"pid-{self._rank}", f"{os.getpid()} {born(os.getpid())}")

    def end(self, ended: Ended) -> None:
        """How it ended."""
        with self._lock:
            if not self._has_spoken:
                self._has_spoken = True
                # A disk that is full must not hide the reason: the exit code is still there.
                with contextlib.suppress(OSError):
                    write_atomically(self._folder / f"ended-{self._rank}.json", json.dumps(vars(ended)))

    def leave(self, ended: Ended, _speaks: bool) -> None:
        """In the middle of something that will never end."""
        self.end(ended)
        exit_now(ended)


def exit_now(ended: Ended) -> None:
    """Gloo's threads outlive their group, and abort an interpreter that ends in good order."""
    sys.stdout.flush()
    sys.stderr.flush()
    # One that was asked to stop has not failed: a launcher would end the others in the middle of their last words.
    os._exit(1 if ended.error else 0)


def main(arguments: list[str]) -> None:
    """Train as one of several."""
    outlive_the_terminal(stdout=True)
    child.die_with_parent()
    activate(os.environ.get("BRIM_LANG") or "en")
    # Until the ranks have met, a signal ends this process on the spot: nothing is begun, and who waits for another rank hears no Python.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    folder, module = Path(arguments[0]), arguments[1] if len(arguments) > 1 else "brim.trainer.worker"
    work: Work = importlib.import_module(module).work
    without_engines()
    outbox = Outbox(Path(os.environ[OUTBOX_VARIABLE]), World.of_environment().rank)
    outbox.begin()
    ended = Ended(error="RunError", message=_("The ranks did not meet."))
    try:
        quiet_libraries()
        world, store = World.of_environment(), meet()
        with watched(lambda: folder, world, outbox.leave) as said:
            join(store, world, os.environ.get(DEVICE_VARIABLE))
            signal.signal(signal.SIGTERM, end_here)
            # A job in the background has it ignored from its shell; here it is how whoever launched us hands on whatever signal it got.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            said.append(work(folder, world))
            _together()
        _go_deaf()
        ended = said[0]
    except (KeyboardInterrupt, Signalled) as error:
        ended = Ended(stopped_by=error.number if isinstance(error, Signalled) else signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 (before the ranks have met)
        _go_deaf()
        show_traceback()
        ended = Ended.by(error)
    if child.HAS_DATA_LIMIT:
        child.set_data_limit(None)
    outbox.end(ended)
    exit_now(ended)


def _together() -> None:
    """Nobody leaves before all are through: the first rank holds what the others wait for."""
    import torch.distributed as dist

    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
