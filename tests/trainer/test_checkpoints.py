"""A checkpoint is complete or not there, whatever the disk and the power do; and a run that goes on from one ends as if nothing had been."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from brim.errors import RunError
from brim.machine.budget import ForkServer
from brim.step.ledger import LedgerWriter
from brim.trainer import disk, manifest
from tests.trainer.saves import ROWS, SafeTrainer, cut_at, names, safe, train_in_child
from tests.trainer.small import ids_of, lines, llama, logged, pad, weights

GIB = 1 << 30
DROPOUT = {"attention_dropout": 0.2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SafeTrainer]:
    """Nine steps without a break, with dropout; checkpoints 8 and 9 are left."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    trainer = safe(folder, llama(**DROPOUT))
    trainer.train()
    return folder, trainer


def at_steps(act: Callable[[int], None]) -> TrainerCallback:
    class AtSteps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
            act(state.global_step + 1)

    return AtSteps()


# The same to the bit.


def masked(rows: Any) -> Any:
    """A collator that draws."""
    batch = pad(rows)
    drop = torch.rand(batch["input_ids"].shape) < 0.1 + 0.1 * random.random()
    return {**batch, "input_ids": torch.where(drop, 1 + int(torch.randint(0, 5, ())), batch["input_ids"])}


def lora(**changes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(llama(**changes), LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]))


def half() -> Any:
    model: torch.nn.Module = llama()
    return model.to(torch.bfloat16)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "dropout-and-a-collator-that-draws": (
        lambda: llama(**DROPOUT),
        {"data_collator": masked, "logging_steps": 2},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3},
    ),
    "lora": (lora, {"logging_steps": 2, "eval_strategy": "epoch", "eval_dataset": ROWS[:4]}, {}),
    "no-dropout": (llama, {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": ROWS[:4]}, {}),
    "adamw-8bit": (lambda: llama(**DROPOUT, hidden_size=64, vocab_size=256), {"optim": "adamw_bnb_8bit"}, {}),
    "adafactor-with-16-bit-weights": (half, {"optim": "adafactor"}, {}),
    "workers-that-do-not-stay": (
        lambda: llama(**DROPOUT), {"data_collator": masked, "dataloader_num_workers": 1}, {"dataloader_num_workers": 2},
    ),
}  # fmt: skip
QUICK = {"dropout-and-a-collator-that-draws", "lora"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in KINDS])
@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 5], ids=["between-epochs", "within-an-epoch"])
def test_a_run_that_was_cut_ends_with_the_weights_of_one_that_was_not(tmp_path: Path, kind: str, step: int) -> None:
    model, options, changes = KINDS[kind]
    straight = safe(tmp_path / "straight", model(), **options)
    straight.train()
    cut_at(safe(tmp_path / "cut", model(), **options), step)
    again = safe(tmp_path / "cut", model(), **{**options, **changes})
    again.train(resume_from_checkpoint=True)
    assert torch.equal(weights(again.model), weights(straight.model))
    assert ids_of(tmp_path / "cut") == ids_of(tmp_path / "straight")
    for name in ("loss", "learning_rate", "eval_loss"):
        assert logged(again, name) == logged(straight, name)


def test_the_scaler_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(scale: float) -> Any:
        trainer = safe(tmp_path, max_steps=3)
        monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return trainer

    cut_at(scaled(2.0**127), 2)
    saved = torch.load(tmp_path / "checkpoint-2" / "scaler.pt", weights_only=True)
    again = scaled(1.0)
    again._load_scaler(str(tmp_path / "checkpoint-2"))
    assert saved["scale"] < 2.0**127
    assert again.accelerator.scaler.state_dict() == saved


def test_what_is_asked_for_now_counts_and_not_what_the_checkpoint_says(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "checkpoint-8", tmp_path / "checkpoint-8")
    trainer = safe(tmp_path, llama(**DROPOUT), save_steps=50, logging_steps=7)
    trainer.train(resume_from_checkpoint=True)
    assert (trainer.state.save_steps, trainer.state.logging_steps) == (50, 7)


