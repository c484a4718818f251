"""A run says on the screen what is in force when it begins, and how it went when it ends; with a ledger and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from brim.machine.device import CpuDevice, Reading
from brim.machine.recorded import RecordedDevice, Recording
from brim.machine.screen import say
from brim.step import book
from brim.step.batch import BatchPlan
from brim.step.book import Book, reason_of
from brim.step.budget import Budget
from brim.step.ledger import read_ledger
from brim.step.oom import Guard
from tests.step import toys
from tests.step.faults import STEPS, Fault, own_loop, sequences, swiftly, tiny
from tests.step.test_arguments import run_one, steps

BEGIN = "brim: effective batch 5, steps in an epoch: 3, micro-batches of up to 3 sequences, ledger: "


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    with swiftly():
        yield


@pytest.mark.parametrize("has_ledger", [False, True], ids=["without-a-ledger", "with-a-ledger"])
def test_a_run_says_one_line_at_its_start_and_one_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_ledger: bool
) -> None:
    loop = steps(ledger=tmp_path / "run" if has_ledger else None)
    path = tmp_path / "run" / "ledger.jsonl" if has_ledger else "none"
    assert capsys.readouterr().err == f"{BEGIN}{path}.\n"
    entries = [step.run() for step in loop]
    padding = 1 - sum(entry.tokens or 0 for entry in entries) / sum(entry.padded_tokens or 0 for entry in entries)
    counted = f"Steps: 3, sequences: 14, padding: {padding:.1%}, splits after out of memory: 0, skipped: 0."
    said = capsys.readouterr()
    assert said.err == f"brim: the promise was kept. {counted}\n"
    assert not said.out


def test_a_run_that_goes_on_says_after_which_step(capsys: pytest.CaptureFixture[str]) -> None:
    first = steps()
    run_one(first)
    capsys.readouterr()
    steps(resume=first.state())
    assert capsys.readouterr().err == f"{BEGIN}none. Resuming after step 1.\n"


def test_a_loop_that_is_left_says_so_and_after_which_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in steps(ledger=tmp_path):
        if step.run().step == 2:
            break
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("brim: ended early after step 2: The loop was left. Steps: 2, sequences: 10, ")
    summary = read_ledger(tmp_path / "ledger.jsonl").summary
    assert summary is not None
    assert (summary.finished, summary.reason) == (False, "The loop was left.")


def test_an_error_ends_the_run_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(features: Any) -> Any:
        raise OSError("the disk is gone\nand so is the rest")

    with pytest.raises(OSError, match="the disk is gone"):
        run_one(steps(collate=broken))
    assert capsys.readouterr().err.splitlines()[-1] == "brim: ended early after step 0: the disk is gone"


def test_a_reason_is_one_line_and_never_empty() -> None:
    assert reason_of(ValueError("first\nsecond")) == "first"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_splits_are_counted_in_the_last_line() -> None:
    ran = own_loop(Fault("forward", 2, 3))
    assert "splits after out of memory: 1," in ran.said[-1]
    assert len(ran.said) == 3
    assert not ran.warned


def test_steps_without_a_supervised_token_are_said_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [{**one, "labels": [toys.IGNORED] * len(one["labels"])} for one in sequences()]
    model = tiny()
    before = model.lm_head.weight.detach().clone()
    entries = [step.run() for step in steps(data=data, model=model, ledger=tmp_path)]
    assert [entry.skipped for entry in entries] == [True] * STEPS
    _begin, said, end = capsys.readouterr().err.splitlines()
    assert said == "brim: step 1 has no supervised token, so it was skipped. Further ones are only counted."
    assert end.endswith(f"skipped: {STEPS}.")
    assert [entry.skipped for entry in read_ledger(tmp_path / "ledger.jsonl").steps] == [True] * STEPS
    assert model.lm_head.weight.equal(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_speaks_and_writes(rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = BatchPlan([4, 5, 6], effective_batch=2, ranks=2)
    ranks = cast("Any", SimpleNamespace(rank=rank, size=2))
    kept = Book(plan, Guard(Budget.tokens(8192)), ranks, CpuDevice(), path=tmp_path / "ledger.jsonl")
    kept.close(finished=True)
    kept.close(finished=False, reason="Once is enough.")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (2 if rank == 0 else 0)
    assert (tmp_path / "ledger.jsonl").exists() == (rank == 0)
    if rank == 0:
        assert "micro-batches of up to 8,192 tokens" in said[0]
        assert said[1] == "brim: the promise was kept."


def test_what_is_said_is_no_output_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    say("brim: a sentence.")
    assert capsys.readouterr() == ("", "brim: a sentence.\n")


def test_the_machine_is_looked_at_when_a_second_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "PULSE_SECONDS", 0.0)
    for entry in (step.run() for step in steps()):
        assert entry.pulse is not None
        assert entry.pulse.workers == 0
        assert entry.pulse.main_cpu is not None
    monkeypatch.setattr(book, "PULSE_SECONDS", 1e9)
    assert all(step.run().pulse is None for step in steps())


def test_workers_of_the_loader_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "PULSE_SECONDS", 0.0)
    pulses = [step.run().pulse for step in steps(workers=2)]
    assert [pulse.workers for pulse in pulses if pulse is not None] == [1, 2, 2]


def test_a_header_tells_what_the_device_can_hold_beside_what_others_have(tmp_path: Path) -> None:
    readings = (Reading(total_bytes=15 << 30, free_bytes=9 << 30, reserved_bytes=2 << 30),)
    device = RecordedDevice(Recording(device="cuda:0", readings=readings))
    plan = BatchPlan([4, 5, 6], effective_batch=2)
    Book(plan, Guard(Budget.tokens(64)), cast("Any", SimpleNamespace(rank=0, size=1)), device, path=tmp_path / "ledger.jsonl")
    assert read_ledger(tmp_path / "ledger.jsonl").headers[0].memory_limit_bytes == 11 << 30
