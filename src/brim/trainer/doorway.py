"""Where the other machines of a run wait while the first one prepares it: at the door where their launchers will meet.

Preparing may take hours (a large file to tokenise), and may fail. A launcher that waits there by itself cannot tell the one from the other,
so brim knocks first. The first machine answers at once, gives a sign of life every few seconds, and says in the end how it went: the others
begin together, or all end with the same reason.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from brim.errors import BrimError, ChildError, UsageError
from brim.locale import _
from brim.trainer.worker import Ended, error_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from brim.trainer.group import Group

Word = Literal["ready", "finished", "failed"]
"""What the first machine says in the end."""
_GREETING: Final = b"brim: wait\n"
_SIGN: Final = b".\n"
_SIGN_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.2
_SILENT_SECONDS: Final = 60.0
"""As among ranks (`watching.py`)."""
_GREETING_SECONDS: Final = 10.0
"""Who answers, and says nothing for so long, is the launcher: preparing was over before we came."""
_CONTACT_SECONDS: Final = 1800.0
"""For the first machine to appear at all."""
_KNOCK_SECONDS: Final = 1.0
_LINGER_SECONDS: Final = 3.0
"""Who was started together with a first machine that failed at once hears of it, and does not wait for one that will not come."""
_REMIND_SECONDS: Final = 60.0
_LONGEST_WORD: Final = 1 << 16


class Door:
    """The first machine's side. Left without `open`, it tells why: an error, or that there was nothing to do."""

    def __init__(self, port: int, others: int = 0) -> None:
        self._others = others
        self._waiting: list[socket.socket] = []
        self._is_over = threading.Event()
        try:
            self._listener = _listen(port)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                _("The machines cannot meet at port {port} of this one: {why}.").format(port=port, why=why),
                hint=_("Give another port on each machine: --rendezvous HOST:PORT."),
            ) from error
        self._listener.settimeout(_LOOK_SECONDS)
        self._thread = threading.Thread(target=self._answer, name="brim-door", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._linger()
        self._end("finished" if error is None else "failed", error)

    def open(self) -> None:
        """All is prepared: the machines may meet here."""
        self._end("ready")

    def refuse(self, error: BrimError) -> None:
        """They are not to begin."""
        self._linger()
        self._end("failed", error)

    def _linger(self) -> None:
        end = time.monotonic() + _LINGER_SECONDS
        # Who does not care to wait is told what went wrong at once.
        with contextlib.suppress(KeyboardInterrupt):
            while not self._is_over.is_set() and len(self._waiting) < self._others and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS / 4)

    def _end(self, word: Word, error: BaseException | None = None) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        # Closed before the others are told: they come back to this port, for the launcher.
        self._listener.close()
        self._thread.join()
        said: dict[str, Any] = {"word": word}
        if error is not None:
            interrupted = ChildError(_("The first machine was interrupted while it prepared the run."))
            ended = Ended.by(error if isinstance(error, Exception) else interrupted)
            said |= {"error": ended.error, "message": ended.message, "hint": ended.hint}
        for each in self._waiting:
            with each, contextlib.suppress(OSError):
                each.sendall(json.dumps(said).encode() + b"\n")
        self._waiting.clear()

    def _answer(self) -> None:
        signed_at = time.monotonic()
        while not self._is_over.is_set():
            # One that left is found out when it is spoken to.
            with contextlib.suppress(OSError):
                new, _address = self._listener.accept()
                new.settimeout(_SIGN_SECONDS)
                if _is_heard(new, _GREETING):
                    self._waiting.append(new)
            if time.monotonic() - signed_at >= _SIGN_SECONDS:
                signed_at = time.monotonic()
                self._waiting[:] = [each for each in self._waiting if _is_heard(each, _SIGN)]


def door_of(group: Group | None) -> contextlib.AbstractContextManager[Door | None]:
    """Of the first of several machines; nothing where there is one."""
    if group is None or group.nodes == 1:
        return contextlib.nullcontext()
    _host, port = address_of(group)
    return Door(port, others=group.nodes - 1)


