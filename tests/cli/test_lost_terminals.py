"""A run outlives what it is printed on: closed pipes, full disks, closed descriptors and closed terminals."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brim.workload.embedded import write_model

BRIM = f"{shlex.quote(sys.executable)} -m brim"


def bash(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in bash; the exit code of the first command of a pipe is printed last."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=folder, timeout=110)


@pytest.fixture
def train(tmp_path: Path) -> str:
    """The shortest run there is."""
    model = write_model(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(8)))
    words = ["train", str(model), "--data", str(data), "--effective-batch", "2", "--max-steps", "2"]
    words += ["--device", "cpu", "--workers", "0", "--no-probe", "--no-verify", "--precision", "fp32"]
    return f"{BRIM} {shlex.join(words)} -o run"


def is_finished(folder: Path) -> bool:
    [summary] = [
        entry
        for line in (folder / "run" / "ledger.jsonl").read_text().splitlines()
        if (entry := json.loads(line)).get("kind") == "summary"
    ]
    return bool(summary["finished"]) and (folder / "run" / "config.json").is_file()


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        "2>&1 | head -1",
        ">/dev/full",
        "<&- >&- 2>&-",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("2>&1 | true", ">/dev/full 2>&1", "2>/dev/full", ">&- 2>&-")),
    ],
)
def test_a_run_whose_output_goes_nowhere_is_a_finished_run(train: str, where: str, tmp_path: Path) -> None:
    ended = bash(f"{train} {where}; echo ${{PIPESTATUS[0]}} > code", tmp_path)
    assert (tmp_path / "code").read_text() == "0\n", ended
    assert is_finished(tmp_path)
    assert "Traceback" not in ended.stdout + ended.stderr
    if where == ">/dev/full":
        assert "The result could not be printed: No space left on device" in ended.stderr


@pytest.mark.long
def test_several_processes_outlive_their_screen(train: str, tmp_path: Path) -> None:
    bash(f"{train} --gpus 2 2>&1 | head -1; echo ${{PIPESTATUS[0]}} > code", tmp_path)
    assert (tmp_path / "code").read_text() == "0\n"
    assert is_finished(tmp_path)


@pytest.mark.long
def test_a_run_outlives_its_terminal(train: str, tmp_path: Path) -> None:
    """As in a window that is closed: the terminal goes, and the kernel sends SIGHUP to the foreground."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        words = shlex.split(train)
        os.execv(words[0], words)
    os.read(terminal, 1)
    os.close(terminal)
    _pid, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert is_finished(tmp_path)


def test_an_estimate_that_cannot_be_printed_has_failed_and_a_reader_that_leaves_is_no_failure(tmp_path: Path) -> None:
    script = (
        f"{BRIM} gpus > /dev/full 2> errors; echo $?; {BRIM} gpus t4 --json > /dev/full 2>&1; echo $?; {BRIM} gpus 2>> errors | true; "
        f"echo ${{PIPESTATUS[0]}}; {BRIM} gpus >&- 2>&-; echo $?; {BRIM} gpus nonsense 2>/dev/full; echo $?; cat errors"
    )
    *codes, error = bash(script, tmp_path).stdout.splitlines()
    assert codes == ["1", "1", "0", "0", "2"]
    assert error == "brim: The output could not be written: No space left on device."


def test_a_report_that_is_written_is_written(tmp_path: Path) -> None:
    bash(f"{BRIM} plan gpt2 --gpu t4 --effective-batch 8 -o planned", tmp_path)
    ended = bash(f"{BRIM} report planned/plan.json -o page.html > /dev/full; echo $?", tmp_path)
    assert ended.stdout == "0\n"
    assert (tmp_path / "page.html").is_file()


def test_a_stream_that_breaks_is_silent_from_then_on() -> None:
    program = (
        "import os, sys; from brim.machine.screen import outlive_the_terminal, say\n"
        "reader, writer = os.pipe(); os.dup2(writer, 2); os.close(reader)\n"
        "outlive_the_terminal()\n"
        "for _ in range(3): say('lost'); print('lost', file=sys.stderr, flush=True)\n"
        "import subprocess; print(subprocess.run(['sh', '-c', 'echo lost >&2']).returncode)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "0\n"


def test_hangups_are_ignored_only_while_it_trains() -> None:
    from brim.errors import UsageError
    from brim.trainer.train import train

    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(UsageError):
        train("gpt2")
    assert signal.getsignal(signal.SIGHUP) is before
