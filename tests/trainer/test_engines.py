"""`brim train` on several processes: the same steps under every engine, out-of-memory on one rank, ranks that die, runs that go on elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import brim
from brim.errors import BrimError, OutOfMemoryError
from brim.records import LedgerEntry, RunCard, TrainingResult
from brim.step.checker import check_ledger
from brim.step.ledger import read_ledger
from brim.trainer.lessons import Lessons
from brim.trainer.manifest import checkpoints, damage_of
from brim.workload.embedded import data_file, write_model
from tests.trainer import squeezed

ROOT = Path(__file__).parents[2]
STEPS, BATCH = 6, 13
BOUND_SECONDS = 60.0
"""Within which all ranks are gone after one of them has failed."""
ENGINES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_each() -> Any:
    """Two ranks are two threads already; and ranks find the workers of these tests."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    path = os.pathsep.join(filter(None, (str(ROOT), before["PYTHONPATH"])))
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=path)
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def train(model: Path | None, folder: Path, **settings: Any) -> TrainingResult:
    """A small run of 6 steps of 13 sequences: 13 divides by no number of ranks."""
    usual: dict[str, Any] = {
        "from_scratch": True, "device": "cpu", "workers": 0, "probe": False, "verify": False, "precision": "fp32", "effective_batch": BATCH,
        "max_steps": STEPS, "save_steps": 2, "learning_rate": 1e-3, "schedule": "constant", "weight_decay": 0.1, "seq_len": 200,
        "max_bad": 5, "eval_split": 11,
    }  # fmt: skip
    if model is None:
        return brim.train(resume=folder, **settings)
    return brim.train(model, data=data_file(), output=folder, **{**usual, **settings})


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process does."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(model, folder).finished
    return folder


def steps(folder: Path) -> list[LedgerEntry]:
    """Each step as it was taken last: a run that goes on from a checkpoint repeats those after it."""
    return list({entry.step: entry for entry in read_ledger(folder / "ledger.jsonl").steps}.values())


def is_like(folder: Path, alone: Path, *, within: float = 1e-4) -> None:
    """The same sequences, losses and weights; every promise kept."""
    ours, theirs = steps(folder), steps(alone)
    assert [sorted(entry.sequence_ids) for entry in ours] == [sorted(entry.sequence_ids) for entry in theirs]
    assert [entry.loss for entry in ours] == pytest.approx([entry.loss for entry in theirs], abs=within)
    assert [entry.grad_norm for entry in ours] == pytest.approx([entry.grad_norm for entry in theirs], rel=1e-3)
    assert not list(check_ledger(read_ledger(folder / "ledger.jsonl")))
    mine, other = load_file(folder / "model.safetensors"), load_file(alone / "model.safetensors")
    assert set(mine) == set(other)
    apart = max(float((mine[name].float() - other[name].float()).abs().max()) for name in mine)
    assert apart < within
    losses = [
        [json.loads(line)["loss"] for line in (each / "evaluations.jsonl").read_text().splitlines()][-1]
        for each in (folder, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=within)


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [
        ("fsdp", 2),
        pytest.param("fsdp", 3, marks=slow),
        *(pytest.param(sharding, 2, marks=slow) for sharding in ENGINES if sharding != "fsdp"),
        *(pytest.param(sharding, 3, marks=slow) for sharding in ENGINES if sharding != "fsdp"),
    ],
)
@pytest.mark.long
def test_every_engine_takes_the_steps_of_one_process(model: Path, alone: Path, tmp_path: Path, sharding: str, ranks: int) -> None:
    _need(sharding)
    result = train(model, tmp_path / "run", gpus=ranks, sharding=sharding)
    assert (result.finished, result.promise_kept, result.effective_batch) == (True, True, BATCH)
    is_like(tmp_path / "run", alone)
    assert RunCard.read(tmp_path / "run" / "run.json").world_size == ranks
    assert {entry.sequences for entry in steps(tmp_path / "run")} == {BATCH}
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").dtype == torch.float32


@slow
@pytest.mark.parametrize(
    ("sharding", "offload"),
    [("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer"), ("zero3", "parameters"), ("fsdp", "parameters")],
)
def test_so_it_does_with_a_part_in_the_hosts_memory(
    model: Path, alone: Path, tmp_path: Path, sharding: str, offload: str
) -> None:
    _need(sharding)
    assert train(model, tmp_path / "run", gpus=2, sharding=sharding, offload=offload, max_steps=3).finished
    card = RunCard.read(tmp_path / "run" / "run.json")
    assert any("On the CPU --offload saves nothing" in note for note in card.notes)
    # And a run goes on with it, or without.
    assert train(None, tmp_path / "run", max_steps=STEPS, offload="none").finished
    is_like(tmp_path / "run", alone)


