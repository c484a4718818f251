"""Machines that wait for the first one hear that it lives, that it is ready, or why it is not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from brim.errors import ChildError, UsageError
from brim.trainer import doorway
from brim.trainer.doorway import Door, door_of, knock
from brim.trainer.group import Group, _environment
from brim.trainer.ranks import SECRET_VARIABLE
from brim.trainer.rendezvous import address_of, secret_for


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


def greeted(listener: socket.socket) -> socket.socket:
    """The first machine's side of one connection, up to its proof."""
    connection, _address = listener.accept()
    connection.sendall(b"brim: wait 2 ab\n")
    nonce = connection.recv(512).split(b" ")[0].decode()
    connection.sendall(doorway._Handshake(b"", "ab", nonce).proof("first") + b"\n")
    return connection


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
        socket.create_server(("127.0.0.1", address_of(second)[1])).close()


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
    with socket.create_server(("127.0.0.1", address_of(second)[1])) as listener:
        waiting = in_background(lambda: knock(second, lambda _sentence: None))
        connection = greeted(listener)
        connection.close()
        with pytest.raises(ChildError, match="ended while it prepared"):
            waiting.result(60)


def test_a_launcher_that_is_there_already_is_joined(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway, "_GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", address_of(second)[1])):
        assert knock(second, lambda _sentence: None) is True


