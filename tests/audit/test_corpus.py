"""Programs as people write them: what is marked is found on its line, and what is right is left in peace."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from brim.audit.rules import RULES
from brim.audit.source.examine import examine_source
from brim.audit.source.files import notebook

CORPUS = Path(__file__).parent / "corpus"
NOT_SEEN: set[tuple[str, str]] = set()


def _programs(kind: str) -> list[Path]:
    return sorted(each for each in (CORPUS / kind).iterdir() if not each.name.startswith((".", "__")))


def _expected(program: Path) -> list[tuple[str, int, str]]:
    found = []
    for file in [program] if program.is_file() else sorted(program.rglob("*")):
        if file.suffix not in {".py", ".sh", ".ipynb"}:
            continue
        text = notebook(str(file), file.read_bytes()).text if file.suffix == ".ipynb" else file.read_text(encoding="utf-8")
        for number, line in enumerate(text.split("\n"), start=1):
            marked = re.search(r"# expect: ([\w, -]+)", line)
            found += [(file.name, number, rule.strip()) for rule in (marked[1].split(",") if marked else [])]
    return found


@pytest.mark.parametrize("program", _programs("faulty"), ids=lambda each: each.name)
def test_what_is_wrong_is_found_on_its_line_and_nothing_else(program: Path) -> None:
    expected = [each for each in _expected(program) if (program.name, each[2]) not in NOT_SEEN]
    assert all(rule in RULES for _file, _line, rule in _expected(program))
    _project, found = examine_source([program])
    places = [(Path(each.file).name, each.line, each.end_line, each.rule) for each in found]
    for file, line, rule in expected:
        assert any(where == file and first <= line <= last and name == rule for where, first, last, name in places), (
            file,
            line,
            rule,
        )
    unexpected = [
        (where, first, name)
        for where, first, last, name in places
        if not any(where == file and first <= line <= last and name == rule for file, line, rule in expected)
    ]
    assert unexpected == []


@pytest.mark.parametrize(("name", "rule"), [("cache_helper", "empty-cache-in-loop"), ("ddp_project", "sync-every-micro-batch")])
def test_the_same_is_found_from_the_folder_above(name: str, rule: str, tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "faulty" / name, tmp_path / "work" / name)
    _project, found = examine_source([tmp_path])
    assert rule in {each.rule for each in found}


@pytest.mark.parametrize("program", _programs("clean"), ids=lambda each: each.name)
def test_what_is_right_is_left_in_peace(program: Path) -> None:
    _project, found = examine_source([program])
    assert [(each.file, each.line, each.rule, each.message) for each in found] == []


def test_every_rule_about_source_is_in_the_corpus() -> None:
    marked = {rule for program in _programs("faulty") for _file, _line, rule in _expected(program)}
    about_source = {rule.name for rule in RULES.values() if rule.group not in {"config", "run"}}
    assert about_source - marked <= {"bf16-unsupported", "batch-beyond-noise"}