@pytest.mark.parametrize(
    "way",
    [
        (("fsdp", 2), ("zero3", 3)),
        pytest.param((("zero1", 3), ("fsdp", 2)), marks=slow),
        pytest.param((("zero3", 2), ("", 1)), marks=slow),
        pytest.param((("", 1), ("zero2", 2)), marks=slow),
        pytest.param((("ddp", 3), ("fsdp", 2)), marks=slow),
    ],
)
@pytest.mark.long
def test_a_run_goes_on_under_another_engine_on_another_number_of_ranks(
    model: Path, alone: Path, tmp_path: Path, way: tuple[tuple[str, int], tuple[str, int]]
) -> None:
    (first, ranks), (second, others) = way
    _need(first, second)
    assert train(model, tmp_path / "run", max_steps=3, **_on(first, ranks)).finished
    assert train(None, tmp_path / "run", max_steps=STEPS, **_on(second, others)).finished
    is_like(tmp_path / "run", alone)


def _on(sharding: str, ranks: int) -> dict[str, Any]:
    return {"gpus": ranks, "sharding": sharding} if sharding else {"gpus": 1, "sharding": "none"}


def _moments(*quick: str) -> list[Any]:
    """The first step and four others, forward and backward, on one rank or the other; all but these are slow."""
    steps = (1, 2, 3, 4, 6)
    every = [f"{(step + turn) % 2}:{step}:{phase}" for turn, phase in enumerate(("forward", "backward")) for step in steps]
    assert set(quick) <= set(every)
    return [pytest.param(where, marks=[] if where in quick else slow) for where in every]


@pytest.mark.parametrize("where", _moments("1:3:forward"))
@pytest.mark.parametrize("sharding", ["fsdp", pytest.param("zero3", marks=slow)])
@pytest.mark.long
def test_out_of_memory_on_one_rank_of_a_sharded_model_starts_all_anew_with_smaller_slices(
    model: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str, where: str
) -> None:
    _need(sharding)
    monkeypatch.setenv(squeezed.VARIABLE, where)
    said: dict[str, float] = {}
    result = train(
        model, tmp_path / "run", gpus=2, sharding=sharding, worker="tests.trainer.squeezed",
        say=lambda sentence: said.update({sentence: time.time()}),
    )  # fmt: skip
    assert result.finished
    is_like(tmp_path / "run", alone)
    rank, step, phase = where.split(":")
    lesson = Lessons.of(tmp_path / "run").lessons[0]
    assert (lesson.rank, lesson.step, lesson.phase) == (int(rank), int(step), phase)
    started_again = next(at for sentence, at in said.items() if "They start again from the last checkpoint" in sentence)
    assert started_again - squeezed_at(tmp_path / "run") < BOUND_SECONDS
    if lesson.shape[0] == 1:
        return
    after = [
        part for entry in steps(tmp_path / "run") if entry.step >= lesson.step for part in entry.slices if part.sequences > 1
    ]
    assert all(part.sequences * (part.length or 0) < lesson.shape[0] * lesson.shape[1] for part in after)


@pytest.mark.parametrize("where", _moments("1:2:backward"))
@pytest.mark.long
def test_out_of_memory_on_one_rank_of_data_parallelism_is_survived_in_place(
    model: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv(squeezed.VARIABLE, where)
    result = train(model, tmp_path / "run", gpus=2, worker="tests.trainer.squeezed")
    assert (result.finished, result.splits) == (True, 1)
    assert not Lessons.of(tmp_path / "run").lessons
    is_like(tmp_path / "run", alone)


@slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "zero3"])
def test_out_of_memory_in_the_optimizer_ends_the_run_and_leaves_the_last_checkpoint(
    model: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str
) -> None:
    _need(sharding)
    monkeypatch.setenv(squeezed.VARIABLE, "1:4:optimizer")
    with pytest.raises(OutOfMemoryError, match="in the optimizer's step") as caught:
        train(model, tmp_path / "run", gpus=2, sharding=sharding, worker="tests.trainer.squeezed")
    assert time.time() - squeezed_at(tmp_path / "run") < BOUND_SECONDS
    assert "checkpoint-2" in str(caught.value.hint)
    assert [damage_of(path) for path in checkpoints(tmp_path / "run")] == [None]
    assert train(None, tmp_path / "run", gpus=2, sharding=sharding).finished
    is_like(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("sharding", "victim"), [("ddp", 1), *(pytest.param(*each, marks=slow) for each in (("ddp", 0), ("fsdp", 1), ("zero3", 0)))]
)
@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_others_and_fewer_ranks_go_on(
    model: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str, victim: int
) -> None:
    _need(sharding)
    folder = tmp_path / "run"
    monkeypatch.setenv(squeezed.VARIABLE, f"{victim}:5:killed")
    with pytest.raises(BrimError, match=rf"Rank {victim} ended without reporting an error") as caught:
        train(model, folder, gpus=3, sharding=sharding, worker="tests.trainer.squeezed")
    assert time.time() - squeezed_at(folder) < BOUND_SECONDS
    assert f"--resume {folder}" in str(caught.value.hint)
    assert not _ranks_of(folder)
    assert train(None, folder, gpus=2, sharding=sharding).finished
    is_like(folder, alone)


