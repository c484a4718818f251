"""A ledger is audited as it is: a file or a folder, whole or torn, of one start or several, short or long."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from brim.audit.run.examine import examine_run
from brim.errors import RecordError
from brim.records.findings import Finding
from brim.records.observations import OBSERVATION_FILE, BatchInForce, Configured, Observation
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


def observation(folder: Path, used: int, *, ledger: str = "ledger.jsonl", blamed: tuple[Finding, ...] = ()) -> None:
    """What `brim observe` writes beside its ledger: 128 were configured."""
    batch = BatchInForce(
        micro_batch=4,
        accumulation=used // 4,
        ranks=1,
        sequences=used,
        least_sequences=used,
        most_sequences=used,
        usual_steps=STEPS,
    )
    asked = Configured(effective_batch=128, source="batch_size, accumulation_steps", where="train.py:7")
    Observation(
        command=("python", "train.py"), started_at="2026-11-20T09:30:00+00:00", seconds=9.0, exit_code=0, reach="steps", versions={},
        configured=asked, in_force=batch, steps=STEPS, settings={}, blamed=blamed, ledger=f"elsewhere/{ledger}",
    ).write(folder / OBSERVATION_FILE)  # fmt: skip


BLAMED = Finding(
    rule="batch-clamped", file="train.py", line=31, end_line=31, severity="high", confidence="high", message="At most 4 are used."
)


@pytest.mark.parametrize("promised", [None, 128], ids=["not in the ledger", "in the ledger"])
def test_the_batch_that_was_observed_is_compared_with_the_configured_one(tmp_path: Path, promised: int | None) -> None:
    observation(tmp_path, 4, blamed=(BLAMED,))
    steps = {"promised_sequences": promised, "sequences": 4, "slices": ()}
    [found] = observed(tmp_path, lambda _step: steps, steps=30, effective_batch=promised).found
    assert (found.rule, found.severity, found.confidence) == ("run-promise-broken", "high", "high")
    assert (
        "used 4 sequences per optimizer step; 128 were configured (batch_size, accumulation_steps, train.py:7)" in found.message
    )
    assert "train.py:31: At most 4 are used." in found.message
    assert [(row.setting, row.set, row.in_force) for row in found.in_force] == [("effective_batch", 128, 4)]


def test_the_factors_of_an_observed_batch_are_named(tmp_path: Path) -> None:
    observation(tmp_path, 32)
    [found] = observed(tmp_path, lambda _step: {"promised_sequences": None}, effective_batch=None).found
    assert "Each step was 4 (micro-batch) x 8 (accumulation) x 1 (ranks)." in found.message


@pytest.mark.parametrize("case", ["as configured", "of another ledger", "broken"])
def test_an_observation_that_says_nothing_else_is_silent(tmp_path: Path, case: str) -> None:
    observation(
        tmp_path,
        128 if case == "as configured" else 4,
        ledger="ledger-2.jsonl" if case == "of another ledger" else "ledger.jsonl",
    )
    if case == "broken":
        (tmp_path / OBSERVATION_FILE).write_text("{")
    assert not observed(tmp_path, lambda _step: {"promised_sequences": None}, effective_batch=None).found


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
