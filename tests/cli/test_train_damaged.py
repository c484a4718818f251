"""Runs whose files were damaged, lost or deleted: what `brim verify --run` finds, and what `brim train --resume` does about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brim.cli._verify_view import show_run
from brim.errors import UsageError
from brim.records import FileDamage, PartCheck, RunCard, RunCheck
from brim.step.checker import check_ledger
from brim.step.ledger import read_ledger
from brim.trainer import disk, manifest
from brim.trainer.beforehand import bytes_on_disk
from brim.trainer.evaluations import read_evaluations
from brim.trainer.request import EVALUATIONS_FILE
from brim.trainer.run_records import RunRecords, copied_to_cache
from brim.trainer.running import RunTrainer
from brim.trainer.verifying import TellReading, where_it_resumes
from brim.workload.embedded import data_file, write_model
from tests.conftest import Cli, once

ASKED = (
    "--effective-batch", "8", "--device", "cpu", "--workers", "0", "--no-probe", "--no-verify", "--precision", "fp32", "--max-length", "32", "--max-bad", "9",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(shared: Path) -> Path:
    """`run`: a finished run of six steps, with the checkpoints 4 and 6; and what it was made of."""
    folder = shared / "damaged-runs"

    def make() -> None:
        write_model(folder / "model")
        lines = data_file().read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "rows.jsonl").write_text("".join(lines[:72]), encoding="utf-8")
        arguments = [str(folder / "model"), "--data", str(folder / "rows.jsonl"), *ASKED, "--max-steps", "6", "--save-steps", "2"]
        ended = subprocess.run(
            [sys.executable, "-m", "brim", "train", *arguments, "-o", str(folder / "run")],
            capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "BRIM_CACHE": str(folder / "cache")},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr

    once(folder, make)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def flip(file: Path) -> None:
    """One bit, in the middle."""
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


# brim verify --run.


@pytest.mark.long
def test_a_run_is_whole_until_one_bit_of_it_changes(run: Path, cli: Cli) -> None:
    ended = cli("verify", "--run", str(run))
    assert ended.code == 0, ended.out
    assert "Every byte is as it was written." in ended.out
    for file in ("model.safetensors", "checkpoint-6/optimizer.pt"):
        flip(run / file)
    ended = cli("verify", "--run", str(run))
    assert ended.code == 1
    assert "model: model.safetensors is not as it was written: its bytes have changed." in ended.out
    assert "checkpoint-6: optimizer.pt is not as it was written: its bytes have changed." in ended.out
    assert (
        f"Damaged: model, checkpoint-6. `brim train --resume {run}` continues from checkpoint-4 and saves the model again."
        in " ".join(ended.out.split())
    )
    ended = cli("verify", "--run", str(run), "--json", "--lang", "zh_CN")
    assert ended.code == 1
    found = RunCheck.from_json(ended.out)
    assert (found.finished, found.verdict) == (True, "damaged")
    assert {part.name: part.verdict for part in found.parts} == {
        "records": "whole", "model": "damaged", "checkpoint-4": "whole", "checkpoint-6": "damaged",
    }  # fmt: skip
    assert [(damage.file, damage.problem) for part in found.parts for damage in part.damages] == [
        ("model.safetensors", "content"), ("optimizer.pt", "content"),
    ]  # fmt: skip


@pytest.mark.long
def test_every_kind_of_damage_is_listed(run: Path, cli: Cli, tmp_path: Path) -> None:
    (run / "tokenizer.json").unlink()
    (run / "checkpoint-4" / "scheduler.pt").write_bytes(b"")
    (run / "checkpoint-6" / manifest.MANIFEST).write_text("{", encoding="utf-8")
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[3:]]))
    ended = cli("verify", "--run", str(run), "-o", str(tmp_path / "check.json"))
    assert ended.code == 1
    for words in (
        "model: tokenizer.json is missing.", "checkpoint-4: scheduler.pt has 0 bytes, and", "checkpoint-6: ", "is not valid JSON",
        "records: ledger.jsonl is damaged in these lines: 3.", "Restore the files from a backup.",
    ):  # fmt: skip
        assert words in ended.out
    problems = [damage.problem for part in RunCheck.read(tmp_path / "check.json").parts for damage in part.damages]
    assert problems == ["lines", "missing", "size", "manifest"]


@pytest.mark.long
def test_an_unfinished_run_of_an_older_brim_is_not_fully_verified(run: Path, cli: Cli) -> None:
    for name in (manifest.MODEL_MANIFEST, "config.json", "checkpoint-4/brim_checkpoint.json"):
        (run / name).unlink()
    ended = cli("verify", "--run", str(run))
    assert ended.code == 0, ended.out
    assert (
        "checkpoint-4 is not fully verified: an older brim wrote it, without a checksum of every byte of its files (" in ended.out
    )
    assert "No damage was found, and not every byte could be checked." in ended.out
    assert not RunCheck.from_json(cli("verify", "--run", str(run), "--json").out).finished


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ({"model": "model.safetensors"}, "Damaged: model. `brim train --resume r` continues from checkpoint-10 and saves the model again."),
        ({"checkpoint-8": "optimizer.pt"}, "Damaged: checkpoint-8. `brim train --resume r` continues from checkpoint-10."),
        ({"records": "ledger.jsonl"}, "Damaged: records. `brim train --resume r` continues from checkpoint-10."),
        ({"records": "run.json"}, "Damaged: records. Restore run.json from a backup: the run cannot be resumed without it."),
        ({"checkpoint-8": "a", "checkpoint-10": "a"}, "Damaged: checkpoint-8, checkpoint-10. Restore the files from a backup."),
    ],
)  # fmt: skip
def test_the_advice_about_a_damaged_run_depends_on_what_is_damaged(
    damaged: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = tuple(
        PartCheck(
            name=name, verdict="damaged" if name in damaged else "whole",
            damages=(FileDamage(file=damaged[name], problem="missing"),) if name in damaged else (),
        )
        for name in ("records", "model", "checkpoint-8", "checkpoint-10")
    )  # fmt: skip
    show_run(RunCheck(folder="r", finished=True, verdict="damaged", parts=parts))
    assert said in " ".join(capsys.readouterr().out.split())


def test_what_is_no_run_is_refused(tmp_path: Path, cli: Cli) -> None:
    ended = cli("verify", "--run", str(tmp_path))
    assert ended.code == 2
    assert "is not the folder of a run" in ended.err
    for arguments in ((), ("gpt2", "--run", str(tmp_path))):
        assert cli("verify", *arguments).code == 2


def test_on_a_terminal_a_bar_and_elsewhere_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from brim.trainer import verifying

    monkeypatch.setattr(verifying, "_LIVE_SECONDS", 0.0)
    monkeypatch.setattr(verifying, "_HEARTBEAT_SECONDS", 0.0)
    told = TellReading()
    told("checkpoint-6", 1 << 30, 4 << 30)
    told("checkpoint-6", 4 << 30, 4 << 30)
    assert capsys.readouterr().err == "Verifying checkpoint-6: 1.00 GiB of 4.00 GiB\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    told = TellReading()
    told("checkpoint-6", 1 << 30, 4 << 30)
    told("checkpoint-6", 4 << 30, 4 << 30)
    assert capsys.readouterr().err == "\r\x1b[KVerifying checkpoint-6: 1.00 GiB of 4.00 GiB [#####...............]\r\x1b[K"


def test_reading_the_model_of_a_finished_run_shows_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from brim.trainer import verifying

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x" * 512)
    manifest.seal(tmp_path, 1, name=manifest.MODEL_MANIFEST)
    monkeypatch.setattr(verifying, "_LIVE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert verifying.model_damage(tmp_path) is None
    assert f"Verifying {tmp_path.name}: 512 B of 1.00 KiB [##########..........]" in capsys.readouterr().err


# brim train --resume.


@pytest.mark.parametrize(
    ("step", "last", "said"),
    [
        (60, 65, "Resuming from checkpoint-60; steps 61-65 will be repeated."),
        (60, 61, "Resuming from checkpoint-60; step 61 will be repeated."),
        (98, 105, "Resuming from checkpoint-98; steps 99-100 will be repeated."),
        (99, 105, "Resuming from checkpoint-99; step 100 will be repeated."),
        (60, 60, "Resuming from checkpoint-60; no step has to be repeated."),
        (100, 100, "Resuming from checkpoint-100: all 100 steps are done, and the model is saved."),
        (None, 5, "There is no checkpoint yet, so training starts again from the beginning; steps 1-5 will be repeated."),
        (None, 0, ""),
    ],
)
def test_it_is_said_where_a_run_resumes(step: int | None, last: int, said: str) -> None:
    assert where_it_resumes(None if step is None else Path(f"run/checkpoint-{step}"), last, 100) == said


@pytest.mark.long
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run: Path, shell: Cli) -> None:
    flip(run / "checkpoint-6" / "model.safetensors")
    ended = shell("train", "--resume", str(run), "--max-steps", "7")
    assert ended.code == 0, ended.err
    assert "checkpoint-6 is damaged and is not used: model.safetensors is not as it was written" in ended.err
    assert "Resuming from checkpoint-4; steps 5-6 will be repeated." in ended.err
    assert "kept: 7 of 7 steps" in ended.out
    assert shell("verify", "--run", str(run)).code == 0


@pytest.mark.long
def test_without_a_whole_checkpoint_nothing_is_trained(run: Path, shell: Cli) -> None:
    flip(run / "checkpoint-6" / "optimizer.pt")
    shutil.rmtree(run / "checkpoint-4")
    before = (run / "ledger.jsonl").read_bytes()
    ended = shell("train", "--resume", str(run), "--max-steps", "7")
    assert ended.code == 2
    assert "Every checkpoint in" in ended.err
    assert "checkpoint-6: optimizer.pt is not as it was written" in ended.err
    assert "Restore the named files from a backup" in ended.err
    assert (run / "ledger.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_damaged_model_of_a_finished_run_is_saved_again(run: Path, shell: Cli) -> None:
    before = (run / "model.safetensors").read_bytes()
    flip(run / "model.safetensors")
    ended = shell("train", "--resume", str(run))
    assert ended.code == 0, ended.err
    assert "Resuming from checkpoint-6: all 6 steps are done, and the model is saved." in ended.err
    assert (run / "model.safetensors").read_bytes() == before


@pytest.mark.long
def test_a_damaged_ledger_is_reported_and_repaired_before_training(run: Path, shell: Cli) -> None:
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join([*lines[:3], b"garbage\n", *lines[4:]]))
    ended = shell("train", "--resume", str(run), "--max-steps", "7")
    assert ended.code == 0, ended.err
    report, begin = (
        ended.err.index(words) for words in ("is damaged in line 4. The records of these steps are lost: 3.", "Effective batch")
    )
    assert report < begin
    assert "kept in all 6 steps that the ledger records, of 7." in ended.out
    assert "The ledger has no record of 1 earlier step: it was deleted or damaged." in " ".join(ended.out.split())
    assert check_ledger(read_ledger(run / "ledger.jsonl")) == []
    assert (run / "ledger.jsonl.damaged-1").is_file()


@pytest.mark.long
def test_a_missing_ledger_is_said_and_the_run_goes_on(run: Path, shell: Cli) -> None:
    (run / "ledger.jsonl").unlink()
    ended = shell("train", "--resume", str(run), "--max-steps", "7", "--json")
    assert ended.code == 0, ended.err
    assert f"{run / 'ledger.jsonl'} is missing: the records of the steps so far are lost." in ended.err
    assert "Resuming from checkpoint-6; no step has to be repeated." in ended.err
    result = json.loads(ended.out)
    assert (result["finished"], result["promise_kept"], result["steps"], result["lost_steps"]) == (True, True, 1, [[1, 6]])


# A disk that is too small.

MIB = 1 << 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("free", "says"),
    [
        (100 * MIB, ""),
        (
            20 * MIB,
            "With --keep 2, 3 checkpoints are there at once, so later saves will fail: free some space, or give --keep 1.",
        ),
        (10 * MIB, "Not both of them fit: free some space, or give another folder with -o."),
    ],
)
def test_a_disk_that_is_nearly_full_is_a_warning_before_training(
    made: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, free: int, says: str
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: free)
    arguments = (str(made / "model"), "--data", str(made / "rows.jsonl"), *ASKED, "--max-steps", "6", "--save-steps", "2")
    ended = cli("train", *arguments, "-o", str(tmp_path / "new" / "run"), "--dry-run")
    assert ended.code == 0, ended.err
    shown = " ".join(ended.out.split())
    assert (f"and {tmp_path / 'new' / 'run'} has " in shown) == bool(says)
    assert says in shown


@pytest.mark.long
def test_the_size_of_a_checkpoint_is_known_before_there_is_one(made: Path) -> None:
    model, checkpoint = bytes_on_disk(RunCard.read(made / "run" / "run.json"))
    written = sum(file.stat().st_size for file in (made / "run" / "checkpoint-6").iterdir())
    assert (made / "run" / "model.safetensors").stat().st_size == pytest.approx(model, rel=0.02)
    assert written == pytest.approx(checkpoint, rel=0.05)


@pytest.mark.long
def test_a_disk_that_is_smaller_than_the_model_is_refused(made: Path, tmp_path: Path, cli: Cli) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("A small file system cannot be mounted here: that needs root, and a container that allows it.")
    try:
        arguments = (str(made / "model"), "--data", str(made / "rows.jsonl"), *ASKED, "--max-steps", "6")
        ended = cli("train", *arguments, "-o", str(disk / "run"))
        assert ended.code == 2
        assert f"and the disk of {disk / 'run'} has 64.0 KiB in all." in ended.err
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# Deleted while it trains.


def test_records_of_a_deleted_folder_come_from_the_copy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}", encoding="utf-8")
    with copied_to_cache(run):
        shutil.rmtree(run)
        records = RunRecords.of(run)
        assert records.text("run.json") == "{}"
        assert records.restore()
        assert not records.restore()
    assert (run / "run.json").read_text(encoding="utf-8") == "{}"
    shutil.rmtree(run)
    assert RunRecords.of(run).text("run.json") is None, "the copy goes with the run that needed it"


@pytest.mark.long
@pytest.mark.parametrize("waits", [0.0, 3.0])
def test_a_run_whose_folder_is_deleted_before_its_first_step_goes_on(made: Path, tmp_path: Path, waits: float) -> None:
    run = tmp_path / "gone"
    arguments = [str(made / "model"), "--data", str(made / "rows.jsonl"), *ASKED, "--max-steps", "4", "--save-steps", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "brim", "train", *arguments, "-o", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        while process.poll() is None and not (run / "run.json").is_file():
            time.sleep(0.02)
        time.sleep(waits)
        shutil.rmtree(run)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert f"brim: {run} was deleted" in err
    assert "kept: 4 of 4 steps" in out
    assert (run / "run.json").is_file()
    assert [entry.step for entry in read_ledger(run / "ledger.jsonl").steps] == list(range(1, 5))


@pytest.mark.long
def test_a_run_whose_folder_is_deleted_keeps_its_model_and_its_records(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "gone"
    arguments = [str(made / "model"), "--data", str(made / "rows.jsonl"), *ASKED, "--max-steps", "120", "--save-steps", "100"]
    process = subprocess.Popen(
        [sys.executable, "-m", "brim", "train", *arguments, "-o", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not (run / "ledger.jsonl").is_file():
            time.sleep(0.02)
        while process.poll() is None and (run / "ledger.jsonl").read_bytes().count(b"\n") < 5:
            time.sleep(0.02)
        shutil.rmtree(run)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert f"{run} was deleted while training." in err
    assert "kept: 120 of 120 steps" in out
    assert [entry.step for entry in read_ledger(run / "ledger.jsonl").steps] == list(range(1, 121))
    assert (run / "run.json").is_file()
    assert (run / "plan.json").is_file()
    from brim.trainer.verifying import verify_run

    assert verify_run(run).verdict == "whole"
    with pytest.raises(UsageError):
        verify_run(tmp_path)


def test_an_evaluation_that_cannot_be_written_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = RunTrainer.__new__(RunTrainer)
    trainer.args = SimpleNamespace(output_dir=str(tmp_path / "run"), process_index=0)
    trainer.is_world_process_zero = lambda: True
    trainer._records, trainer._unwritten, trainer._told_unwritten = RunRecords(tmp_path / "run"), [], False
    for step in (1, 2):
        trainer.state = SimpleNamespace(global_step=step)
        trainer._note_evaluation(1.5, {}, 3, 0.1)
    assert capsys.readouterr().err.count("No such file or directory") == 1
    (tmp_path / "run").mkdir()
    trainer.restore_records()
    assert [entry.step for entry in read_evaluations(tmp_path / "run")] == [1, 2]
    assert trainer._records.text(EVALUATIONS_FILE) is not None