def test_a_rank_that_finds_no_random_numbers_begins_with_those_of_the_seed_and_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = safe(tmp_path)
    drawn = []
    for step in (4, 4, 5):
        trainer.state.global_step = step
        trainer._load_rng_state(str(tmp_path))
        drawn.append((random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1] != drawn[2]
    assert "no random numbers for rank 0 of 1" in capsys.readouterr().err


@pytest.mark.slow
def test_with_another_memory_the_steps_and_nearly_the_weights_are_the_same(tmp_path: Path) -> None:
    from brim.step.budget import Budget

    straight = safe(tmp_path / "straight")
    straight.train()
    cut_at(safe(tmp_path / "cut"), 4)
    again = safe(tmp_path / "cut", budget=Budget.sequences(1))
    again.train(resume_from_checkpoint=True)
    assert ids_of(tmp_path / "cut") == ids_of(tmp_path / "straight")
    assert torch.allclose(weights(again.model), weights(straight.model), atol=1e-4)


# Killed.


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


def in_child(server: ForkServer, folder: Path, kill: str = "", **changes: Any) -> Any:
    return server.run(train_in_child, str(folder), kill, preload=("tests.trainer.saves",), timeout_seconds=120, **changes)


def check_files(folder: Path) -> None:
    """What is there after a kill can be loaded, or is hidden."""
    assert set(names(folder)) - {manifest.SAVING} == {path.name for path in manifest.checkpoints(folder)}
    for path in manifest.checkpoints(folder):
        assert manifest.damage_of(path) is None
        torch.load(path / "optimizer.pt", weights_only=True)


@pytest.mark.parametrize(
    ("moments", "left"),
    [
        (("half-written", "old-half-deleted"), [".saving", "checkpoint-4", "checkpoint-6"]),
        pytest.param(("complete-not-renamed",), [".saving"], marks=pytest.mark.slow),
    ],
    ids=["writing-and-deleting", "renaming"],
)
@pytest.mark.long
def test_a_process_that_is_killed_while_it_saves_leaves_whole_checkpoints(
    server: ForkServer, whole: Any, tmp_path: Path, moments: tuple[str, ...], left: list[str]
) -> None:
    for moment in moments:
        assert in_child(server, tmp_path, moment).verdict == "killed"
        check_files(tmp_path)
    assert names(tmp_path) == left
    ended = in_child(server, tmp_path)
    assert torch.equal(torch.tensor(ended.value[0]), weights(whole[1].model))
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-9"]


@pytest.mark.slow
def test_ten_kills_at_any_moment_change_nothing(server: ForkServer, tmp_path: Path) -> None:
    longer: dict[str, Any] = {"num_train_epochs": 10, "save_steps": 1}
    in_child(server, tmp_path / "first", num_train_epochs=1)  # pays for the imports
    straight, seconds = in_child(server, tmp_path / "straight", **longer).value
    chance = random.Random(9)
    folder = tmp_path / "killed"
    for _kill in range(10):
        ended = in_child(server, folder, str(chance.uniform(0.0, seconds / 15)), **longer)
        assert ended.verdict == "killed", ended.stderr
        check_files(folder)
    assert manifest.checkpoints(folder)  # it came further, kill by kill
    final, _seconds = in_child(server, folder, **longer).value
    assert torch.allclose(torch.tensor(final), torch.tensor(straight), atol=1e-4)
    check_files(folder)
    assert ids_of_last(folder) == ids_of(tmp_path / "straight")


def ids_of_last(folder: Path) -> list[set[int]]:
    """The sequences of each step; of one that was taken again, those of the last time."""
    found = {line["step"]: set(line["sequence_ids"]) for line in lines(folder)}
    return [found[step] for step in sorted(found)]


def test_the_best_checkpoint_is_known_by_its_name_and_evaluations_are_made_up_for(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": ROWS[:4], "load_best_model_at_end": True, "metric_for_best_model": "loss",
        "save_total_limit": 1, "max_steps": 6,
    }  # fmt: skip
    cut_at(safe(tmp_path, **options), 4)
    again = safe(tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    evaluated = [entry["step"] for entry in again.state.log_history if "eval_loss" in entry]
    assert evaluated == [2, 4, 6]
    best = Path(again.state.best_model_checkpoint)
    assert best.parent == tmp_path
    assert json.loads((best / manifest.STATE).read_text(encoding="utf-8"))["best_model_checkpoint"] == str(best)


# A disk that is full.


def said(capsys: pytest.CaptureFixture[str], word: str = "checkpoint of step") -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if word in line]


def test_a_save_without_room_waits_until_there_is_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"now": GIB}
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: free["now"])
    trainer = safe(tmp_path, callbacks=[at_steps(lambda step: free.update(now=1000 if step in {3, 4, 5, 6} else GIB))])
    trainer.train()
    first, saved = said(capsys)
    assert "The checkpoint of step 4 was not saved: it takes " in first
    assert f"and {tmp_path} has 1000 B free. Training goes on, and a checkpoint is saved as soon as there is room." in first
    assert f"The last one is {tmp_path / 'checkpoint-2'}." in first
    assert saved == "brim: the checkpoint of step 7 is saved."
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-9"]


