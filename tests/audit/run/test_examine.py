"""A ledger is audited as it is: a file or a folder, whole or torn, of one start or several, short or long."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from brim.audit.run.examine import examine_run
from brim.errors import RecordError
from brim.step.ledger import LedgerWriter
from tests.audit.run.ledgers import BATCH, HEADER, STEPS, examined, observed, rules, step_of, write


def test_a_healthy_run_gets_silence_and_its_figures(tmp_path: Path) -> None:
    report = examined(tmp_path)
    assert not report.found
    assert not report.notes
    assert report.steps == STEPS
    assert report.tokens_per_second == pytest.approx(900 / 1.01, rel=0.02)
    assert report.sequences_per_second == pytest.approx(BATCH / 1.01, rel=0.02)
    assert report.wait_share == pytest.approx(0.01, rel=0.1)
    assert report.peak_bytes == 14 << 30
    assert report.limit_bytes == 16 << 30
    assert report.loss is not None
    assert report.loss.word == "keep"
    assert report.noise is None


def test_a_watched_run_that_is_healthy_gets_silence_too(tmp_path: Path) -> None:
    report = observed(tmp_path)
    assert not report.found
    assert report.notes == ["ledger.jsonl: The run was only watched: how many sequences each step took is known, and not which."]


def test_the_folder_of_a_run_serves_as_its_ledger(tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl", [step_of(number) for number in range(1, 31)])
    assert examine_run(tmp_path, "run").steps == 30


def test_a_short_run_gets_no_statistics_and_a_note_that_says_so(tmp_path: Path) -> None:
    report = examined(tmp_path, lambda _step: {"wait_seconds": 5.0}, steps=19)
    assert not report.found
    assert report.notes == ["ledger.jsonl: There are too few steps (19) to judge speed, memory and loss: 20 are needed."]
    assert report.wait_share == pytest.approx(5 / 6, rel=0.05)


def test_a_run_that_has_not_taken_a_step_is_no_error(tmp_path: Path) -> None:
    report = examined(tmp_path, steps=0)
    assert not report.found
    assert report.steps == 0
    assert report.wait_share is None


def test_a_torn_end_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", [step_of(number) for number in range(1, 41)])
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) - 50])
    report = examine_run(path, "ledger.jsonl")
    assert report.steps == 39
    assert not report.found
    assert [note.partition(": ")[2] for note in report.notes] == [
        "The last line is not whole: the run was killed in the middle of writing it, or is writing it now.",
        "There is no summary: the run goes on, or was killed.",
    ]


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "ledger.jsonl", HEADER)
    for number in range(1, 31):
        writer.write(step_of(number))
    writer.close(finished=False, reason="KeyboardInterrupt")
    assert examine_run(tmp_path, "run").notes == ["run: The run ended early, after step 30: KeyboardInterrupt"]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", [step_of(number) for number in range(1, 31)])
    lines = path.read_text().splitlines()
    lines[10] = lines[10][:50]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match="line 11"):
        examine_run(path, "ledger.jsonl")


def test_steps_that_were_taken_again_count_once_and_lines_are_those_in_force(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [step_of(number) for number in range(1, 31)])
    again = [step_of(number, **({"sequences": 7} if number == 25 else {})) for number in range(21, 61)]
    write(path, again, dataclasses.replace(HEADER, resumed_from_step=20))
    report = examine_run(path, "ledger.jsonl")
    assert report.steps == 60
    [found] = [each for each in report.found if "Step 25" in each.message]
    line = json.loads(path.read_text().splitlines()[found.line - 1])
    assert (line["step"], line["sequences"]) == (25, 7)


def test_speed_and_memory_are_those_of_the_machine_that_the_run_is_on_now(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [step_of(number, compute_seconds=0.2) for number in range(1, 61)])
    slower = [step_of(number, compute_seconds=2.0) for number in range(61, 121)]
    write(path, slower, dataclasses.replace(HEADER, resumed_from_step=60, device="cuda:1"))
    report = examine_run(path, "ledger.jsonl")
    assert not report.found
    assert report.tokens_per_second == pytest.approx(900 / 2.01, rel=0.02)


def test_the_same_machine_that_gets_slower_is_told_across_a_continuation(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [step_of(number) for number in range(1, 61)])
    write(
        path,
        [step_of(number, compute_seconds=2.0) for number in range(61, 121)],
        dataclasses.replace(HEADER, resumed_from_step=60),
    )
    assert rules(examine_run(path, "ledger.jsonl")) == ["run-slowing"]


def test_a_file_that_is_no_ledger_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(RecordError):
        examine_run(path, "ledger.jsonl")
