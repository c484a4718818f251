"""`brim probe` as a person types it, and as a person interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import brim
from brim.machine.budget import ForkServer
from brim.records import Measurement
from tests.prober.conftest import kept, shared_server
from tests.prober.subjects import LLAMA

if TYPE_CHECKING:
    from tests.conftest import Cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    (made / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return shared_server()


@pytest.fixture(scope="module")
def cache(folder: Path, server: ForkServer, traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one probe in it."""
    made = tmp_path_factory.mktemp("cache")
    (made / "memory").symlink_to(traces, target_is_directory=True)
    with kept(server) as patch:
        patch.setenv("BRIM_CACHE", str(made))
        brim.probe(str(folder), device="cpu", memory="96MiB", seq_len=256)
    return made


@pytest.fixture
def asked(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("BRIM_CACHE", str(cache))
    return ("probe", str(folder), "--device", "cpu", "--memory", "96MiB", "--seq-len", "256")


def test_a_person_reads_what_ran_and_what_was_found(cli: Cli, asked: tuple[str, ...]) -> None:
    ended = cli(*asked)
    assert ended.code == 0
    for words in (
        "on the CPU",
        "Micro-batch",
        "Verdict",
        "ok",
        "Largest",
        "Fastest",
        "Limit",
        "Prediction",
        "Memory",
        "Trials: ",
    ):
        assert words in ended.out
    assert "Throughput at the longest sequences" in ended.out
    assert "Measured before" in ended.err


def test_the_answer_is_one_document(cli: Cli, asked: tuple[str, ...]) -> None:
    ended = cli(*asked, "--json")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert document["schema"] == "brim.probe/1"
    assert set(document) >= {"trials", "fit", "largest", "fastest", "predicted", "versus", "loader"}
    for name in ("largest", "fastest"):
        assert set(document[name]) == {"micro_batch", "tokens_per_second", "peak_bytes"}
    assert Measurement.from_json(ended.out).complete


def test_the_result_is_written_where_it_is_wanted(cli: Cli, asked: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    ended = cli(*asked, "-o", str(path), "--json")
    assert ended.code == 0
    assert Measurement.read(path) == Measurement.from_json(ended.out)
    assert str(path) in ended.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--objective", "best"), "best"),
        (("--max-trials", "0"), "max-trials"),
        (("--time-limit", "0"), "time-limit"),
        (("--gpu-index", "0"), "contradict"),
        (("--effective-batch", "8", "--accumulation", "2"), "give one"),
        (("--sharding", "zero2", "--gpus", "2"), "one process"),
        (("-o", "no/such/folder/probe.json"), "no folder"),
        (("--margin", "100%"), "margin"),
    ],
    ids=["objective", "trials", "time", "index", "accumulation", "sharding", "output", "margin"],
)
def test_a_wrong_wish_ends_with_two(cli: Cli, asked: tuple[str, ...], more: tuple[str, ...], words: str) -> None:
    ended = cli(*asked, *more)
    assert ended.code == 2
    assert words in ended.err
    assert ended.out == ""


def test_more_memory_than_the_machine_has_ends_with_two(cli: Cli, folder: Path) -> None:
    ended = cli("probe", str(folder), "--device", "cpu", "--memory", "900TiB", "--seq-len", "256")
    assert ended.code == 2
    assert "of this machine" in ended.err


def test_a_mistake_that_a_child_finds_ends_with_two(cli: Cli, server: ForkServer) -> None:
    with kept(server):
        ended = cli("probe", "tests.prober.subjects:plain", "--device", "cpu", "--memory", "64MiB", "--seq-len", "32")
    assert ended.code == 2
    assert "does not know how to call it" in ended.err
    assert "Trial 1" not in ended.err


def test_the_data_are_told_and_that_more_would_fit(cli: Cli, folder: Path, server: ForkServer, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "a word " * number}) + "\n" for number in range(3, 9)))
    asked = ("--device", "cpu", "--memory", "96MiB", "--data", str(data), "--effective-batch", "4", "--objective", "largest")
    with kept(server):
        ended = cli("probe", str(folder), *asked)
    assert ended.code == 0
    said = " ".join(ended.out.split())
    assert "6 sequences, median " in said
    assert "micro-batch 4" in said
    assert "more would fit, and a step has no more" in said


def test_where_memory_ends_nothing_more_would_fit(cli: Cli, asked: tuple[str, ...]) -> None:
    assert "more would fit" not in cli(*asked).out


def test_far_too_little_memory_ends_with_one_and_without_a_trial(cli: Cli, folder: Path, server: ForkServer) -> None:
    with kept(server):
        ended = cli("probe", str(folder), "--device", "cpu", "--memory", "3MiB", "--seq-len", "256")
    assert ended.code == 1
    assert "for one sequence of 256 tokens" in ended.err
    assert "Trial 1" not in ended.err
    assert ended.out == ""


def test_where_nothing_fits_it_ends_with_one(cli: Cli, folder: Path, server: ForkServer) -> None:
    with kept(server):
        ended = cli("probe", str(folder), "--device", "cpu", "--memory", "5400KiB", "--seq-len", "256")
    assert ended.code == 1
    assert "Trial 1: 1 x 256: out-of-memory" in ended.err
    assert "even one sequence of 256 tokens" in ended.err
    assert ended.out == ""


@pytest.mark.slow
def test_an_interruption_leaves_what_was_found_and_nobody_running(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    path = tmp_path / "probe.json"
    running = subprocess.Popen(
        [
            sys.executable, "-m", "brim", "probe", str(tmp_path), "--device", "cpu", "--memory", "2GiB", "--seq-len", "256",
            "--micro-batch", "1", "-o", str(path), "--json",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ), cwd=tmp_path,
    )  # fmt: skip
    assert running.stderr is not None
    try:
        said = ""
        for line in running.stderr:
            said += line
            if line.startswith("Trial 1: "):
                break
        children = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "Trial 1: 1 x 256: ok" in said
    assert running.returncode == 130, said + err
    left = Measurement.read(path)
    assert not left.complete
    assert [trial.micro_batch for trial in left.trials] == [1]
    assert left.largest is not None
    assert Measurement.from_json(out) == left
    assert "Interrupted" in err
    assert "Traceback" not in err
    assert children
    _gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
