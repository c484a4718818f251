"""`brim watch` on ledgers that grow, end, tear, resume and vanish; on a real pseudo-terminal and in a pipe."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from brim.cli import _watch_follow, _watch_state
from brim.cli._watch_follow import Follower
from brim.cli._watch_state import Watched, curve
from brim.cli.watch import watch
from brim.errors import UsageError
from brim.pictures.live_state import State
from brim.records import Evaluation, Split
from brim.step.ledger import LedgerWriter, read_ledger
from tests.conftest import Cli
from tests.step.ledgers import HEADER, step_of, written

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals and locks are POSIX's")
SPLIT = Split(rank=0, phase="backward", sequences=4, into=2, length=20)
_DEADLINE_SECONDS = 60.0


def _header(step: int) -> Any:
    return dataclasses.replace(HEADER, resumed_from_step=step, configuration={"max_steps": 30})


def _killed(path: Path, parts: list[tuple[int, int]]) -> Path:
    """Runs that began after a step and were killed after another: no closing line."""
    for begin, end in parts:
        writer = LedgerWriter(path, _header(begin))
        for number in range(begin + 1, end + 1):
            writer.write(step_of(number, splits=(SPLIT,) if number % 5 == 0 else ()))
        writer._stream.close()
    return path


def _old(path: Path) -> None:
    """As if nothing had been written for an hour."""
    os.utime(path, (time.time() - 3600, time.time() - 3600))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_followed_is_what_the_ledger_holds(data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch_follow, "_BLOCK_BYTES", data.draw(st.integers(50, 3000)))
    monkeypatch.setattr(_watch_follow, "_TAIL_BYTES", data.draw(st.integers(100, 6000)))
    monkeypatch.setattr(_watch_follow, "_WHOLE_BYTES", data.draw(st.sampled_from([0, 6000, 1 << 20])))
    source, path = tmp_path / "source.jsonl", tmp_path / "ledger.jsonl"
    for each in (source, path):
        each.unlink(missing_ok=True)
    parts, end = [], 0
    for _part in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, end))
        end = data.draw(st.integers(begin, begin + 8))
        parts.append((begin, end))
    content = _killed(source, parts).read_bytes()
    follower = Follower(path)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=4)))
    for cut in (*cuts, len(content)):
        path.write_bytes(content[:cut])
        assert follower.look()
        assert not follower.unreadable
    newest = list(read_ledger(path).steps)
    while follower.waiting_bytes:
        follower.look()
    assert list(follower.columns.step) == [entry.step for entry in newest]
    assert follower.columns.sums["kept"] == follower.columns.sums["promised"] == len(newest)
    assert follower.columns.sums["splits"] == sum(len(entry.splits) for entry in newest)
    assert follower.columns.sums["tokens"] == sum(entry.tokens or 0 for entry in newest)
    assert [header.resumed_from_step for header in follower.headers] == [begin for begin, _end in parts]
    if parts[-1][0] < parts[-1][1]:
        assert follower.last() == newest[-1]


def test_a_long_ledger_opens_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch_follow, "_WHOLE_BYTES", 20_000)
    monkeypatch.setattr(_watch_follow, "_TAIL_BYTES", 10_000)
    monkeypatch.setattr(_watch_follow, "_BLOCK_BYTES", 4_000)
    watched = Watched(_killed(tmp_path / "ledger.jsonl", [(0, 200)]))
    state = watched.look()
    assert state.step == 200
    assert state.effective_batch == HEADER.effective_batch
    assert 0 < state.promise.steps < 50
    assert state.read_share < 0.5
    while watched.waiting_bytes:
        before, state = state, watched.look()
        assert state.promise.steps >= before.promise.steps
    assert (state.promise.steps, state.promise.kept, state.read_share) == (200, 200, 1.0)
    assert len(state.curve) == 200


def test_a_torn_end_that_a_resume_cuts_off_costs_nothing(tmp_path: Path) -> None:
    path = _killed(tmp_path / "ledger.jsonl", [(0, 4)])
    whole = path.read_bytes()
    follower = Follower(path)
    path.write_bytes(whole[:-30])
    follower.look()
    assert list(follower.columns.step) == [1, 2, 3]
    _killed(path, [(2, 6)])
    follower.look()
    assert list(follower.columns.step) == [1, 2, 3, 4, 5, 6]
    assert (len(follower.headers), follower.unreadable) == (2, 0)


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl", range(1, 4))
    path.write_bytes(path.read_bytes()[:-1])
    watched = Watched(path)
    assert watched.look().status == "finished"
    path.write_bytes(path.read_bytes() + b"\n")
    assert watched.look().status == "finished"


def test_another_file_of_the_same_name_is_read_anew(tmp_path: Path) -> None:
    path = _killed(tmp_path / "ledger.jsonl", [(0, 9)])
    follower = Follower(path)
    follower.look()
    path.unlink()
    assert not follower.look()
    _killed(path, [(0, 2)])
    follower.look()
    assert list(follower.columns.step) == [1, 2]


def test_lines_that_hold_nothing_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = _killed(tmp_path / "ledger.jsonl", [(0, 2)])
    strange = b'[]\n{"a": 1}\n\0\0\0\n{"schema": "brim.ledger/1", "kind": "step", "step": "x"}\n\n'
    path.write_bytes(path.read_bytes() + strange)
    _killed(path, [(2, 3)])
    state = Watched(path).look()
    assert (state.step, state.unreadable_lines) == (3, 4)


def test_a_finished_run_is_one_picture(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "ledger.jsonl", range(1, 7))
    ended = cli("watch", str(tmp_path))
    assert ended.code == 0
    for words in ("effective batch 4", "loss", "kept in 6 of 6 steps", "Finished as planned."):
        assert words in ended.out


def test_a_run_that_failed_is_told_with_its_reason_and_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "ledger.jsonl", HEADER)
    writer.write(step_of(1))
    writer.close(finished=False, reason="ValueError: the power was cut")
    ended = cli("watch", str(tmp_path / "ledger.jsonl"))
    assert ended.code == 1
    assert "Ended early: ValueError: the power was cut" in ended.out


@pytest.mark.skipif(sys.platform != "linux", reason="who holds a lock is asked of Linux")
def test_a_killed_run_is_gone(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _killed(tmp_path / "ledger.jsonl", [(0, 3)])
    _old(path)
    monkeypatch.setattr("brim.cli._watch_life._is_local", lambda device, path: True)
    ended = cli("watch", str(path), "--once")
    assert ended.code == 1
    assert "Ended without a word" in ended.out
    assert json.loads(cli("watch", str(path), "--json").out)["status"] == "gone"
    # A disk that another machine may write to says nothing about its processes.
    monkeypatch.setattr("brim.cli._watch_life._is_local", lambda device, path: False)
    ended = cli("watch", str(path), "--once")
    assert ended.code == 0
    assert "Whether its process is alive cannot be told from here." in ended.out


def test_the_state_is_one_document_that_reads_back(cli: Cli, tmp_path: Path) -> None:
    path = _killed(tmp_path / "ledger.jsonl", [(0, 12), (9, 15)])
    evaluations = [
        Evaluation(step=5, loss=2.0),
        Evaluation(step=10, loss=float("nan"), metrics={"accuracy": 0.5}),
        Evaluation(step=20),
    ]
    lines = "".join(each.to_json(indent=None) + "\n" for each in evaluations)
    (tmp_path / "evaluations.jsonl").write_text(lines + '{"torn', encoding="utf-8")
    state = State.from_json(cli("watch", str(path), "--json").out)
    assert (state.step, state.total_steps, state.resumed_from_step) == (15, 30, 9)
    assert (state.promise.steps, state.promise.kept, state.promise.splits) == (15, 15, 3)
    assert (state.promise.last_split_step, state.promise.last_split) == (15, SPLIT)
    assert state.evaluation is not None
    assert (state.evaluation.step, state.evaluation.metrics) == (10, {"accuracy": 0.5})
    assert state.now.step_seconds == pytest.approx(0.11)
    assert state.mean.wait_share == pytest.approx(0.01 / 0.11)


def test_what_cannot_be_watched_is_told_with_what_to_type(cli: Cli, tmp_path: Path) -> None:
    ended = cli("watch", str(tmp_path / "nothing"))
    assert ended.code == 2
    assert "--wait" in ended.err
    (tmp_path / "notes.jsonl").write_text("hello\n", encoding="utf-8")
    ended = cli("watch", str(tmp_path / "notes.jsonl"))
    assert ended.code == 2
    assert "is not a ledger" in ended.err
    (tmp_path / "run").mkdir()
    written(tmp_path / "run" / "ledger.jsonl", range(1, 2))
    ended = cli("watch", str(tmp_path))
    assert ended.code == 2
    assert f"brim watch {tmp_path / 'run'}" in ended.err
    with pytest.raises(UsageError, match="more than zero"):
        watch(tmp_path / "run", interval=0)


def test_the_curve_is_the_mean_of_equal_parts() -> None:
    assert curve([]) == ()
    assert curve([1.0, float("nan"), float("inf"), 4.0], 2) == (1.0, 4.0)
    assert curve([1.0, float("nan")]) == (1.0, None)
    assert len(curve([1.0] * 100_000)) == _watch_state.CURVE_POINTS


def test_watching_starts_without_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "ledger.jsonl", range(1, 3))
    code = (
        "import sys; from brim.cli import main; assert main(['watch', sys.argv[1]]) == 0;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=_DEADLINE_SECONDS, capture_output=True)


class _Growing:
    """A run of another process, as far as the watcher can see: this one holds the ledger's lock."""

    def __init__(self, path: Path) -> None:
        self.path, self.step = path, 0
        self.writer = LedgerWriter(path, _header(0))

    def grow(self, steps: int, **changes: Any) -> None:
        for _step in range(steps):
            self.step += 1
            self.writer.write(step_of(self.step, **changes))


