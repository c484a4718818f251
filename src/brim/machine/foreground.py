"""Run a command in the foreground, as a shell would: its input and output, its signals, its exit code."""

from __future__ import annotations

import signal
import subprocess
import threading
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

POLL_SECONDS: Final = 1.0
"""Between two calls of `look`."""
_FORWARDED: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


def run_foreground(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    hint: str,
    look: Callable[[], None] = lambda: None,
    started: Callable[[int], None] = lambda _pid: None,
    interrupted: Callable[[], None] = lambda: None,
    stdout: IO[Any] | None = None,
) -> int:
    """Run a command to its end and return its exit code; 128 and the signal's number if a signal ended it.

    `look` is called about once a second and after the end, `started` with the process id, `interrupted` at every Ctrl-C,
    which reaches the command through the terminal. SIGTERM, SIGHUP and SIGQUIT are forwarded.
    """
    with _forward_signals(interrupted) as forward_to:
        try:
            process = subprocess.Popen(list(command), env=dict(environment), stdout=stdout)
        except OSError as error:
            raise UsageError(
                _("Cannot run {command}: {why}.").format(command=command[0], why=error.strerror or error), hint=hint
            ) from error
        except ValueError as error:
            raise UsageError(_("Cannot run {command}: {why}.").format(command=repr(command[0]), why=error)) from error
        started(process.pid)
        forward_to(process)
        while True:
            try:
                code = process.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                look()
                continue
            look()
            return code if code >= 0 else 128 - code


@contextmanager
def _forward_signals(interrupted: Callable[[], None]) -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward signals to the process that is given to what this yields; signals that arrive before wait for it.

    SIGINT gets a handler that does nothing, not SIG_IGN: ignored signals stay ignored in the command.
    """
    to: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward_to(process: subprocess.Popen[bytes]) -> None:
        to.append(process)
        while early:
            process.send_signal(early.pop(0))

    if threading.current_thread() is not threading.main_thread():
        yield forward_to
        return

    def wait(_number: int, _frame: FrameType | None) -> None:
        interrupted()

    def forward(number: int, _frame: FrameType | None) -> None:
        if not to:
            early.append(number)
        for process in to:
            process.send_signal(number)

    handlers: dict[int, Any] = {signal.SIGINT: wait, **dict.fromkeys(_FORWARDED, forward)}
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
