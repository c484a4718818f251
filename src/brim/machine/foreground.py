"""Run a command in the foreground, as a shell does: with its input and output, its signals and its exit code."""

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
"""Interval of the calls of `look`."""
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
    """Run a command to its end and return its exit code; 128 plus the signal's number if a signal ended it.

    `look` is called about once a second and once after the end, `started` with the process id, `interrupted` at every Ctrl-C. The terminal
    sends Ctrl-C to the command itself; SIGTERM, SIGHUP and SIGQUIT are forwarded.
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
    """Yield a function that sets the process to which signals are forwarded. Signals that arrive earlier are kept until then.

    SIGINT gets a handler instead of SIG_IGN, because the command would inherit an ignored signal.
    """
    processes: list[subprocess.Popen[bytes]] = []
    pending: list[int] = []

    def forward_to(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        while pending:
            process.send_signal(pending.pop(0))

    if threading.current_thread() is not threading.main_thread():
        yield forward_to
        return

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        interrupted()

    def forward(number: int, _frame: FrameType | None) -> None:
        if not processes:
            pending.append(number)
        for process in processes:
            process.send_signal(number)

    handlers: dict[int, Any] = {signal.SIGINT: on_interrupt, **dict.fromkeys(_FORWARDED, forward)}
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