@slow
@pytest.mark.parametrize(("sharding", "victim"), [("ddp", 0), ("fsdp", 0), ("fsdp", 1), ("zero1", 0), ("zero3", 1)])
def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(
    model: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str, victim: int
) -> None:
    _need(sharding)
    folder = tmp_path / "run"
    monkeypatch.setenv(squeezed.VARIABLE, f"{victim}:4:saving")
    with pytest.raises(BrimError, match=rf"Rank {victim} ended without reporting an error"):
        train(model, folder, gpus=2, sharding=sharding, worker="tests.trainer.squeezed")
    assert time.time() - squeezed_at(folder) < BOUND_SECONDS
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"]
    assert [damage_of(path) for path in checkpoints(folder)] == [None]
    assert train(None, folder, gpus=2, sharding=sharding).finished
    is_like(folder, alone)


@slow
@pytest.mark.parametrize("sharding", ["", "ddp", "fsdp", "zero2", "zero3"])
def test_a_full_disk_costs_a_run_its_last_steps_and_no_checkpoint(
    model: Path, alone: Path, small_disk: Path, sharding: str
) -> None:
    """The disk holds one checkpoint and no second one."""
    _need(sharding)
    folder = small_disk / "run"
    with pytest.raises(BrimError, match="The run ended unsaved") as caught:
        train(model, folder, **_on(sharding, 2))
    assert "has" in caught.value.message
    assert "free" in caught.value.message
    assert f"--resume {folder}" in str(caught.value.hint)
    assert [(path.name, damage_of(path)) for path in checkpoints(folder)] == [("checkpoint-2", None)]
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    assert train(None, folder, **_on(sharding, 2)).finished
    is_like(folder, alone)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Twenty MiB, for real: a checkpoint of the embedded model takes twelve."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("A small file system cannot be mounted here: that needs root, and a container that allows it.")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def squeezed_at(folder: Path) -> float:
    """When the moment came."""
    return (folder / "squeezed").stat().st_mtime


def _ranks_of(folder: Path) -> list[int]:
    """Processes that are still at work for a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes() and b"brim.trainer.rank" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_an_interrupted_group_saves_its_step_and_goes_on(model: Path, alone: Path, tmp_path: Path, sharding: str) -> None:
    folder = tmp_path / "run"

    def interrupt() -> None:
        ledger = folder / "ledger.jsonl"
        while not (ledger.is_file() and ledger.read_text().count('"sequence_ids"') >= 1):
            time.sleep(0.05)
        if callable(signal.getsignal(signal.SIGTERM)):  # the run is still there to hear it
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    result = train(model, folder, gpus=2, sharding=sharding, save_steps=STEPS)
    assert (result.finished, result.stopped_by) == (False, "SIGTERM")
    assert checkpoints(folder)
    assert train(None, folder, gpus=2, sharding=sharding).finished
    is_like(folder, alone)


@slow
def test_unequal_memory_is_shared_by_cost_and_the_steps_stay_the_same(model: Path, alone: Path, tmp_path: Path) -> None:
    limits = ["80MiB", "160MiB", "320MiB"]
    result = train(model, tmp_path / "run", gpus=3, memory=limits, speeds=[1, 2, 4])
    assert result.finished
    is_like(tmp_path / "run", alone)
    counts = [
        sum(part.sequences for entry in steps(tmp_path / "run") for part in entry.slices if part.rank == rank)
        for rank in range(3)
    ]
    assert counts[0] < counts[1] < counts[2]


@slow
@pytest.mark.parametrize("settings", [{"precision": "amp-bf16"}, {"precision": "bf16"}])
@pytest.mark.parametrize("sharding", ["fsdp", "zero2", "zero3"])
def test_half_precision_under_an_engine_stays_near_float32(
    model: Path, alone: Path, tmp_path: Path, sharding: str, settings: dict[str, Any]
) -> None:
    _need(sharding)
    assert train(model, tmp_path / "run", gpus=2, sharding=sharding, **settings).finished
    ours, theirs = steps(tmp_path / "run"), steps(alone)
    assert [entry.loss for entry in ours] == pytest.approx([entry.loss for entry in theirs], abs=0.1)
    saved = {tensor.dtype for tensor in load_file(tmp_path / "run" / "model.safetensors").values()}
    assert saved == {torch.bfloat16 if settings["precision"] == "bf16" else torch.float32}


@slow
def test_accelerate_starts_the_processes_too(model: Path, alone: Path, tmp_path: Path) -> None:
    assert train(model, tmp_path / "run", gpus=2, launch="accelerate", sharding="fsdp").finished
    is_like(tmp_path / "run", alone)


def _need(*shardings: str) -> None:
    if any(sharding.startswith("zero") for sharding in shardings):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install deepspeed")
