"""`brim train --nodes 2`: the same command given twice, as on two machines that see one folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from brim.records import RunCard
from brim.step.checker import check_ledger
from brim.step.ledger import read_ledger
from brim.trainer.doorway import door_of
from brim.trainer.group import Group
from brim.trainer.ranks import SECRET_VARIABLE
from brim.workload.embedded import data_file, write_model
from tests.trainer.test_doorway import free_port

pytestmark = pytest.mark.timeout(900)
ASKED = (
    "--nodes", "2", "--device", "cpu", "--workers", "0", "--no-probe", "--no-verify", "--precision", "fp32", "--effective-batch", "7",
    "--max-steps", "3", "--seq-len", "128", "--max-bad", "5", "--from-scratch", "--json",
)  # fmt: skip


def machine(number: int, port: int, *words: str, gpus: int = 1) -> subprocess.Popen[str]:
    where = ("--node-rank", str(number), "--rendezvous", f"127.0.0.1:{port}", "--gpus", str(gpus))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "brim", "train", *words, *ASKED, *where],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.mark.long
def test_a_first_machine_that_refuses_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    words = (str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"), "--memory", "4MiB")
    second = machine(1, port, *words)
    assert second.stderr is not None
    # The first begins when the second knocks: else it might have failed before.
    before = ""
    while "Waiting for the first machine" not in before:
        line = second.stderr.readline()
        assert line, before
        before += line
    first = machine(0, port, *words)
    for process in (first, second):
        code, out, err = ended(process)
        assert (code, out) == (1, ""), err[-4000:]
        assert "4.00 MiB" in err
        assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_machines_that_are_started_together_all_refuse_bad_data(tmp_path: Path) -> None:
    model, rows = write_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n' * 3 + "oops\n" * 7, encoding="utf-8")
    words, port = (str(model), "--data", str(rows), "-o", str(tmp_path / "run")), free_port()
    for process in [machine(number, port, *words) for number in (1, 0)]:
        code, out, err = ended(process)
        assert (code, out) == (2, "")
        assert "rows.jsonl, line 4" in err


@pytest.mark.slow
def test_machines_that_are_started_together_hear_of_a_refusal(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    words = (str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"), "--memory", "4MiB")
    for process in [machine(number, port, *words) for number in (0, 1)]:
        code, _out, err = ended(process)
        assert code == 1, err[-4000:]
        assert "4.00 MiB" in err


def listening(processes: list[subprocess.Popen[str]]) -> set[str]:
    """Addresses at which these processes and their children listen, until they have ended."""
    found: set[str] = set()
    while any(process.poll() is None for process in processes):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(process.pid)
                for each in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        found |= {str(one.laddr.ip) for one in each.net_connections() if one.status == psutil.CONN_LISTEN}
        time.sleep(0.05)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "several",
    [
        "two machines",
        pytest.param(("--gpus", "2"), marks=pytest.mark.slow),
        pytest.param(("--gpus", "2", "--launch", "accelerate"), marks=pytest.mark.slow),
    ],
)
def test_nothing_listens_but_at_the_given_address(tmp_path: Path, several: str | tuple[str, ...]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(16)))
    asked = [
        sys.executable, "-m", "brim", "train", str(write_model(tmp_path / "model")), "--data", str(rows), "-o", str(tmp_path / "run"),
        "--effective-batch", "4", "--max-steps", "2", "--device", "cpu", "--workers", "0", "--no-probe", "--no-verify", "--precision", "fp32",
    ]  # fmt: skip
    if isinstance(several, str):
        where = ("--gpus", "1", "--nodes", "2", "--rendezvous", f"127.0.0.2:{free_port()}")
        calls = [[*asked, *where, "--node-rank", str(number)] for number in (1, 0)]
    else:
        calls = [[*asked, *several]]
    environment = {**os.environ, SECRET_VARIABLE: "a secret of the machines"}
    processes = [
        subprocess.Popen(call, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for call in calls
    ]
    found = listening(processes)
    for process in processes:
        assert process.wait() == 0, process.stderr.read() if process.stderr else ""
    assert found
    assert found <= {"127.0.0.1", "127.0.0.2"}
    assert ("127.0.0.2" in found) == isinstance(several, str)


@pytest.mark.long
def test_machines_with_different_secrets_do_not_train_together(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    words = (str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"))
    file = tmp_path / "secret"
    file.write_text("another secret of the machines")
    file.chmod(0o600)
    with door_of(Group("torchrun", gpus=1, nodes=2, rendezvous=f"127.0.0.1:{port}", secret=b"a secret of the machines")):
        code, out, err = ended(machine(1, port, *words, "--rendezvous-secret-file", str(file)))
    assert (code, out) == (2, "")
    assert "has another secret than this one" in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_machines_that_do_not_share_a_loopback_address_need_a_secret(tmp_path: Path) -> None:
    """Before anything is read or bound."""
    words = ["train", "gpt2", "--data", str(data_file()), "-o", str(tmp_path / "run"), "--nodes", "2", "--node-rank", "0"]
    environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", "brim", *words, "--rendezvous", "10.0.0.1:29500", "--max-bad", "9"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "brim: The machines of a run need a shared secret, and BRIM_RENDEZVOUS_SECRET is not set." in done.stderr
    assert "export BRIM_RENDEZVOUS_SECRET=..., or --rendezvous-secret-file FILE" in done.stderr


@pytest.mark.slow
def test_two_machines_take_the_steps_of_one_run(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    words = (str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"))
    both = [machine(number, port, *words) for number in (1, 0)]
    results: list[Any] = []
    for process in both:
        code, out, err = ended(process)
        assert code == 0, err[-4000:]
        results.append(json.loads(out))
    assert all(result["finished"] and result["promise_kept"] and result["steps"] == 3 for result in results)
    assert RunCard.read(tmp_path / "run" / "run.json").world_size == 2
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert not check_ledger(ledger)
    assert {part.rank for entry in ledger.steps for part in entry.slices} == {0, 1}
    # The same command on both goes on, or says that nothing is left, whoever comes first.
    for number in (0, 1):
        process = machine(number, port, "--resume", str(tmp_path / "run"))
        code, _out, err = ended(process)
        assert code == 0, err[-4000:]
        assert "nothing left to train" in err


@pytest.mark.slow
def test_a_machine_that_comes_late_is_taken_in(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    words = (str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"))
    first = machine(0, port, *words)
    until(lambda: (tmp_path / "run" / "run.json").is_file())
    second = machine(1, port, *words)
    for process in (second, first):
        code, out, err = ended(process)
        assert code == 0, err[-4000:]
        assert json.loads(out)["finished"]


@pytest.mark.slow
def test_machines_that_disagree_on_their_processes_are_refused(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    words = (str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"))
    for process in [machine(1, port, *words, gpus=2), machine(0, port, *words)]:
        code, _out, err = ended(process)
        assert code == 2, err[-4000:]
        assert "3 processes came, and the run was prepared for 2" in err


@pytest.mark.slow
def test_a_dry_run_of_the_first_machine_is_told_to_the_others(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    words = (str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"))
    second, first = machine(1, port, *words), machine(0, port, *words, "--dry-run")
    assert ended(first)[0] == 0
    code, _out, err = ended(second)
    assert code == 2
    assert "The first machine was given --dry-run" in err


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.long
def test_ctrl_c_while_the_processes_start_ends_them_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model = write_model(tmp_path / "model")
    asked = [word for word in ASKED if word not in {"--nodes", "2"}]
    command = [sys.executable, "-m", "brim", "train", str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"), *asked]
    process = subprocess.Popen(
        [*command, "--gpus", str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A job in the background has it ignored from its shell, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    begun = "run/run.json" if ranks == 1 else "brim-ranks-*/pid-*"
    until(lambda: bool(list(tmp_path.glob(begun))))
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err[-4000:]
    assert "Traceback" not in err
    assert not at_work_in(tmp_path / "run")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.long
def test_who_is_killed_when_its_child_has_just_begun_leaves_nobody_behind(tmp_path: Path, ranks: int) -> None:
    model = write_model(tmp_path / "model")
    asked = [word for word in ASKED if word not in {"--nodes", "2"}]
    command = [sys.executable, "-m", "brim", "train", str(model), "--data", str(data_file()), "-o", str(tmp_path / "run"), *asked]
    process = subprocess.Popen([*command, "--gpus", str(ranks)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(at_work_in(tmp_path / "run")) > 1)
    process.kill()
    process.wait()
    until(lambda: not at_work_in(tmp_path / "run"))


def until(holds: Callable[[], bool], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def at_work_in(folder: Path) -> list[int]:
    """Processes that name this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
