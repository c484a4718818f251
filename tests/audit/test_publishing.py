"""What leaves doctor: the costliest first, each once, with its code, its patch and its cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brim.audit.found import Found
from brim.audit.patching import Desk
from brim.audit.publishing import in_order, publish_all
from brim.audit.source.module import Source
from brim.records import Diagnosis, Finding, InForce
from tests.audit.parts import add_rules, edit, found, source_of


def publish(one: Found, source: Source | None) -> Finding:
    sources = {} if source is None else {one.file: source}
    (finding,) = publish_all([one], sources, Desk(sources))
    return finding


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rules(monkeypatch)


def test_the_costliest_comes_first() -> None:
    low = found("a.py", 1, rule="test-low")
    medium = found("a.py", 2, rule="test-medium")
    unsure = found("a.py", 3, confidence="low")
    late = found("b.py", 4)
    early = found("a.py", 9)
    raised = found("a.py", 8, rule="test-low", severity="high")
    assert in_order([low, medium, unsure, late, raised, early]) == [early, late, raised, unsure, medium, low]


def test_the_same_finding_is_told_once() -> None:
    one = found("a.py", 1)
    assert in_order([one, found("a.py", 1), found("a.py", 1, message="Another.")]) == [one, found("a.py", 1, message="Another.")]


def test_a_finding_has_its_code_and_the_severity_of_its_rule() -> None:
    source = Source("train.py", "a = 1\nb = f(\n    2,\n)\n")
    one = publish(found(line=2, end_line=4, rule="test-medium"), source)
    assert one.code == "b = f(\n    2,\n)"
    assert (one.severity, one.patch, one.is_safe, one.cell) == ("medium", None, False, None)


def test_a_finding_of_a_ledger_has_no_code() -> None:
    one = publish(found("ledger.jsonl", 7), None)
    assert (one.file, one.line, one.code) == ("ledger.jsonl", 7, "")


def test_a_patch_is_a_diff_and_safe_only_if_it_can_be_made(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    source = source_of(path, b"size = min(x, 2)\n")
    good = found(str(path), edits=(edit(str(path), 1, 7, 16, "x"),), is_safe=True)
    broken = found(str(path), edits=(edit(str(path), 1, 7, 16, "("),), is_safe=True, message="broken")
    mended, left = publish_all([good, broken], {str(path): source}, Desk({str(path): source}))
    assert mended.patch is not None
    assert "\n-size = min(x, 2)\n+size = x\n" in mended.patch
    assert mended.is_safe
    assert (left.patch, left.is_safe) == (None, False)


def test_a_finding_in_a_notebook_names_its_cell(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    cells = [
        {"cell_type": "code", "source": ["a = 1\n", "b = 2"]},
        {"cell_type": "markdown", "source": "text"},
        {"cell_type": "code", "source": "c = 3"},
    ]
    source = source_of(path, json.dumps({"cells": cells}).encode())
    assert [publish(found(str(path), line), source).cell for line in (1, 2, 3)] == [1, 1, 2]
    assert publish(found(str(path), 3), source).code == "c = 3"


def test_a_diagnosis_survives_its_file(tmp_path: Path) -> None:
    rows = (InForce(setting="batch", set=64, in_force=2, when="free_gb < 8"), InForce(setting="batch", set="auto", in_force=None))
    finding = publish(found(in_force=rows), None)
    whole = Diagnosis(targets=("train.py",), findings=(finding,), files=1, lines=2, notes=("a",))
    assert Diagnosis.read(whole.write(tmp_path / "found.json")) == whole
    assert whole.at_least("low") == whole.findings
