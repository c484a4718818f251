"""What `brim doctor` reports by default, in which form, and what a project sets for itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brim.cli._doctor_view import concise_line, github_line
from brim.records import Diagnosis, Finding
from tests.audit.test_sarif import check
from tests.cli.test_doctor import CONFIG, TRAIN

if TYPE_CHECKING:
    from tests.conftest import Cli

PINNED = TRAIN.replace("shuffle=True", "shuffle=True, pin_memory=False")
MANY = "from transformers import TrainingArguments\n" + "".join(
    f"a{index} = TrainingArguments('x', evaluation_strategy='steps')\n" for index in range(5)
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a batch size that is held down, as the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return tmp_path


def settings(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.brim.doctor]\n{text}\n")


def rules_of(cli: Cli, *arguments: str) -> list[str]:
    return [each.rule for each in Diagnosis.from_json(cli("doctor", *arguments, "--json").out).findings]


def test_rules_of_little_value_are_off_until_they_are_asked_for(cli: Cli, project: Path) -> None:
    (project / "train.py").write_text(PINNED, encoding="utf-8")
    assert rules_of(cli) == ["batch-clamped"]
    assert "Note: Off by default: pinning-off (1). `--all` reports them." in cli("doctor").out
    assert rules_of(cli, "--all") == ["batch-clamped", "pinning-off"]
    assert rules_of(cli, "--select", "pinning-off") == ["pinning-off"]
    settings(project, 'select = ["all"]')
    assert rules_of(cli) == ["batch-clamped", "pinning-off"]


def test_equal_findings_are_shown_together_and_kept_apart_in_json(cli: Cli, project: Path) -> None:
    (project / "train.py").write_text(MANY)
    out = cli("doctor", "train.py").out
    assert "dead-argument  5 places" in out
    assert out.count("train.py:") == 4, "three places, and the most severe"
    assert "... and 2 more; --verbose shows all." in out
    assert cli("doctor", "train.py", "--verbose").out.count("dead-argument  train.py:") == 5
    assert rules_of(cli, "train.py") == ["dead-argument"] * 5
    log = json.loads(cli("doctor", "train.py", "--format", "sarif").out)
    check(log)
    assert len(log["runs"][0]["results"]) == 5


def test_concise_is_one_line_for_each_finding(cli: Cli, project: Path) -> None:
    ended = cli("doctor", "--format", "concise")
    assert ended.code == 1
    (line,) = ended.out.splitlines()
    assert line.startswith("train.py:8: high batch-clamped `min(config.batch_size_per_gpu, 2)`")
    assert "Findings: 1 (1 high)." in ended.err


def test_github_gets_workflow_commands_with_its_escapes(cli: Cli, project: Path) -> None:
    (line,) = cli("doctor", "--format", "github").out.splitlines()
    assert line.startswith("::error file=train.py,line=8,endLine=8,title=brim doctor%3A batch-clamped::")
    assert cli("doctor", "--format", "github", "-o", "found.sarif").out.splitlines() == [line]
    check(json.loads((project / "found.sarif").read_text(encoding="utf-8")))


def test_lines_cannot_be_broken_by_what_is_in_them() -> None:
    odd = Finding(
        rule="batch-clamped",
        file="a,b:c.py",
        line=1,
        end_line=1,
        severity="high",
        confidence="high",
        message="100 %\nnext\x1b[31m",
    )
    assert github_line(odd).startswith("::error file=a%2Cb%3Ac.py,")
    assert "::100 %25%0Anext" in github_line(odd)
    assert "\x1b" not in github_line(odd) + concise_line(odd)
    assert "\n" not in concise_line(odd)


def test_the_project_sets_what_is_selected_ignored_and_fails(cli: Cli, project: Path) -> None:
    settings(project, 'ignore = ["batch-clamped"]')
    assert rules_of(cli) == []
    assert rules_of(cli, "--only", "batch-clamped") == ["batch-clamped"], "a flag wins"
    settings(project, 'select = ["pinning-off"]')
    assert rules_of(cli) == []
    settings(project, 'fail-on = "never"')
    assert cli("doctor").code == 0
    assert cli("doctor", "--fail-on", "high").code == 1


def test_rules_are_ignored_in_files_of_a_pattern(cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "old").mkdir()
    (project / "old" / "train.py").write_text(TRAIN.replace("from config import Config", CONFIG), encoding="utf-8")
    assert rules_of(cli) == ["batch-clamped"] * 2
    for pattern in ("old/**", "old", "old/*.py"):
        settings(project, f'per-file-ignores = {{"{pattern}" = ["batch-clamped"]}}')
        assert rules_of(cli) == ["batch-clamped"]
    monkeypatch.chdir(project / "old")
    assert rules_of(cli, "train.py") == [], "found from the target upwards"


def test_the_table_in_the_docs_is_valid(cli: Cli, project: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (project / "pyproject.toml").write_text(table, encoding="utf-8")
    assert cli("doctor").code == 1
    assert cli("doctor").err == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('ignores = ["batch-clamped"]', "ignores: is not a setting. Did you mean ignore?"),
        ('ignore = ["batch-clampd"]', "batch-clamped"),
        ('ignore = "batch-clamped"', "ignore: must be a list of rules."),
        ('fail-on = "hihg"', "fail-on: must be one of high, medium, low, never. Did you mean high?"),
        ("per-file-ignores = 3", "per-file-ignores: must be a table"),
        ("ignore = [", "pyproject.toml is not valid TOML"),
    ],
)
def test_wrong_settings_are_errors(cli: Cli, project: Path, text: str, message: str) -> None:
    settings(project, text)
    ended = cli("doctor")
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err


def test_a_baseline_hides_what_is_known_also_where_it_has_moved(cli: Cli, project: Path) -> None:
    assert cli("doctor", "--write-baseline", "known.json").code == 0
    ended = cli("doctor", "--baseline", "known.json")
    assert ended.code == 0
    assert "In the baseline and not reported: 1." in ended.out
    moved = "# one more line\n" + TRAIN.replace(
        "    batch_size = min(config.batch_size_per_gpu, 2)", "    batch_size  =  min(config.batch_size_per_gpu, 2)"
    )
    (project / "train.py").write_text(moved, encoding="utf-8")
    assert cli("doctor", "--baseline", "known.json").code == 0
    twice = moved + moved.partition("\n\n\n")[2].replace("make_loader", "make_other")
    (project / "train.py").write_text(twice, encoding="utf-8")
    assert rules_of(cli, "--baseline", "known.json") == ["batch-clamped"], "a second one is new"


def test_a_baseline_is_named_from_its_own_folder(cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("doctor", "--write-baseline", "known.json")
    assert json.loads((project / "known.json").read_text())["findings"][0]["file"] == "train.py"
    (project / "sub").mkdir()
    monkeypatch.chdir(project / "sub")
    assert cli("doctor", "..", "--baseline", "../known.json").code == 0


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "brim.baseline/1", "findings": [{"rule": "a"}]}', '{"schema": "other"}'])
def test_what_is_no_baseline_is_an_error(cli: Cli, project: Path, text: str) -> None:
    (project / "known.json").write_text(text)
    ended = cli("doctor", "--baseline", "known.json")
    assert (ended.code, ended.out) == (2, "")
    assert "known.json" in ended.err
    assert cli("doctor", "--baseline", "gone.json").code == 2


def test_flags_without_effect_are_refused(cli: Cli, project: Path) -> None:
    assert "--unsafe has no effect" in cli("doctor", "--unsafe").err
    assert "--write-baseline cannot be combined" in cli("doctor", "--write-baseline", "a.json", "--fix").err
    assert cli("doctor", "--write-baseline", "no/such/a.json").code == 2


def test_unsafe_fixes_are_applied_only_on_request(cli: Cli, project: Path) -> None:
    text = TRAIN.replace(
        "batch_size = min(config.batch_size_per_gpu, 2)",
        "batch_size = config.batch_size_per_gpu\n    if batch_size > 2:\n        batch_size = 2",
    )
    (project / "train.py").write_text(text, encoding="utf-8")
    ended = cli("doctor", "--fix")
    assert "The fix deletes code: `--fix --unsafe` applies it." in ended.err
    assert (project / "train.py").read_text(encoding="utf-8") == text
    assert cli("doctor", "--fix", "--unsafe").code == 0
    assert "if batch_size" not in (project / "train.py").read_text(encoding="utf-8")
