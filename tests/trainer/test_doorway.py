"""Machines that wait for the first one hear that it lives, that it is ready, or why it is not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from brim.errors import ChildError, UsageError
from brim.trainer import doorway
from brim.trainer.doorway import Door, door_of, knock
from brim.trainer.group import Group


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def second() -> Group:
    """The second of two machines, both of them here."""
    return Group("torchrun", gpus=1, nodes=2, node_rank=1, rendezvous=f"127.0.0.1:{free_port()}")


def in_background(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until_somebody_waits(door: Any) -> None:
    end = time.monotonic() + 60
    while not door._waiting:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_machine_has_no_door() -> None:
    with door_of(None) as none, door_of(Group("torchrun", gpus=2)) as one:
        assert none is one is None


def test_who_knocks_waits_until_all_is_ready_and_the_port_is_free_then(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "_SIGN_SECONDS", 0.1)
    waiting = in_background(lambda: knock(second, lambda _sentence: None))
    with door_of(second) as door:
        assert door is not None
        until_somebody_waits(door)
        time.sleep(0.5)
        assert not waiting.done()
        door.open()
        assert waiting.result(60) is True
        socket.create_server(("127.0.0.1", doorway.address_of(second)[1])).close()


def test_a_run_that_is_finished_is_told(second: Group) -> None:
    waiting = in_background(lambda: knock(second, lambda _sentence: None))
    with door_of(second) as door:
        until_somebody_waits(door)
    assert waiting.result(60) is False


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (UsageError("a.jsonl, line 3: no.", hint="Mend it."), UsageError, "a.jsonl, line 3: no."),
        (KeyboardInterrupt(), ChildError, "interrupted while it prepared"),
    ],
)
def test_what_went_wrong_is_told_as_it_was(second: Group, error: BaseException, kind: type[Exception], said: str) -> None:
    waiting = in_background(lambda: knock(second, lambda _sentence: None))
    with contextlib.suppress(type(error)), door_of(second) as door:
        until_somebody_waits(door)
        raise error
    with pytest.raises(kind, match=said):
        waiting.result(60)


def test_who_comes_a_moment_after_the_failure_hears_of_it(second: Group) -> None:
    said: Future[Any] = Future()

    def fail() -> None:
        with contextlib.suppress(UsageError), door_of(second):
            said.set_result(True)
            raise UsageError("no")

    failing = in_background(fail)
    assert said.result(20)
    with pytest.raises(UsageError, match="no"):
        knock(second, lambda _sentence: None)
    failing.result(20)


def test_a_first_machine_that_fails_alone_ends_soon(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "_LINGER_SECONDS", 0.2)
    with pytest.raises(UsageError, match="no"), door_of(second):
        raise UsageError("no")


def test_a_first_machine_that_dies_is_told(second: Group) -> None:
    with socket.create_server(("127.0.0.1", doorway.address_of(second)[1])) as listener:
        waiting = in_background(lambda: knock(second, lambda _sentence: None))
        connection, _address = listener.accept()
        connection.sendall(b"brim: wait\n")
        connection.close()
        with pytest.raises(ChildError, match="ended while it prepared"):
            waiting.result(60)


def test_a_launcher_that_is_there_already_is_joined(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "_GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", doorway.address_of(second)[1])):
        assert knock(second, lambda _sentence: None) is True


def test_one_who_hangs_up_is_not_taken_for_a_launcher(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forwarded port accepts, and closes at once where nobody listens behind it."""
    monkeypatch.setattr(doorway, "_KNOCK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", doorway.address_of(second)[1])) as listener:
        waiting = in_background(lambda: knock(second, lambda _sentence: None))
        for _knock in range(3):
            listener.accept()[0].close()
        connection, _address = listener.accept()
        connection.sendall(b'brim: wait\n.\n{"word": "ready"}\n')
        assert waiting.result(60) is True
        connection.close()


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.2\r\n", b"brim: wait\nSSH\n", b"brim: wait\n[]\n"])
def test_somebody_else_at_the_port_is_told(second: Group, words: bytes) -> None:
    with socket.create_server(("127.0.0.1", doorway.address_of(second)[1])) as listener:
        waiting = in_background(lambda: knock(second, lambda _sentence: None))
        connection, _address = listener.accept()
        connection.sendall(words)
        with pytest.raises(UsageError, match="Somebody else answers"):
            waiting.result(60)
        connection.close()


def test_the_others_are_told_that_nothing_is_trained(second: Group) -> None:
    waiting = in_background(lambda: knock(second, lambda _sentence: None))
    with door_of(second) as door:
        assert door is not None
        until_somebody_waits(door)
        door.refuse(UsageError("a dry run"))
    with pytest.raises(UsageError, match="a dry run"):
        waiting.result(60)


def test_a_name_that_cannot_be_one_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="Nobody answers at foo..bar"):
        knock(Group("torchrun", gpus=1, nodes=2, node_rank=1, rendezvous="foo..bar:29500"), lambda _sentence: None)


def test_nobody_there_is_told_and_not_waited_for_for_ever(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_CONTACT_SECONDS", 3.0), ("_REMIND_SECONDS", 0.1), ("_KNOCK_SECONDS", 0.1)):
        monkeypatch.setattr(doorway, name, seconds)
    said: list[str] = []
    with pytest.raises(ChildError, match="Nobody answers at 127.0.0.1"):
        knock(second, said.append)
    assert said[0].startswith("Waiting for the first machine")
    assert any("Nobody answers" in sentence for sentence in said[1:])


def test_a_port_that_is_taken_is_told(second: Group) -> None:
    with socket.create_server(("", port := free_port())), pytest.raises(UsageError, match=f"cannot meet at port {port}"):
        Door(port)


@pytest.mark.parametrize("given", ["first", "first:", ":29500", "first:0", "first:99999", "first:x", "first:\u00b2"])
def test_an_address_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        doorway.address_of(Group("torchrun", gpus=1, nodes=2, rendezvous=given))
