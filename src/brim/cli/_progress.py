"""What is being done, on stderr, while a plan takes long: one line that lives on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from brim.activity import Activity, activity, doing
from brim.cli._output import note
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_SECONDS: Final = 3.0
"""What is done by then needs no word."""
_REDRAW_SECONDS: Final = 1.0
_LINE_SECONDS: Final = 10.0


@contextlib.contextmanager
def progress(text: str, *, first: float = FIRST_SECONDS) -> Iterator[None]:
    """Say after `first` seconds, and again and again, what is being done and for how long."""
    is_live = sys.stderr is not None and sys.stderr.isatty()
    began = time.monotonic()
    doing("")

    def tell(*_signal: object) -> None:
        line = _line(text, activity(), time.monotonic() - began)
        if not is_live:
            note(line)
            return
        columns = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{line[:columns]}")
        sys.stderr.flush()

    if is_live:
        sys.stderr.write(text)
        sys.stderr.flush()
    with _every(first, _REDRAW_SECONDS if is_live else _LINE_SECONDS, tell):
        try:
            yield
        finally:
            if is_live:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()


@contextlib.contextmanager
def _every(first: float, seconds: float, call: object) -> Iterator[None]:
    """Call by a timer's signal and not by a thread, because a plan forks to use all cores; where there is none, never."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, call)  # type: ignore[arg-type]
    left, interval = signal.setitimer(signal.ITIMER_REAL, first, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's timer goes on
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - began)), interval)


def _line(text: str, now: Activity, seconds: float) -> str:
    detail = _detail(now)
    if not detail:
        return _("{text} {seconds:.0f} s").format(text=text, seconds=seconds)
    return _("{text} {seconds:.0f} s: {detail}").format(text=text, seconds=seconds, detail=detail)


def _detail(now: Activity) -> str:
    texts = {
        "import": _("loading torch and transformers"),
        "trace": _("tracing {what}"),
        "trace-several": _("tracing {what} ({done} of {total})"),
        "tokens": _("counting the tokens of {path}"),
        "compare": _("comparing {count} configurations"),
        "nearest": _("nothing fits; trying {flags}"),
    }
    text = texts.get(now.code)
    return text.format(**now.values) if text is not None else ""
