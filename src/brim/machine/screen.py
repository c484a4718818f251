"""What reaches the terminal: text that cannot control it, and streams that never end a run.

Names of columns, models and files come from strangers. An escape sequence in one of them could clear the screen, forge a line of brim's or
turn the text around, so every character that a terminal obeys is shown as its code: `\\x1b`.

A run outlives its terminal. After `brim train ... 2>&1 | head -1`, on a full disk behind a log, or when the window is closed, what is
printed is lost and the training goes on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTROLS: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff"  # other line ends, byte order marks, no characters
    "\U000e0000-\U000e007f"  # invisible tags
)
_CONTROL: Final = re.compile(f"[{_CONTROLS}]")
_CONTROL_OR_LAYOUT: Final = re.compile(f"[{_CONTROLS}\t\n]")
_GONE: Final = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO})
"""Whoever read the stream does not come back. A full disk may."""


def printable(text: str) -> str:
    """Text of which a terminal obeys nothing but tabs and line ends."""
    return _CONTROL.sub(_code, text)


def printable_line(text: str) -> str:
    """The same as one line, for names and cells of tables."""
    return _CONTROL_OR_LAYOUT.sub(_code, text)


def message(text: str) -> str:
    """A sentence, or several lines of which those after the first are indented: a name with a line end in it cannot forge a line."""
    first, *others = printable(text).split("\n")
    return "\n".join([first, *(f"  {line}" if line[:1].strip() else line for line in others)])


def json_text(text: str) -> str:
    """A JSON document with the same content, of which a terminal obeys nothing."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}" if found[0] <= "\uffff" else json.dumps(found[0])[1:-1], text)


def say(sentence: str) -> None:
    """A remark for the person, on stderr, where it is no output of the program."""
    with contextlib.suppress(OSError, ValueError):
        print(message(sentence), file=sys.stderr, flush=True)  # noqa: T201


def redraw(text: str = "") -> None:
    """A line in the place of the last one, on a terminal."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\r\x1b[K{printable_line(text)}")
        sys.stderr.flush()


def outlive_the_terminal(*, stdout: bool = False) -> None:
    """From now on writing to stderr, and to stdout if asked, never fails. Descriptors 0, 1 and 2 that are closed lead to /dev/null.

    Otherwise the next file that is opened would get such a number, and what is printed would go into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stderr = _unfailing(2, sys.stderr)
    if stdout or sys.stdout is None:
        sys.stdout = _unfailing(1, sys.stdout)


def silence(descriptor: int) -> None:
    """Whatever is still written there, also by child processes, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextlib.contextmanager
def without_hangup() -> Iterator[None]:
    """A terminal that is closed ends nothing here, nor in child processes that are started meanwhile: they inherit it, as under nohup."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)


class _Unfailing(io.FileIO):
    """A stream whose bytes are lost where they cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                with contextlib.suppress(OSError):
                    silence(self.fileno())
            written = None
        return memoryview(data).nbytes if written is None else written


def _unfailing(descriptor: int, stream: Any) -> io.TextIOWrapper:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    raw = io.BufferedWriter(_Unfailing(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)


def _code(found: re.Match[str]) -> str:
    letter = found[0]
    if letter in "\t\n\r":
        return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}[letter]
    number = ord(letter)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
