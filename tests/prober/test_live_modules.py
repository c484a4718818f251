"""Modules of one's own: their weights count, their peaks are real ones, and nothing of their code runs in the calling process."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim.errors import OutOfMemoryError, RunError, UsageError
from brim.machine.budget import ForkServer
from brim.records import Measurement
from brim.sizes import GIB, MIB
from tests.prober.subjects import Plain, Table, find_with_layers, hanging_step, noted_step, table_step

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")

TABLE_BYTES = 100_000 * 256 * 4
LIMIT = TABLE_BYTES + 80 * MIB
USUAL_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(64 * MIB)}
"""As a process has it that has run for a while: freed memory stays, and is there for the next trial."""


@pytest.fixture(autouse=True)
def _one_server(one_server: None) -> None:
    """All trials run in the server of all tests."""


def probe_table(model: Any, **more: Any) -> Measurement:
    asked = {"device": "cpu", "memory": LIMIT, "seq_len": 4096, "objective": "largest", "step": table_step}
    return brim.probe(model, **{**asked, **more})


def peaks(record: Measurement) -> list[int]:
    """By size, of all that ran."""
    ran = sorted((trial.micro_batch, trial.peak_device_bytes or 0) for trial in record.trials if trial.verdict == "ok")
    return [peak for _size, peak in ran]


@pytest.mark.slow
def test_weights_that_are_there_already_count_as_those_do_that_a_function_builds() -> None:
    sizes = {"micro_batch": 3, "effective_batch": 5}
    live, built = probe_table(Table(), **sizes), probe_table("tests.prober.subjects:Table", **sizes)
    for record in (live, built):
        assert record.complete
        assert record.largest is not None
        assert TABLE_BYTES < record.largest.peak_bytes <= LIMIT
        found = peaks(record)
        assert len(found) > 1
        assert all(smaller < larger for smaller, larger in pairwise(found))
    assert live.largest is not None
    assert built.largest is not None
    assert live.largest.micro_batch == pytest.approx(built.largest.micro_batch, rel=0.1)


def test_a_limit_below_the_weights_that_are_there_is_no_limit_to_train_under() -> None:
    with pytest.raises(OutOfMemoryError, match=r"takes 97.9 MiB by itself, and 46.8 MiB may be taken"):
        probe_table(Table(), memory=TABLE_BYTES // 2)


@pytest.mark.slow
def test_the_history_of_sizes_grows_with_them() -> None:
    torch.set_num_threads(1)
    finder = brim.BatchSizeOptimizer(Table(), "cpu", memory="80MiB", say=lambda text: None)
    dataset = [(torch.zeros(4096, dtype=torch.long), number) for number in range(4)]
    found = finder.find_optimal_batch_size(dataset, start_batch_size=2, max_batch_size=4)
    history = sorted(finder.memory_usage_history)
    assert history[-1][0] == found
    assert [size for size, _gib in history] == [2, 4]
    assert history[1][1] > 1.5 * history[0][1]


@pytest.mark.slow
def test_in_this_process_the_limit_counts_from_before_the_first_trial() -> None:
    with ForkServer(environment=USUAL_HEAP) as server:
        here = server.run(find_with_layers, "150MiB", can_travel=False, preload=("tests.prober.subjects",), timeout_seconds=120)
    assert (here.verdict, here.message) == ("ok", "")
    found, history = here.value
    apart, _history = find_with_layers("150MiB", can_travel=True)
    assert 0.5 * apart <= found <= 1.25 * apart
    assert max(gib for _size, gib in history) * GIB <= 1.05 * 150 * MIB


def test_no_step_of_ones_own_runs_in_the_calling_process(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    record = brim.probe(
        Plain(), step=partial(noted_step, str(notes)), device="cpu", memory="64MiB", seq_len=64, effective_batch=2,
        objective="largest",
    )  # fmt: skip
    assert record.largest is not None
    assert record.predicted is None
    ran = set(notes.read_text().split())
    assert ran
    assert str(os.getpid()) not in ran


def test_no_function_that_builds_a_model_runs_in_the_calling_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_own.py").write_text(
        "import os\nfrom pathlib import Path\nfrom tests.prober.subjects import tiny_llama\n\n"
        "def build():\n"
        "    with Path(__file__).with_name('notes').open('a') as file:\n        file.write(f'{os.getpid()}\\n')\n"
        "    return tiny_llama()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    record = brim.probe("somebodys_own:build", device="cpu", memory="96MiB", seq_len=16, effective_batch=2, objective="largest")
    assert record.largest is not None
    ran = set((tmp_path / "notes").read_text().split())
    assert ran
    assert str(os.getpid()) not in ran


def test_a_mistake_that_only_the_child_can_see_is_a_mistake_here() -> None:
    lines = list[str]()
    with pytest.raises(UsageError, match="does not know how to call it") as caught:
        brim.probe("tests.prober.subjects:plain", device="cpu", memory="64MiB", seq_len=32, say=lines.append)
    assert "step" in str(caught.value.hint)
    assert not [line for line in lines if line.startswith("Trial ")]


@pytest.mark.parametrize("start", [1, 4])
def test_a_hang_under_a_limit_on_time_is_in_the_record(start: int) -> None:
    for seconds in (1.5, 6.0, 24.0):  # longer where the machine is so busy that no trial has begun by then
        with contextlib.suppress(RunError):
            record = brim.probe(
                Plain(), step=hanging_step, device="cpu", memory="64MiB", seq_len=32, time_limit=seconds, micro_batch=start
            )
            break
    assert [(trial.micro_batch, trial.verdict) for trial in record.trials] == [(start, "timeout")]
    assert not record.complete
    assert record.largest is None
