"""The terminal while a run is watched: taken over when the view begins, and given back whatever happens.

The view has a screen of its own, so that what stood there comes back. Keys are read without an Enter; Ctrl-C works as ever. A view that is
suspended (Ctrl-Z) or ended from outside gives the terminal back first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from brim.cli._output import console
from brim.pictures.live import picture

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from rich.live import Live

    from brim.pictures.live_state import State

_LEAVING: Final = frozenset(b"qQ\x03")
_LOOK_SECONDS: Final = 0.1
"""A new size of the window is seen so soon."""
_ENDING: Final = ("SIGTERM", "SIGHUP")


def can_draw() -> bool:
    """Whether stdout is a terminal that can be drawn on, and this process is the one that talks to it."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM", "") in {"", "dumb", "unknown"}:
        return False
    try:
        return os.tcgetpgrp(sys.stdout.fileno()) == os.getpgrp()
    except (OSError, AttributeError):
        return False


class Screen:
    """Draws states, and waits for a key between them."""

    def __init__(self) -> None:
        self._console = console(sys.stdout)
        self._live: Live | None = None
        self._keys: int | None = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._state: State | None = None
        self._drawn_size: tuple[int, int] | None = None
        self._is_to_stop = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in _ENDING:
                self._handle(getattr(signal, name), self._end)
            self._handle(signal.SIGTSTP, self._suspend)
        try:
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def draw(self, state: State) -> None:
        """Show this state, as large as the window is now."""
        self._state = state
        size = self._console.size
        self._drawn_size = (size.width, size.height)
        ascii_only = self._console.options.ascii_only
        assert self._live is not None
        self._live.update(picture(state, width=size.width, height=size.height, ascii_only=ascii_only), refresh=True)

    def wait(self, seconds: float) -> bool:
        """Wait so long; whether a key asked to leave. A window whose size changes is drawn again at once."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._suspend_if_asked()
            if self._asked_to_leave(min(left, _LOOK_SECONDS)):
                return True
            size = self._console.size
            if self._state is not None and (size.width, size.height) != self._drawn_size:
                self.draw(self._state)
        return False

    def _asked_to_leave(self, seconds: float) -> bool:
        if self._keys is None:
            time.sleep(seconds)
            return False
        try:
            ready, _writable, _broken = select.select([self._keys], [], [], seconds)
            typed = os.read(self._keys, 64) if ready else None
        except OSError:  # the terminal has gone
            return True
        if typed == b"":
            self._keys = None
        return bool(typed) and not _LEAVING.isdisjoint(typed or b"")

    def _take(self) -> None:
        from rich.live import Live

        if self._keys is not None:
            import termios
            import tty

            with contextlib.suppress(termios.error):
                self._modes = termios.tcgetattr(self._keys)
                tty.setcbreak(self._keys)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def _give_back(self) -> None:
        live, modes = self._live, self._modes
        self._live = self._modes = None
        try:
            if live is not None:
                # Also where the window has gone: then there is nothing to be given back.
                with contextlib.suppress(OSError):
                    live.stop()
        finally:
            if modes is not None and self._keys is not None:
                import termios

                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._keys, termios.TCSADRAIN, modes)

    def _handle(self, number: int, handler: Any) -> None:
        # What is ignored (nohup) stays ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            self._handlers[number] = signal.signal(number, handler)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        # Only noted: it may come while a picture is being written, and no second write may begin inside the first.
        self._is_to_stop = True

    def _suspend_if_asked(self) -> None:
        if not self._is_to_stop:
            return
        self._is_to_stop = False
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
        if self._state is not None:
            self.draw(self._state)