@pytest.mark.parametrize("limit", [20_000, 40_000], ids=["weights", "optimizer"])
def test_a_write_that_fails_leaves_nothing_and_is_tried_at_the_next_save_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int
) -> None:
    """A limit on the size of files stands for a full disk: the writes themselves fail."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = []

    def act(step: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit if step in {3, 4} else hard, hard))
        seen.append(names(tmp_path))

    trainer = safe(tmp_path, callbacks=[at_steps(act)], max_steps=6)
    try:
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    failed, saved = said(capsys)
    assert "The checkpoint of step 4 was not saved (" in failed
    assert "What was written of it is removed." in failed
    assert saved == "brim: the checkpoint of step 6 is saved."
    assert seen == [[], [], *[["checkpoint-2"]] * 4]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6"]


def test_a_run_that_ends_without_room_says_what_is_left_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"now": GIB}
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: free["now"])
    trainer = safe(tmp_path, callbacks=[at_steps(lambda step: free.update(now=1000 if step > 4 else GIB))])
    with pytest.raises(RunError, match="The run ended unsaved") as caught:
        trainer.train()
    assert f"The last checkpoint is {tmp_path / 'checkpoint-4'}." in caught.value.message
    assert f"brim train --resume {tmp_path}. The steps after 4 are taken again, up to 9." in (caught.value.hint or "")
    free["now"] = GIB
    again = safe(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-9"]
    assert [line["step"] for line in lines(tmp_path)][-5:] == [5, 6, 7, 8, 9]


def test_no_checkpoint_is_ahead_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_writer: LedgerWriter) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def act(step: int) -> None:
        if step == 4:
            monkeypatch.setattr(LedgerWriter, "settle", full)
        elif step == 5:
            monkeypatch.undo()

    safe(tmp_path, callbacks=[at_steps(act)], max_steps=6).train()
    failed, _saved = said(capsys)
    assert "The checkpoint of step 4 was not saved (No space left on device)" in failed
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6"]


# A folder that is deleted.


def test_after_the_folder_is_deleted_the_next_step_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, seen = tmp_path / "run", []

    def act(step: int) -> None:
        if step == 5:
            shutil.rmtree(run)
        elif step == 6:
            seen.extend(names(run))

    safe(run, callbacks=[at_steps(act)]).train()
    assert seen == ["checkpoint-5"]
    assert names(run) == ["checkpoint-8", "checkpoint-9"]
    assert [line["step"] for line in lines(run)] == list(range(1, 10))
    assert f"{run / 'ledger.jsonl'} was deleted while it was in use." in capsys.readouterr().err


def test_a_folder_that_is_deleted_while_it_is_written_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trainer = safe(run, max_steps=6)
    save, times = trainer._save_scaler, iter(range(9))

    def delete_once(folder: str) -> None:
        if next(times) == 1:
            shutil.rmtree(run)
        save(folder)

    monkeypatch.setattr(trainer, "_save_scaler", delete_once)
    trainer.train()
    [failed, saved] = said(capsys)
    assert "The checkpoint of step 4 was not saved (the folder was deleted while it was written)" in failed
    assert saved == "brim: the checkpoint of step 5 is saved."
    assert names(run) == ["checkpoint-5", "checkpoint-6"]
    assert [manifest.damage_of(path) for path in manifest.checkpoints(run)] == [None, None]
    assert [line["step"] for line in lines(run)] == list(range(1, 7))


# A disk that is full, for real.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Four MiB, for real."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("A small file system cannot be mounted here: that needs root, and a container that allows it.")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("is_seen", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["seen-before", "met-while-writing"])
def test_a_disk_that_is_really_full_costs_no_training_and_no_checkpoint(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_seen: bool
) -> None:
    run, ballast = small_disk / "run", small_disk / "ballast"
    if not is_seen:
        monkeypatch.setattr(disk, "free_bytes", lambda _folder: GIB)

    def act(step: int) -> None:
        if step == 3:
            ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 80_000))
        elif step == 5:
            ballast.unlink()

    safe(run, callbacks=[at_steps(act)], max_steps=6).train()
    failed, saved = said(capsys)
    assert "it takes" in failed
    assert ("What was written of it" in failed) is not is_seen
    assert saved == f"brim: the checkpoint of step {5 if is_seen else 6} is saved."
    assert [manifest.damage_of(path) for path in manifest.checkpoints(run)] == [None, None]


def test_an_error_that_is_not_of_the_disk_is_raised_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = safe(tmp_path)

    def fail(_folder: str) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(trainer, "_save_scaler", fail)
    with pytest.raises(ValueError, match="a bug"):
        trainer.train()
    assert names(tmp_path) == []
