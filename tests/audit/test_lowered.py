"""The whole way on one trainer: found by reading, seen by observing, mended, and seen again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import brim
from tests.audit.lowered import EXPECTED, write_trainer
from tests.conftest import Cli


def _observed(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> brim.Observation:
    monkeypatch.chdir(folder)
    return brim.observe([sys.executable, "train.py", *words], output=folder / "run")


def test_every_change_is_found_on_its_line_with_what_is_in_force(tmp_path: Path) -> None:
    found = {
        (Path(each.file).name, each.line, each.rule): each
        for each in brim.doctor(write_trainer(tmp_path), all_rules=True).findings
    }
    assert set(found) == set(EXPECTED)
    for place, in_force in EXPECTED.items():
        assert [row.in_force for row in found[place].in_force][: len(in_force)] == in_force, place
        assert found[place].patch
        assert found[place].is_safe
    assert {rule for (_file, _line, rule), finding in found.items() if finding.severity == "high"} == {
        "batch-clamped",
        "accumulation-clamped",
    }


def test_the_launchers_number_is_what_the_finding_speaks_of(tmp_path: Path) -> None:
    folder = write_trainer(tmp_path)
    (folder / "all.sh").write_text("sh train.sh 64\n")
    [clamp] = [each for each in brim.doctor(folder).findings if each.rule == "batch-clamped"]
    assert "64" in clamp.message
    assert "all.sh:1" in clamp.message
    assert [row.in_force for row in clamp.in_force if row.set == 64] == [2]


def test_what_reading_says_is_what_observing_sees_and_fix_mends_it(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _observed(write_trainer(tmp_path / "before"), monkeypatch, "--batch-size", "32")
    assert before.in_force is not None
    assert (before.in_force.micro_batch, before.in_force.accumulation, before.in_force.sequences) == (2, 16, 32)
    assert before.configured is not None
    assert before.configured.micro_batch == 32
    assert {each.rule for each in before.blamed} >= {"batch-clamped", "accumulation-clamped"}

    after = write_trainer(tmp_path / "after")
    monkeypatch.chdir(tmp_path)
    finished = cli("doctor", str(after), "--all", "--fix", "--yes")
    assert finished.code == 0, finished.err
    assert brim.doctor(after, all_rules=True).findings == ()
    seen = _observed(after, monkeypatch, "--batch-size", "32")
    assert seen.in_force is not None
    assert (seen.in_force.micro_batch, seen.in_force.accumulation, seen.in_force.sequences) == (32, 2, 64)
    assert [(loader.batch_size, loader.num_workers) for loader in seen.loaders][:1] == [(32, 1)]
    assert seen.blamed == ()
