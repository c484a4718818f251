"""Ranks that never met are started again, twice at most; whatever else goes wrong is a failure, and says what was said."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import torchrun

REFUSED = "The server socket has failed to listen on any local network address. port: 1, code: -98, name: EADDRINUSE"


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Another program in torchrun's place."""
    monkeypatch.setattr(torchrun, "command", lambda *arguments, **_ranks: [sys.executable, "-c", program, *arguments])


def counted(file: Path, then: str) -> str:
    """A program that counts its starts in a file."""
    return f"import sys\nfrom pathlib import Path\nfile = Path({str(file)!r})\nfile.open('a').write('x')\nstarts = len(file.read_text())\n{then}"


@pytest.mark.parametrize(
    ("said", "never_met"),
    [
        (REFUSED, True),
        ("RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error", True),
        (
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
            True,
        ),
        ("torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.", True),
        (f"[W1116 09:00:00.000 socket.cpp:767] [c10d] {REFUSED}", False),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242", False),
        ("AssertionError", False),
    ],
)
def test_a_connection_that_was_never_made_is_told_from_one_that_ended(said: str, never_met: bool) -> None:
    assert torchrun.Ended(1, "", f"before\n{said}\nafter").never_met() is never_met
    assert torchrun.Ended(1, said, "").never_met() is never_met
    assert not torchrun.Ended(0, "", said).never_met()


def test_ranks_that_never_met_are_started_again_with_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, counted(tmp_path / "starts", f"sys.exit({REFUSED!r} if starts < 3 else 0)"))
    with pytest.warns(UserWarning, match="never met; they are started again") as told:
        torchrun.on_two_ranks("some.program", seconds=60)
    assert len(told) == 2
    assert all("EADDRINUSE" in str(each.message) for each in told)


def test_they_are_not_started_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, counted(tmp_path / "starts", f"sys.exit({REFUSED!r})"))
    with pytest.warns(UserWarning, match="never met"), pytest.raises(AssertionError, match="EADDRINUSE"):
        torchrun.on_two_ranks("some.program", seconds=60)
    assert (tmp_path / "starts").read_text() == "xxx"


def test_a_failure_is_not_tried_again_and_shows_what_was_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, counted(tmp_path / "starts", "print('to the one')\nsys.exit('to the other')"))
    with pytest.raises(AssertionError, match=r"(?s)ended with 1.*stdout\nto the one.*stderr\nto the other"):
        torchrun.on_two_ranks("some.program", seconds=60)
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.long
def test_what_does_not_end_is_asked_to_and_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit('asked to end'))
print('waiting', flush=True)
time.sleep(600)
"""
    stand_in(monkeypatch, program)
    with pytest.raises(AssertionError, match=r"(?s)did not end in time.*waiting.*asked to end"):
        torchrun.launch("some.program", seconds=10)


def test_nothing_of_another_launch_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_PORT", "RANK", "PET_NNODES", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "7")
    given = torchrun.environment()
    assert not {"MASTER_PORT", "RANK", "PET_NNODES", "TORCHELASTIC_RUN_ID"} & given.keys()
    assert given["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert given["PATH"] == os.environ["PATH"]