@pytest.mark.skipif(sys.platform != "linux", reason="who holds a lock is asked of Linux")
def test_a_living_process_is_known_by_its_lock(shell: Cli, tmp_path: Path) -> None:
    run = _Growing(tmp_path / "ledger.jsonl")
    run.grow(3)
    state = State.from_json(shell("watch", str(run.path), "--json").out)
    assert state.status in {"running", "stalled"}, "stalled on a machine that took so long to start a process"
    assert (state.is_alive, state.process) == (True, os.getpid())
    _old(run.path)
    ended = shell("watch", str(run.path), "--once")
    assert ended.code == 0
    assert re.search(r"Stalled\? Nothing was written for 1:0\d:\d\d", ended.out)
    assert f"Its process {os.getpid()} is alive" in ended.out.replace("\n", " ")


def test_a_pipe_gets_lines_until_the_run_ends(tmp_path: Path) -> None:
    path = tmp_path / "later" / "ledger.jsonl"
    command = [sys.executable, "-m", "brim", "watch", str(path.parent), "--wait", "--interval", "0.1", "--every-steps", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as watcher:
        assert watcher.stdout is not None
        assert "Waiting for" in watcher.stdout.readline()
        path.parent.mkdir()
        run = _Growing(path)
        run.grow(1)
        seen = watcher.stdout.readline()
        assert seen.startswith(("step 1 of 30", "step 0 of 30"))
        run.grow(9, splits=(SPLIT,))
        (path.parent / "evaluations.jsonl").write_text(
            Evaluation(step=10, loss=2.0).to_json(indent=None) + "\n", encoding="utf-8"
        )
        run.writer.close(finished=True)
        rest = watcher.stdout.read()
        assert watcher.wait(_DEADLINE_SECONDS) == 0
    assert "step 10: memory ran out in backward of 4 x 20, done in 2 parts" in rest
    assert "step 10 of 30 (33.3%)" in rest
    assert rest.rstrip().endswith("Finished as planned.")
    assert "\x1b" not in rest


@dataclasses.dataclass
class _Terminal:
    """A pseudo-terminal with a watcher in it."""

    watcher: subprocess.Popen[bytes]
    screen: int
    inside: int
    seen: bytes = b""

    def until(self, told: Callable[[str], bool], what: str) -> str:
        """Read what is drawn until it says this."""
        end = time.monotonic() + _DEADLINE_SECONDS
        while time.monotonic() < end:
            text = self.text()
            if told(text):
                return text
            if select.select([self.screen], [], [], 0.2)[0]:
                self.seen += os.read(self.screen, 1 << 16)
        raise AssertionError(f"{what} was not seen in {self.text()[-3000:]!r}")

    def shows(self, words: str) -> str:
        return self.until(lambda text: words in text, words)

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.decode("utf-8", "replace"))

    def frames(self) -> list[list[str]]:
        """The whole pictures that were drawn, each from the upper left corner."""
        parts = self.seen.decode("utf-8", "replace").split("\x1b[H")[1:-1]
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part).replace("\r", "").split("\n") for part in parts]

    def resize(self, columns: int, rows: int) -> None:
        self.seen = b""
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.screen, keys)

    def stopped(self) -> None:
        """Wait until the watcher stands still: a SIGCONT that comes before its own SIGSTOP would be lost."""
        end = time.monotonic() + _DEADLINE_SECONDS
        while os.waitid(os.P_PID, self.watcher.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is None:
            assert time.monotonic() < end, "the view was not suspended"
            time.sleep(0.02)

    def ended(self) -> int:
        end = time.monotonic() + _DEADLINE_SECONDS
        while self.watcher.poll() is None and time.monotonic() < end:
            if select.select([self.screen], [], [], 0.1)[0]:
                self.seen += os.read(self.screen, 1 << 16)
        while select.select([self.screen], [], [], 0)[0]:
            self.seen += os.read(self.screen, 1 << 16)
        return self.watcher.wait(1)

    def is_restored(self, before: list[Any]) -> bool:
        """Cursor shown again, the screen of before, keys as they were."""
        cursor = re.findall(rb"\x1b\[\?25([hl])", self.seen)
        screen = re.findall(rb"\x1b\[\?1049([hl])", self.seen)
        return cursor[-1:] == [b"h"] and screen[-1:] == [b"l"] and termios.tcgetattr(self.inside) == before


def _fits(frame: list[str], columns: int, rows: int) -> bool:
    return len(frame) <= rows and all(len(line) <= columns for line in frame) and any("7/30" in line for line in frame)


@contextmanager
def _terminal(*arguments: str, columns: int = 80, rows: int = 24, term: str = "xterm") -> Iterator[_Terminal]:
    screen, inside = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
            signal.signal(number, signal.SIG_DFL)

    environment = {**os.environ, "TERM": term, "PYTHONUTF8": "1"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        environment.pop(name, None)
    watcher = subprocess.Popen(
        [sys.executable, "-m", "brim", "watch", *arguments],
        stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True, preexec_fn=own_terminal,
    )  # fmt: skip
    try:
        yield _Terminal(watcher, screen, inside)
    finally:
        watcher.kill()
        watcher.wait()
        os.close(screen)
        os.close(inside)


def test_a_terminal_shows_the_run_as_it_grows_and_q_leaves(tmp_path: Path) -> None:
    run = _Growing(tmp_path / "ledger.jsonl")
    run.grow(3)
    with _terminal(str(tmp_path), "--interval", "0.1") as terminal:
        before = termios.tcgetattr(terminal.inside)
        terminal.shows("3/30")
        assert b"\x1b[?25l" in terminal.seen
        run.grow(4)
        terminal.shows("7/30")
        terminal.resize(40, 10)
        terminal.until(lambda _text: any(_fits(frame, 40, 10) for frame in terminal.frames()), "a view of the new size")
        terminal.seen = b""
        terminal.type(b"q")
        assert terminal.ended() == 0
        assert terminal.is_restored(before)
        assert "step 7 of 30" in terminal.text().replace("\r\n", " ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_the_terminal_is_given_back_whatever_ends_the_view(number: signal.Signals, tmp_path: Path) -> None:
    run = _Growing(tmp_path / "ledger.jsonl")
    run.grow(3)
    with _terminal(str(tmp_path)) as terminal:
        before = termios.tcgetattr(terminal.inside)
        terminal.shows("3/30")
        terminal.type(b"\x03") if number == signal.SIGINT else terminal.watcher.send_signal(number)
        assert terminal.ended() == (0 if number == signal.SIGINT else 128 + number)
        assert terminal.is_restored(before)


def test_a_view_that_is_suspended_gives_the_terminal_back_and_comes_again(tmp_path: Path) -> None:
    run = _Growing(tmp_path / "ledger.jsonl")
    run.grow(3)
    with _terminal(str(tmp_path), "--interval", "0.1") as terminal:
        before = termios.tcgetattr(terminal.inside)
        terminal.shows("3/30")
        terminal.type(b"\x1a")
        terminal.until(lambda text: terminal.is_restored(before), "the terminal of before")
        terminal.stopped()
        terminal.seen = b""
        terminal.watcher.send_signal(signal.SIGCONT)
        run.grow(1)
        terminal.shows("4/30")
        terminal.type(b"q")
        assert terminal.ended() == 0
        assert terminal.is_restored(before)


def test_the_view_ends_with_the_run_and_leaves_its_last_picture(tmp_path: Path) -> None:
    run = _Growing(tmp_path / "ledger.jsonl")
    with _terminal(str(tmp_path), "--interval", "0.1", columns=60) as terminal:
        before = termios.tcgetattr(terminal.inside)
        terminal.shows("no step is done yet")
        run.grow(5)
        run.writer.close(finished=False, reason="stopped")
        assert terminal.ended() == 1
        assert terminal.is_restored(before)
        picture = terminal.text().rpartition("effective batch")[2]
        assert "5/30" in picture
        assert "Ended early: stopped" in picture


def test_a_terminal_that_cannot_draw_gets_plain_lines(tmp_path: Path) -> None:
    run = _Growing(tmp_path / "ledger.jsonl")
    run.grow(2)
    with _terminal(str(tmp_path), "--interval", "0.1", term="dumb") as terminal:
        terminal.shows("step 2 of 30")
        run.writer.close(finished=True)
        assert terminal.ended() == 0
        assert b"\x1b" not in terminal.seen
