"""Where the other machines of a run wait while the first one prepares it: at the address where their launchers will meet.

Preparing may take hours (a large file to tokenise), and may fail. A launcher that waits there by itself cannot tell the one from the other,
so brim asks first. The first machine answers at once, gives a sign of life every few seconds, and says in the end how it went: the others
begin together, or all end with the same reason.

    first -> other   brim: wait 2 NONCE
    other -> first   NONCE PROOF          that it knows the secret of the run
    first -> other   PROOF                that it knows it too; or "denied"
    first -> other   .                    every few seconds
    first -> other   {"word": ...} PROOF  the end

A proof is an HMAC of both nonces under the secret, so the secret itself is never sent. On the loopback address none is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from brim.errors import BrimError, ChildError, UsageError
from brim.locale import _
from brim.trainer.ranks import SECRET_VARIABLE
from brim.trainer.rendezvous import address_of, how_to_set, listener_for_others
from brim.trainer.worker import Ended, error_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from brim.trainer.group import Group

Word = Literal["ready", "finished", "failed"]
"""What the first machine says in the end."""
_GREETING: Final = b"brim: wait 2 "
_GREETING_OF_ALL_VERSIONS: Final = b"brim: wait"
_DENIED: Final = b"denied"
_SIGN: Final = b".\n"
_SIGN_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.2
_SILENT_SECONDS: Final = 60.0
"""As among ranks (`watching.py`)."""
_GREETING_SECONDS: Final = 10.0
"""Who answers, and says nothing for so long, is the launcher: preparing was over before we came."""
_PROOF_SECONDS: Final = 30.0
"""For another machine to prove itself."""
_MOST_UNPROVEN: Final = 64
"""Connections at a time without a proof; the oldest gives way."""
_CONTACT_SECONDS: Final = 1800.0
"""For the first machine to appear at all."""
_KNOCK_SECONDS: Final = 1.0
_LINGER_SECONDS: Final = 3.0
"""Who was started together with a first machine that failed at once hears of it, and does not wait for one that will not come."""
_REMIND_SECONDS: Final = 60.0
_LONGEST_WORD: Final = 1 << 16


class _Handshake:
    """What both sides know after the greeting: the secret and two nonces."""

    def __init__(self, secret: bytes, first: str, other: str) -> None:
        self._secret, self._nonces = secret, f"{first} {other}"

    def proof(self, of: str, said: bytes = b"") -> bytes:
        """By whom: `first`, `other`; or of what was said in the end: `word`."""
        return hmac.new(self._secret, f"{of} {self._nonces} ".encode() + said, hashlib.sha256).hexdigest().encode()

    def proves(self, of: str, proof: bytes, said: bytes = b"") -> bool:
        return hmac.compare_digest(self.proof(of, said), proof)


class _Guest:
    """A connection to the first machine."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address = connection, address
        self.nonce, self.came_at, self.held = secrets.token_hex(32), time.monotonic(), b""
        self.handshake: _Handshake | None = None

    def says(self, words: bytes) -> bool:
        """Whether they could be sent."""
        try:
            self.connection.sendall(words)
        except OSError:
            self.connection.close()
            return False
        return True

    def answer(self) -> bytes | None:
        """Its line, once it is whole. ConnectionError where none will come."""
        more = self.connection.recv(512)
        self.held += more
        if not more or len(self.held) > 512:
            raise ConnectionResetError
        line, end, _rest = self.held.partition(b"\n")
        return line if end else None


