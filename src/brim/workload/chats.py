"""What a tokenizer's chat template makes of messages, as far as counting and training must agree on it.

A template is a program that came with a model. transformers runs it in a sandbox that keeps it from files and from Python's internals, but
not from `'x' * 10**10` or a loop without end. So it runs in a forked child, with limits on its memory, its time and what it writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from brim.errors import UsageError
from brim.locale import _
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.workload.columns import Message

THOUGHTS_END: Final = "</think>"

MOST_CHARACTERS: Final = 4 << 20
"""Of one rendered chat: a tokenizer that tells where its tokens stand takes some 250 bytes for each."""
MOST_MEMORY_BYTES: Final = 512 << 20
"""Beyond what the process had before."""
MOST_SECONDS: Final = 10
"""Of one chat, in time of the processor: a busy machine does not make a template slow."""

_HEADER: Final = struct.Struct("!Q")
_THREADS: Final = "TOKENIZERS_PARALLELISM"


class TemplateRefusalError(Exception):
    """The template was given messages that it was not written for, and raised an error of any kind."""


def spoken(message: Message) -> str:
    """What is said aloud: without the thoughts before it."""
    return str(message["content"]).rpartition(THOUGHTS_END)[2].strip()


def is_open(last: Message, text: str) -> bool:
    """Whether a chat ends with an answer, and nothing in its text tells that it has ended: it then gets the end token."""
    answer = spoken(last)
    return last["role"] == "assistant" and bool(answer) and text.rstrip().endswith(answer)


class ChatRenderer:
    """The template of one tokenizer of transformers, under limits. Where there is no `fork` (Windows), only what it writes is limited."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._child: _Child | None = None

    def render(self, messages: list[Message], *, invite: bool = False) -> str:
        """The text of a chat. Raises TemplateRefusalError, and UsageError where the template exceeds a limit."""
        return str(self._answer({"messages": messages, "invite": invite})["text"])

    def render_marked(self, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The same, and from where to where the template's own marks say that the assistant speaks."""
        answer = self._answer({"messages": messages, "marked": True})
        return answer["text"], [(start, end) for start, end in answer["spans"]]

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(os, "fork"):
            answer = _rendered(self._tokenizer, request)
        else:
            self._child = self._child or _Child(self._tokenizer)
            answer = self._child.ask(request)
        if "refused" in answer:
            raise TemplateRefusalError(answer["refused"])
        if "exceeded" in answer:
            self.close()
            text = _("The chat template of {name} was stopped: {why}.").format(name=self._name, why=_exceeded(answer["exceeded"]))
            raise UsageError(text, hint=_("Read the template before you use it, or take the tokenizer from another source."))
        return answer


def _exceeded(what: str) -> str:
    if what == "memory":
        return _("it takes more than {size} of memory for one chat").format(size=format_bytes(MOST_MEMORY_BYTES))
    if what == "time":
        return _("it takes more than {seconds} s for one chat").format(seconds=MOST_SECONDS)
    return _("its process ended ({what})").format(what=what)


class _Child:
    """A fork of this process that renders what it is asked for, until nobody is at the other end."""

    def __init__(self, tokenizer: Any) -> None:
        import transformers.utils.chat_template_utils  # noqa: F401 (once, here, and not in each child)

        self._socket, others = socket.socketpair()
        with _quiet_fork():
            self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            _serve(others, tokenizer)
        others.close()
        self.end = weakref.finalize(self, _end, self._socket, self._pid)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One chat. A child that ends says so by its signal."""
        try:
            _send(self._socket, request)
            return _receive(self._socket)
        except (EOFError, ConnectionError):
            with contextlib.suppress(ChildProcessError):
                _pid, status = os.waitpid(self._pid, 0)
                self.end.detach()
                self._socket.close()
                ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                what = "time" if ended_by == signal.SIGPROF else signal.Signals(ended_by).name if ended_by else "exit"
                return {"exceeded": what}
            return {"exceeded": "exit"}


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Neither Python nor tokenizers need warn: the child starts no thread, takes no lock and tokenises nothing."""
    threads = os.environ.get(_THREADS)
    os.environ.setdefault(_THREADS, "true")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if threads is None:
            os.environ.pop(_THREADS, None)


def _end(connection: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _serve(connection: socket.socket, tokenizer: Any) -> NoReturn:
    """The life of the child. Nothing of the parent's may run on in it."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for each in (signal.SIGTERM, signal.SIGPROF):
            signal.signal(each, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        _limit_memory()
        while True:
            request = _receive(connection)
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            answer = _rendered(tokenizer, request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(connection, answer)
    finally:
        os._exit(0)


def _limit_memory() -> None:
    """As `RLIMIT_DATA` counts it: private writable memory, of which the child has its parent's from the start. Linux only."""
    import resource

    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        now_bytes = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = now_bytes + MOST_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _rendered(tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = _marked(tokenizer, request) if request.get("marked") else _plain(tokenizer, request)
        size = len(answer["text"])
        if size > MOST_CHARACTERS:
            text = _("it writes {size:,} characters, and brim reads at most {most:,}")
            return {"refused": text.format(size=size, most=MOST_CHARACTERS)}
    except MemoryError:
        return {"exceeded": "memory"}
    except Exception as error:  # noqa: BLE001 (a template may raise whatever a filter of jinja's raises)
        return {"refused": str(error) or type(error).__name__}
    return answer


def _plain(tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    text = tokenizer.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=request["invite"])
    return {"text": str(text)}


def _marked(tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[request["messages"]],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    (text,), (spans,) = rendered
    return {"text": text, "spans": spans}


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message, default=lambda value: f"<{type(value).__name__}>").encode()
    connection.sendall(_HEADER.pack(len(data)) + data)


def _receive(connection: socket.socket) -> dict[str, Any]:
    (size,) = _HEADER.unpack(_bytes(connection, _HEADER.size))
    found: dict[str, Any] = json.loads(_bytes(connection, size))
    return found


def _bytes(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