def test_one_who_hangs_up_is_not_taken_for_a_launcher(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forwarded port accepts, and closes at once where nobody listens behind it."""
    monkeypatch.setattr(doorway, "_KNOCK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", address_of(second)[1])) as listener:
        waiting = in_background(lambda: knock(second, lambda _sentence: None))
        for _knock in range(3):
            listener.accept()[0].close()
        connection = greeted(listener)
        connection.close()
        with pytest.raises(ChildError, match="ended while it prepared"):
            waiting.result(60)


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.2\r\n", b"brim: wait 2 ab\nSSH\n", b"brim: wait 2 ab\n[]\n"])
def test_somebody_else_at_the_port_is_told(second: Group, words: bytes) -> None:
    with socket.create_server(("127.0.0.1", address_of(second)[1])) as listener:
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
    port = address_of(second)[1]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match=f"cannot meet at port {port}"):
        Door(second)


SECRET = b"a secret of the machines"


def ports_of(process: psutil.Process) -> set[str]:
    """Where it listens."""
    return {str(each.laddr.ip) for each in process.net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_it_listens_at_the_given_address_and_at_no_other(second: Group, host: str) -> None:
    before = ports_of(psutil.Process())
    group = replace(second, rendezvous=f"{host}:{address_of(second)[1]}")
    waiting = in_background(lambda: knock(group, lambda _sentence: None))
    with door_of(group) as door:
        assert door is not None
        until_somebody_waits(door)
        assert ports_of(psutil.Process()) - before <= {"127.0.0.1" if host == "localhost" else host, "::1"}
        door.open()
    assert waiting.result(60) is True


def test_another_secret_is_refused_on_both_sides_and_the_right_one_still_comes_in(second: Group) -> None:
    said: list[str] = []
    first = replace(second, secret=SECRET)
    with door_of(first, said.append) as door:
        assert door is not None
        for wrong in (b"", b"another secret of the machines"):
            with pytest.raises(UsageError, match="has another secret") as error:
                knock(replace(second, secret=wrong), lambda _sentence: None)
            assert "BRIM_RENDEZVOUS_SECRET" in str(error.value.hint)
        waiting = in_background(lambda: knock(first, lambda _sentence: None))
        until_somebody_waits(door)
        door.open()
    assert waiting.result(60) is True
    assert said == ["127.0.0.1 was refused: it does not have the secret of this run (BRIM_RENDEZVOUS_SECRET)."]


def test_garbage_and_silence_keep_nobody_out(second: Group) -> None:
    address = address_of(second)
    first = replace(second, secret=SECRET)
    with door_of(first) as door, contextlib.ExitStack() as stack:
        assert door is not None
        for said in [b"", b"\x00" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"\n", b"\xff \xff\n", b"a" * 600, *[b""] * 80]:
            connection = stack.enter_context(socket.create_connection(address))
            with contextlib.suppress(OSError):
                connection.sendall(said)
        waiting = in_background(lambda: knock(first, lambda _sentence: None))
        until_somebody_waits(door)
        assert len(door._waiting) == 1
        assert len(door._unproven) <= doorway._MOST_UNPROVEN
        door.open()
    assert waiting.result(60) is True


def test_a_first_machine_without_the_secret_is_not_believed(second: Group) -> None:
    """Neither at once, nor in what it says in the end."""
    ours = replace(second, secret=SECRET)
    for proof in (b"0" * 64, doorway._Handshake(b"", "ab", "cd").proof("first")):
        with socket.create_server(("127.0.0.1", address_of(second)[1])) as listener:
            waiting = in_background(lambda: knock(ours, lambda _sentence: None))
            connection, _address = listener.accept()
            connection.sendall(b"brim: wait 2 ab\n")
            connection.recv(512)
            connection.sendall(proof + b"\n")
            with pytest.raises(UsageError, match="Somebody else answers"):
                waiting.result(60)
            connection.close()


def test_the_secret_itself_is_never_sent_and_no_proof_is_used_twice(second: Group) -> None:
    heard: list[bytes] = []
    with door_of(replace(second, secret=SECRET)):
        for _time in range(2):
            with socket.create_connection(address_of(second)) as connection:
                nonce = connection.recv(512).removeprefix(b"brim: wait 2 ").strip().decode()
                handshake = doorway._Handshake(SECRET, nonce, "cd")
                connection.sendall(b"cd " + handshake.proof("other") + b"\n")
                heard.append(connection.recv(512))
                assert handshake.proves("first", heard[-1].split(b"\n")[0])
    assert heard[0] != heard[1]
    assert not any(SECRET in words for words in heard)


def test_another_version_of_brim_is_told(second: Group) -> None:
    with socket.create_server(("127.0.0.1", address_of(second)[1])) as listener:
        waiting = in_background(lambda: knock(second, lambda _sentence: None))
        connection, _address = listener.accept()
        connection.sendall(b"brim: wait\n")
        with pytest.raises(UsageError, match="another version of brim"):
            waiting.result(60)
        connection.close()


@pytest.mark.parametrize(
    ("host", "says"),
    [("198.51.100.7", "is not an address of this machine"), ("127.1", "other machines cannot reach it")],
)
def test_an_address_at_which_the_others_cannot_come_is_refused(second: Group, host: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Door(replace(second, rendezvous=f"{host}:{address_of(second)[1]}"))


def test_a_secret_comes_from_a_private_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert secret_for("10.0.0.1", file) == secret_for("127.0.0.1", file) == SECRET
    for loopback in ("127.0.0.1", "127.0.0.2", "localhost", "::1"):
        assert secret_for(loopback, None) == b""
    for outside in ("10.0.0.1", "0.0.0.0", "no-such-name.invalid"):
        with pytest.raises(UsageError, match="need a shared secret, and BRIM_RENDEZVOUS_SECRET is not set") as error:
            secret_for(outside, None)
        assert "--rendezvous-secret-file" in str(error.value.hint)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    assert secret_for("10.0.0.1", None) == SECRET
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(UsageError, match="too short"):
        secret_for("10.0.0.1", None)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="Others can read the secret"):
        secret_for("10.0.0.1", file)
    file.chmod(0o600)
    file.write_bytes(b"\n")
    with pytest.raises(UsageError, match="is empty"):
        secret_for("127.0.0.1", file)
    for empty in ("", " "):
        monkeypatch.setenv(SECRET_VARIABLE, empty)
        for host in ("127.0.0.1", "10.0.0.1"):
            with pytest.raises(UsageError, match="The secret in BRIM_RENDEZVOUS_SECRET is empty"):
                secret_for(host, None)
    with pytest.raises(UsageError, match="Cannot read the secret"):
        secret_for("10.0.0.1", tmp_path / "none")


def test_the_secret_is_in_no_command_no_environment_and_no_representation(
    second: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    group = replace(second, secret=SECRET)
    words = [repr(group), *group.command(tmp_path, "worker"), *_environment(group, "outbox").values()]
    assert not any(SECRET.decode() in word for word in words)


def test_the_number_of_threads_that_ranks_get_is_a_whole_number(second: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert int(_environment(second, "outbox")["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize("given", ["first", "first:", ":29500", "first:0", "first:99999", "first:x", "first:\u00b2"])
def test_an_address_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        address_of(Group("torchrun", gpus=1, nodes=2, rendezvous=given))