class Door:
    """The first machine's side. Left without `open`, it tells why: an error, or that there was nothing to do."""

    def __init__(self, group: Group, say: Callable[[str], None] = lambda _sentence: None) -> None:
        self._others, self._secret, self._say = group.nodes - 1, group.secret, say
        self._waiting: list[_Guest] = []
        self._unproven: list[_Guest] = []
        self._refused: set[str] = set()
        self._is_over = threading.Event()
        host, port = address_of(group)
        self._listener = listener_for_others(host, port)
        self._listener.setblocking(False)
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
        self._thread.join()
        # Closed before the others are told: they come back to this port, for the launcher.
        self._listener.close()
        for guest in self._unproven:
            guest.connection.close()
        said: dict[str, Any] = {"word": word}
        if error is not None:
            interrupted = ChildError(_("The first machine was interrupted while it prepared the run."))
            ended = Ended.by(error if isinstance(error, Exception) else interrupted)
            said |= {"error": ended.error, "message": ended.message, "hint": ended.hint}
        line = json.dumps(said).encode()
        for guest in self._waiting:
            assert guest.handshake is not None
            guest.says(line + b"\t" + guest.handshake.proof("word", line) + b"\n")
            guest.connection.close()
        self._waiting.clear()

    def _answer(self) -> None:
        signed_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_over.is_set():
                for key, _events in selector.select(_LOOK_SECONDS):
                    with contextlib.suppress(OSError):
                        if key.data is None:
                            self._greet(selector)
                        else:
                            self._judge(selector, key.data)
                late = [guest for guest in self._unproven if time.monotonic() - guest.came_at > _PROOF_SECONDS]
                for guest in [*late, *self._unproven[: max(0, len(self._unproven) - _MOST_UNPROVEN)]]:
                    self._drop(selector, guest)
                if time.monotonic() - signed_at >= _SIGN_SECONDS:
                    signed_at = time.monotonic()
                    # One that left is found out when it is spoken to.
                    self._waiting[:] = [guest for guest in self._waiting if guest.says(_SIGN)]

    def _greet(self, selector: selectors.BaseSelector) -> None:
        connection, address = self._listener.accept()
        connection.setblocking(False)
        guest = _Guest(connection, str(address[0]))
        if guest.says(_GREETING + guest.nonce.encode() + b"\n"):
            self._unproven.append(guest)
            selector.register(connection, selectors.EVENT_READ, guest)

    def _judge(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        """What a machine that was greeted answers."""
        try:
            line = guest.answer()
        except BlockingIOError:
            return
        except OSError:
            self._drop(selector, guest)
            return
        if line is None:
            return
        nonce, _space, proof = line.partition(b" ")
        handshake = _Handshake(self._secret, guest.nonce, nonce.decode("ascii", "replace"))
        if not handshake.proves("other", proof):
            guest.says(_DENIED + b"\n")
            self._drop(selector, guest)
            self._tell_of_refusal(guest.address)
            return
        selector.unregister(guest.connection)
        self._unproven.remove(guest)
        guest.connection.settimeout(_SIGN_SECONDS)
        guest.handshake = handshake
        if guest.says(handshake.proof("first") + b"\n"):
            self._waiting.append(guest)

    def _drop(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        if guest in self._unproven:
            self._unproven.remove(guest)
            selector.unregister(guest.connection)
            guest.connection.close()

    def _tell_of_refusal(self, address: str) -> None:
        """Once of each address, and not of arbitrarily many."""
        if address not in self._refused and len(self._refused) < _MOST_UNPROVEN:
            self._refused.add(address)
            text = _("{address} was refused: it does not have the secret of this run ({variable}).")
            self._say(text.format(address=address, variable=SECRET_VARIABLE))


def door_of(
    group: Group | None, say: Callable[[str], None] = lambda _sentence: None
) -> contextlib.AbstractContextManager[Door | None]:
    """Of the first of several machines; nothing where there is one."""
    return contextlib.nullcontext() if group is None or group.nodes == 1 else Door(group, say)


def knock(group: Group, say: Callable[[str], None]) -> bool:
    """Wait until the first machine has prepared the run. Whether there is something to train; its error, where it failed."""
    address = address_of(group)
    host, where = address[0], f"{address[0]}:{address[1]}"
    say(_("Waiting for the first machine at {where}.").format(where=where))
    connection = _greeted(address, group.secret, say)
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
                return _understood(line, where, connection.handshake)
            if time.monotonic() - reminded_at > _REMIND_SECONDS:
                reminded_at = time.monotonic()
                say(_("The first machine is still preparing."))


def _greeted(address: tuple[str, int], secret: bytes, say: Callable[[str], None]) -> _Connection | None:
    """The first machine, which prepares; None where its launcher is there already."""
    where = f"{address[0]}:{address[1]}"
    began = time.monotonic()
    remind_at = began + _REMIND_SECONDS
    while True:
        try:
            return _knocked(address, where, secret)
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


def _knocked(address: tuple[str, int], where: str, secret: bytes) -> _Connection | None:
    """Once. OSError where nobody is there."""
    connection = _Connection(socket.create_connection(address, timeout=_SIGN_SECONDS))
    try:
        try:
            greeting = connection.line(_GREETING_SECONDS)
        except TimeoutError:
            connection.close()
            return None
        connection.handshake = _proven(connection, greeting, where, secret)
    except (OSError, BrimError):
        connection.close()
        raise
    return connection


def _proven(connection: _Connection, greeting: bytes, where: str, secret: bytes) -> _Handshake:
    """Both sides know the secret."""
    if not greeting.startswith(_GREETING):
        if greeting.startswith(_GREETING_OF_ALL_VERSIONS):
            raise UsageError(_("The first machine, at {where}, has another version of brim.").format(where=where))
        raise _stranger(where)
    nonce = secrets.token_hex(32)
    handshake = _Handshake(secret, greeting.removeprefix(_GREETING).decode("ascii", "replace"), nonce)
    connection.send(nonce.encode() + b" " + handshake.proof("other") + b"\n")
    reply = connection.line(_PROOF_SECONDS)
    if reply == _DENIED:
        raise UsageError(
            _("The first machine, at {where}, has another secret than this one.").format(where=where), hint=how_to_set()
        )
    if not handshake.proves("first", reply):
        raise _stranger(where)
    return handshake


def _stranger(where: str) -> UsageError:
    return UsageError(
        _("Somebody else answers at {where}, and not brim.").format(where=where),
        hint=_("Give the address of the first machine, and a port that is free there: --rendezvous HOST:29500."),
    )


class _Connection:
    """What the first machine says, line by line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._held = connection, b""
        self.handshake: _Handshake

    def send(self, words: bytes) -> None:
        self._connection.sendall(words)

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


def _understood(line: bytes, where: str, handshake: _Handshake) -> bool:
    words, _tab, proof = line.partition(b"\t")
    if not handshake.proves("word", proof, words):
        raise _stranger(where)
    try:
        said = json.loads(words)
        word = said["word"]
    except (ValueError, TypeError, KeyError) as error:
        raise _stranger(where) from error
    if word == "failed":
        raise error_of(Ended(error=str(said.get("error")), message=str(said.get("message")), hint=said.get("hint")))
    return bool(word != "finished")
