"""Run a command as if brim were not there: its input and output, its signals, its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

PATH: Final = Path(__file__).parents[1] / "observer" / "path"
"""The folder that Python searches first, for its `sitecustomize`."""
LOOK_SECONDS: Final = 1.0
"""Between two looks at what the observers have written."""
_PASSED_ON: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


def run(command: Sequence[str], events: Path, look: Callable[[], None], environment: Mapping[str, str] | None = None) -> int:
    """Run it to its end, looking at the events now and then; its exit code as a shell would tell it."""
    with _signals() as hand_over:
        try:
            process = subprocess.Popen(list(command), env=surroundings(events, environment))
        except OSError as error:
            raise UsageError(
                _("Cannot run {command}: {why}.").format(command=command[0], why=error.strerror or error),
                hint=_("Write the command as you would without brim: brim observe -- python train.py"),
            ) from error
        except ValueError as error:
            raise UsageError(_("Cannot run {command}: {why}.").format(command=repr(command[0]), why=error)) from error
        hand_over(process)
        while True:
            try:
                code = process.wait(timeout=LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                look()
                continue
            look()
            return code if code >= 0 else 128 - code


def surroundings(events: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The command's environment: ours, the folder first on Python's path, and where to write."""
    given = dict(os.environ if environment is None else environment)
    # An empty entry would mean the working folder.
    path = os.pathsep.join(filter(None, (str(PATH), given.get("PYTHONPATH"))))
    return {**given, "PYTHONPATH": path, "BRIM_OBSERVE": str(events)}


@contextmanager
def _signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Ctrl-C reaches the command by itself, as it is in our group, and we wait for what it makes of it. Other wishes to end are passed on.

    Handlers, not "ignore": what is ignored stays ignored in the command. What comes while the command is being started waits for it: give
    it to what this yields.
    """
    to: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def hand_over(process: subprocess.Popen[bytes]) -> None:
        to.append(process)
        while early:
            process.send_signal(early.pop(0))

    if threading.current_thread() is not threading.main_thread():
        yield hand_over
        return

    def wait_on(_number: int, _frame: FrameType | None) -> None:
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not to:
            early.append(number)
        for process in to:
            process.send_signal(number)

    wanted: dict[int, Any] = {signal.SIGINT: wait_on, **dict.fromkeys(_PASSED_ON, pass_on)}
    before = {number: signal.getsignal(number) for number in wanted}
    for number, handler in wanted.items():
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield hand_over
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
