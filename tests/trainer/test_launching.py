"""Signals that come while the process that trains is being started: it gets them, and ends without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brim.trainer import group, launching

SLEEP = f"{launching._QUIET_END}print('begun', flush=True)\nimport time\ntime.sleep(600)"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def started() -> subprocess.Popen[bytes]:
    with launching._held_back():
        return subprocess.Popen(
            [sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # A job in the background has it ignored from its shell, and hands that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.01, 0.02, 0.04])
def test_an_interruption_at_any_moment_of_the_start_ends_it_without_a_word(seconds: float) -> None:
    process = started()
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-signal.SIGINT, b"")


def test_interruptions_are_held_back_no_longer_than_that() -> None:
    started().kill()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_that_cannot_be_started_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_words: object, **_settings: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="no more processes"):
        launching.launch(tmp_path)
    assert descriptors() == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_what_came_before_the_process_was_there_is_handed_on_when_it_is() -> None:
    relay = launching._Relay()
    relay.hand_on(signal.SIGTERM, None)
    process = started()
    relay.begin(process)
    process.communicate(timeout=60)
    assert (process.returncode, relay.handed) == (-signal.SIGTERM, {signal.SIGTERM})


def test_so_is_what_came_before_there_was_a_launcher(tmp_path: Path) -> None:
    ears = group._Ears(tmp_path)
    ears.hear(signal.SIGINT, None)
    process = started()
    ears.begin(process)
    process.communicate(timeout=60)
    assert (process.returncode, ears.heard) == (-signal.SIGTERM, [signal.SIGINT])
