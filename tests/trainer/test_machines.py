"""`brim train --nodes 2`: the same command given twice, as on two machines that see one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.records import RunCard
from brim.step.checker import check_ledger
from brim.step.ledger import read_ledger
from brim.workload.embedded import data_file, write_model
from tests.trainer.test_doorway import free_port

pytestmark = pytest.mark.timeout(240)
ASKED = (
    "--nodes", "2", "--gpus", "1", "--device", "cpu", "--workers", "0", "--no-probe", "--no-verify", "--precision", "fp32", "--effective-batch", "7",
    "--max-steps", "3", "--seq-len", "128", "--max-bad", "5", "--from-scratch", "--json",
)  # fmt: skip


def machine(number: int, port: int, *words: str) -> subprocess.Popen[str]:
    where = ("--node-rank", str(number), "--rendezvous", f"127.0.0.1:{port}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "brim", "train", *words, *ASKED, *where],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def test_a_first_machine_that_refuses_the_data_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    model, rows = write_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n' * 3 + "oops\n" * 7, encoding="utf-8")
    words, port = (str(model), "--data", str(rows), "-o", str(tmp_path / "run")), free_port()
    second = machine(1, port, *words)
    first = machine(0, port, *words)
    for process in (first, second):
        code, out, err = ended(process)
        assert (code, out) == (2, "")
        assert "rows.jsonl, line 4" in err
        assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


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
    # The same command on both goes on, or says that nothing is left.
    again = [machine(number, port, "--resume", str(tmp_path / "run")) for number in (1, 0)]
    for process in again:
        code, _out, err = ended(process)
        assert code == 0, err[-4000:]
        assert "nothing left to train" in err