def knock(group: Group, say: Callable[[str], None]) -> bool:
    """Wait until the first machine has prepared the run. Whether there is something to train; its error, where it failed."""
    address = address_of(group)
    host, where = address[0], f"{address[0]}:{address[1]}"
    say(_("Waiting for the first machine at {where}.").format(where=where))
    connection = _greeted(address, say)
    if connection is None:
        return True
    with contextlib.closing(connection):
        reminded_at = time.monotonic()
        while True:
            try:
                line = connection.line(_SILENT_SECONDS)
            except OSError as error:
                raise ChildError(
                    _("The first machine, {host}, ended while it prepared the run, or cannot be reached.").format(host=host),
                    hint=_("Look at what it says, and start all machines again."),
                ) from error
            if line != _SIGN.strip():
                return _understood(line, where)
            if time.monotonic() - reminded_at > _REMIND_SECONDS:
                reminded_at = time.monotonic()
                say(_("The first machine is still preparing."))


def address_of(group: Group) -> tuple[str, int]:
    """Where the machines meet."""
    host, colon, port = (group.rendezvous or "").rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise UsageError(
            _("--rendezvous {given} is not HOST:PORT.").format(given=group.rendezvous),
            hint=_("Give the first machine's address on each: --rendezvous HOST:29500."),
        )
    return host.strip("[]"), int(port)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _is_heard(connection: socket.socket, word: bytes) -> bool:
    try:
        connection.sendall(word)
    except OSError:
        connection.close()
        return False
    return True


def _greeted(address: tuple[str, int], say: Callable[[str], None]) -> _Connection | None:
    """The first machine, which prepares; None where its launcher is there already."""
    where = f"{address[0]}:{address[1]}"
    began = time.monotonic()
    remind_at = began + _REMIND_SECONDS
    while True:
        try:
            return _knocked(address, where)
        except (OSError, UnicodeError) as error:
            # Nobody there yet; or one that left in the same moment, as a door does that is closed, and a forwarded port behind which
            # nobody listens.
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            text = _("Nobody answers at {where} yet: {why}.").format(where=where, why=why.rstrip("."))
            if isinstance(error, UnicodeError):
                raise UsageError(text) from error
            if time.monotonic() > began + _CONTACT_SECONDS:
                hint = _("Give the same command on the first machine, with --node-rank 0, and its address on each.")
                raise ChildError(text, hint=hint) from error
            if isinstance(error, socket.gaierror) and remind_at == began + _REMIND_SECONDS:
                remind_at = began  # a name that nobody knows is told at once
        if time.monotonic() > remind_at:
            remind_at = time.monotonic() + _REMIND_SECONDS
            say(text)
        time.sleep(_KNOCK_SECONDS)


def _knocked(address: tuple[str, int], where: str) -> _Connection | None:
    """Once. OSError where nobody is there."""
    connection = _Connection(socket.create_connection(address, timeout=_SIGN_SECONDS))
    try:
        greeting = connection.line(_GREETING_SECONDS)
    except TimeoutError:
        connection.close()
        return None
    except OSError:
        connection.close()
        raise
    if greeting != _GREETING.strip():
        connection.close()
        raise _stranger(where)
    return connection


def _stranger(where: str) -> UsageError:
    return UsageError(
        _("Somebody else answers at {where}, and not brim.").format(where=where),
        hint=_("Give the address of the first machine, and a port that is free there: --rendezvous HOST:29500."),
    )


class _Connection:
    """What the first machine says, line by line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._held = connection, b""

    def close(self) -> None:
        """Nothing more is to be heard."""
        self._connection.close()

    def line(self, seconds: float) -> bytes:
        """The next line; TimeoutError where nothing came for so long, ConnectionError where nothing will."""
        self._connection.settimeout(seconds)
        while b"\n" not in self._held:
            more = self._connection.recv(4096)
            if not more:
                raise ConnectionResetError
            if len(self._held) > _LONGEST_WORD:
                break
            self._held += more
        line, _end, self._held = self._held.partition(b"\n")
        return line


def _understood(line: bytes, where: str) -> bool:
    try:
        said = json.loads(line)
        word = said["word"]
    except (ValueError, TypeError, KeyError) as error:
        raise _stranger(where) from error
    if word == "failed":
        raise error_of(Ended(error=str(said.get("error")), message=str(said.get("message")), hint=said.get("hint")))
    return bool(word != "finished")
