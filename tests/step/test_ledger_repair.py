"""A damaged ledger is found before anything is added to it, and what it still holds is kept."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest

from brim.records import LedgerHeader
from brim.step.checker import check_ledger
from brim.step.ledger import LedgerWriter, read_ledger
from brim.step.ledger_repair import check_lines, last_step_of, lost_steps, repair_ledger
from tests.step.ledgers import HEADER, step_of, written


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A header, steps 1 to 6, a summary; then a continuation after step 4 with steps 5 to 8 and a summary: 14 lines."""
    path = written(tmp_path / "ledger.jsonl", range(1, 7))
    return written(path, range(5, 9), dataclasses.replace(HEADER, resumed_from_step=4))


def damage(path: Path, *numbers: int, by: bytes = b"\x00garbage{\n") -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    for number in numbers:
        lines[number - 1] = by
    path.write_bytes(b"".join(lines))


def repaired(path: Path) -> tuple[str, list[int]]:
    """What is said, and the steps that are left."""
    said: list[str] = []
    repair_ledger(path, said.append)
    return " ".join(said), [entry.step for entry in read_ledger(path).steps]


def test_a_whole_ledger_is_left_alone(path: Path) -> None:
    before = path.read_bytes()
    assert repaired(path) == ("", [1, 2, 3, 4, 5, 6, 7, 8])
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["ledger.jsonl"]


def test_a_line_in_the_middle_is_left_out_and_its_step_is_named(path: Path) -> None:
    damage(path, 3, 4)
    before = path.read_bytes()
    said, steps = repaired(path)
    assert f"{path} is damaged in line 3, 4. The records of these steps are lost: 2-3." in said
    assert (path.parent / "ledger.jsonl.damaged-1").read_bytes() == before
    assert steps == [1, 4, 5, 6, 7, 8]
    ledger = read_ledger(path)
    assert lost_steps(ledger) == [(2, 3)]
    assert check_ledger(ledger) == []
    assert repaired(path)[0] == ""


def test_a_step_that_is_not_there_for_any_other_reason_is_still_a_broken_promise(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for number, line in enumerate(lines, 1) if number != 3))
    assert repaired(path)[0] == ""
    assert check_ledger(read_ledger(path)) == ["Step 3 came where step 2 was due."]


def test_a_damaged_line_of_steps_that_were_superseded_loses_nothing(path: Path) -> None:
    damage(path, 7)
    said, steps = repaired(path)
    assert "No step's record is lost." in said
    assert steps == list(range(1, 9))
    assert check_ledger(read_ledger(path)) == []


@pytest.mark.parametrize("number", [1, 9], ids=["first", "of-a-continuation"])
def test_a_header_is_known_again_by_what_stands_around_it(path: Path, number: int) -> None:
    damage(path, number)
    _said, steps = repaired(path)
    assert steps == list(range(1, 9))
    assert check_ledger(read_ledger(path)) == []


def test_records_that_ran_together_or_stand_behind_zeros_are_kept(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0" * 512 + lines[1], lines[2].rstrip() + lines[3], *lines[4:]]))
    said, steps = repaired(path)
    assert "is damaged in line 2, 3. No step's record is lost." in said
    assert steps == list(range(1, 9))
    assert check_ledger(read_ledger(path)) == []


def test_copies_of_damaged_ledgers_are_all_kept(path: Path) -> None:
    for number in (1, 2):
        damage(path, 3)
        repaired(path)
        assert (path.parent / f"ledger.jsonl.damaged-{number}").is_file()


def test_a_torn_last_line_is_the_writers_business(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    check = check_lines(path)
    assert (check.damaged, check.last_step) == ([], 8)


def test_the_last_step_is_read_from_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.step import ledger_repair

    monkeypatch.setattr(ledger_repair, "_BLOCK_BYTES", 16)
    assert last_step_of(path) == 8
    damage(path, 14, 13)
    assert last_step_of(path) == 7
    with LedgerWriter(path, dataclasses.replace(HEADER, resumed_from_step=6)):
        assert last_step_of(path) == 6
    assert last_step_of(path.with_name("none")) == 0
    path.write_bytes(b"garbage\n" * 9)
    assert last_step_of(path) == 0


def test_a_file_of_garbage_has_no_records(path: Path) -> None:
    path.write_bytes(b"garbage\n" * 3)
    assert check_lines(path).records == 0


def test_a_ledger_that_ends_before_its_checkpoint_says_which_steps_it_lacks() -> None:
    from brim.records import Ledger

    header: LedgerHeader = dataclasses.replace(HEADER, resumed_from_step=6, unrecorded_steps=((1, 6),))
    ledger = Ledger((header,), [step_of(7), step_of(8)])
    assert check_ledger(ledger) == []
    assert lost_steps(ledger) == [(1, 6)]


# Deleted while it is written.


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_ledger_that_is_deleted_is_written_again_with_all_its_lines(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    path.parent.mkdir()
    said: list[str] = []
    with LedgerWriter(path, HEADER, on_trouble=said.append) as writer:
        writer.write(step_of(1))
        path.unlink()
        if what == "folder":
            path.parent.rmdir()
        writer.write(step_of(2))
        assert [entry.step for entry in read_ledger(path).steps] == [1, 2]
        writer.write(step_of(3))
    assert said == [f"{path} was deleted while it was in use. It is restored with all its lines."]
    assert writer.times_restored == 1
    assert [entry.step for entry in read_ledger(path).steps] == [1, 2, 3]
    assert [file.name for file in path.parent.iterdir()] == ["ledger.jsonl"]


def test_a_ledger_that_an_editor_has_replaced_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    said: list[str] = []
    with LedgerWriter(path, HEADER, on_trouble=said.append) as writer:
        writer.write(step_of(1))
        path.unlink()
        path.write_text("edited\n", encoding="utf-8")
        writer.write(step_of(2))
    assert [entry.step for entry in read_ledger(path).steps] == [1, 2]
    assert (tmp_path / "ledger.jsonl.damaged-1").read_text(encoding="utf-8") == "edited\n"


def test_a_deleted_ledger_is_restored_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    said: list[str] = []
    with LedgerWriter(path, HEADER, on_trouble=said.append) as writer:
        for number in range(1, 4):
            writer.write(step_of(number))
        size = path.stat().st_size
        path.unlink()
        _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 10, hard))
        try:
            writer.write(step_of(4))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert not path.exists()
        writer.write(step_of(5))
    assert [entry.step for entry in read_ledger(path).steps] == [1, 2, 3, 4, 5]


def test_a_last_step_that_only_the_summary_knows_is_named_when_the_run_continues(path: Path) -> None:
    damage(path, 13)  # step 8, above the summary
    said, steps = repaired(path)
    assert steps[-1] == 7
    assert "The records of these steps are lost: 8." in said
    written(path, range(9, 11), dataclasses.replace(HEADER, resumed_from_step=last_step_of(path)))
    ledger = read_ledger(path)
    assert check_ledger(ledger) == []
    assert lost_steps(ledger) == [(8, 8)]


def test_a_lost_step_that_was_taken_again_later_is_not_called_lost(path: Path) -> None:
    written(path, range(9, 10), dataclasses.replace(HEADER, resumed_from_step=8))
    written(path, range(7, 9), dataclasses.replace(HEADER, resumed_from_step=6))
    damage(path, 13)  # step 8 of the second part; the last one has it too
    said, steps = repaired(path)
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "No step's record is lost." in said
    assert lost_steps(read_ledger(path)) == []
