"""`brim doctor` as a person types it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len

from brim.audit.rules import RULES
from brim.records import Diagnosis

if TYPE_CHECKING:
    from tests.conftest import Cli

CONFIG = """\
from dataclasses import dataclass


@dataclass
class Config:
    batch_size_per_gpu: int = 64
"""
TRAIN = """\
from torch.utils.data import DataLoader

from config import Config


def make_loader(dataset, config: Config):
    # the card is small, 显卡很小
    batch_size = min(config.batch_size_per_gpu, 2)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)
"""
CLEAN = TRAIN.replace("min(config.batch_size_per_gpu, 2)", "config.batch_size_per_gpu")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a batch size that is held down, and us in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return tmp_path


@pytest.fixture
def clean(project: Path) -> Path:
    (project / "train.py").write_text(CLEAN, encoding="utf-8")
    return project


def test_a_clamp_is_told_with_its_place_its_table_and_its_patch(cli: Cli, project: Path) -> None:
    ended = cli("doctor")
    assert ended.code == 1
    assert ended.err == ""
    for text in (
        "Batch size (1)",
        "high  batch-clamped  train.py:8",
        "    -    batch_size = min(config.batch_size_per_gpu, 2)",
        "    +    batch_size = config.batch_size_per_gpu",
        "Most severe: batch-clamped, train.py:8.\nFindings: 1 (1 high). Files read: 2, lines: 15.",
        "brim doctor --explain batch-clamped",
        "brim doctor --fix .",
    ):
        assert text in ended.out
    assert re.search(r"batch_size_per_gpu +64 +2\n", ended.out)


def test_clean_code_gets_one_calm_line(cli: Cli, clean: Path) -> None:
    ended = cli("doctor", ".")
    assert (ended.code, ended.out, ended.err) == (0, "No findings. Files read: 2, lines: 15.\n", "")


def test_json_is_the_record(cli: Cli, project: Path) -> None:
    ended = cli("doctor", "train.py", "--json")
    assert (ended.code, ended.err) == (1, "")
    found = Diagnosis.from_json(ended.out)
    (finding,) = found.findings
    assert (finding.rule, finding.file, finding.line, finding.severity) == ("batch-clamped", "train.py", 8, "high")
    assert {(row.set, row.in_force) for row in finding.in_force} >= {(64, 2)}
    assert found.targets == ("train.py",)
    assert cli("doctor", "train.py", "--format", "json").out == ended.out


@pytest.mark.parametrize(("fail_on", "code"), [("high", 1), ("medium", 1), ("low", 1), ("never", 0)])
def test_the_exit_code_follows_fail_on(cli: Cli, project: Path, fail_on: str, code: int) -> None:
    assert cli("doctor", "--fail-on", fail_on).code == code


def test_sarif_goes_to_stdout_or_to_a_file_with_the_text_for_the_log(cli: Cli, project: Path) -> None:
    log = json.loads(cli("doctor", "--format", "sarif").out)
    assert log["runs"][0]["results"][0]["ruleId"] == "batch-clamped"
    ended = cli("doctor", "--format", "sarif", "-o", "found.sarif")
    assert json.loads((project / "found.sarif").read_text(encoding="utf-8")) == log
    assert "high  batch-clamped  train.py:8" in ended.out
    assert "Written: found.sarif" in ended.err
    cli("doctor", "-o", "found.json")
    assert Diagnosis.read("found.json").findings[0].rule == "batch-clamped"


def test_fix_shows_the_diff_mends_and_looks_again(cli: Cli, project: Path) -> None:
    (project / "train.py").chmod(0o755)
    ended = cli("doctor", "--fix")
    assert ended.code == 0
    assert "+    batch_size = config.batch_size_per_gpu" in ended.err
    assert "Fixed: 1, in train.py." in ended.err
    assert ended.out.startswith("No findings.")
    assert (project / "train.py").read_text(encoding="utf-8") == CLEAN
    assert (project / "train.py").stat().st_mode & 0o777 == 0o755
    assert cli("doctor", "--fix").err == ""


def test_diff_changes_nothing_and_git_applies_it(cli: Cli, project: Path) -> None:
    ended = cli("doctor", "--diff")
    assert ended.code == 1
    assert (project / "train.py").read_text(encoding="utf-8") == TRAIN
    subprocess.run(["git", "init", "--quiet"], check=True, capture_output=True)
    subprocess.run(["git", "apply", "-"], input=ended.out.encode(), check=True, capture_output=True)
    assert (project / "train.py").read_text(encoding="utf-8") == CLEAN
    assert cli("doctor", "--diff").err == "There is no safe fix.\n"


def test_fix_never_follows_a_link_out_of_its_target(cli: Cli, project: Path) -> None:
    inside = project / "inside"
    inside.mkdir()
    (inside / "config.py").write_text(CONFIG)
    (inside / "train.py").symlink_to(project / "train.py")
    ended = cli("doctor", "inside", "--fix")
    assert ended.code == 1
    assert "is outside of the targets" in ended.err
    assert "--fix inside" not in ended.out
    assert (project / "train.py").read_text(encoding="utf-8") == TRAIN


def test_a_comment_holds_back_and_is_counted(cli: Cli, project: Path) -> None:
    text = TRAIN.replace("gpu, 2)", "gpu, 2)  # brim: ignore[batch-clamped]").replace(
        "return", "# brim: ignore[nonsense]\n    return"
    )
    (project / "train.py").write_text(text, encoding="utf-8")
    ended = cli("doctor")
    assert ended.code == 0
    assert "Suppressed by comments: 1." in ended.out
    assert "train.py:9: unknown rule 'nonsense' in a comment." in ended.out


def test_rules_can_be_left_out_or_be_the_only_ones(cli: Cli, project: Path) -> None:
    assert cli("doctor", "--ignore", "batch-clamped,pinning-off").code == 0
    assert cli("doctor", "--ignore", "pinning-off", "--ignore", "batch_clamped").code == 0
    assert cli("doctor", "--only", "pinning-off").code == 0
    assert cli("doctor", "--only", "batch-clamped").code == 1


def test_a_rule_is_explained(cli: Cli) -> None:
    ended = cli("doctor", "--explain", "batch-clamped")
    assert (ended.code, ended.err) == (0, "")
    for text in ("batch-clamped\n", "Wrong:\n", "Right:\n", "Fix: ", "Sources:\n  https://"):
        assert text in ended.out
    document = json.loads(cli("doctor", "--explain", "batch-clamped", "--json").out)
    assert (document["schema"], document["rule"]) == ("brim.rule/1", "batch-clamped")


def test_all_rules_are_listed(cli: Cli) -> None:
    ended = cli("doctor", "--rules")
    assert ended.code == 0
    assert "batch-clamped" in ended.out
    assert cli("doctor", "--explain", "all").out == ended.out
    document = json.loads(cli("doctor", "--rules", "--json").out)
    assert document["schema"] == "brim.rules/1"
    assert f"Rules: {len(document['rules'])}." in ended.out


def test_a_file_of_a_project_that_does_not_parse_is_a_note_and_a_file_alone_an_error(cli: Cli, project: Path) -> None:
    (project / "broken.py").write_text("a = 1\nb = (\n")
    ended = cli("doctor")
    assert ended.code == 1
    assert "batch-clamped" in ended.out
    assert re.search(r"Note: Not audited: broken\.py:2 is not valid Python", ended.out)
    alone = cli("doctor", "broken.py")
    assert (alone.code, alone.out) == (2, "")
    assert "broken.py:2" in alone.err


BAD = [
    (("nowhere.py",), "No such file or folder: nowhere.py."),
    (("",), "No such file or folder: ''."),
    (("binary.py",), "binary.py is not a text file."),
    (("notes.txt",), "notes.txt is not a file that doctor can audit."),
    (("empty",), "There is nothing to audit in 'empty'."),
    (("data.jsonl",), "data.jsonl"),
    (("--explain", "batch-clmped"), "Nearest: batch-clamped"),
    (("--explain", "batch-clamped", "train.py"), "do not audit anything: train.py"),
    (("--ignore", "nonsense"), "There is no rule 'nonsense'"),
    (("--only", ","), "There is no rule ''."),
    (("--gpu", "voodoo"), "There is no GPU 'voodoo'"),
    (("--gpus", "0"), "--gpus"),
    (("--json", "--format", "sarif"), "--json and --format sarif exclude each other"),
    (("--json", "--diff"), "--diff prints a diff; it cannot be combined"),
    (("--format", "sarif", "--diff"), "--diff prints a diff; it cannot be combined with --json or --format sarif"),
    (("--rules", "-o", "rules.json"), "--output would be ignored"),
    (("--explain", "batch-clamped", "--fix", "--gpu", "t4"), "--fix, --gpu would be ignored"),
    (("--explain", "batch-clamped", "--format", "sarif"), "not sarif"),
    (("--rules", "--explain", "all"), "--explain and --rules exclude each other"),
    (("--yes",), "has no effect without --fix"),
    (("--only", "batch-clamped", "--ignore", "batch_clamped"), "name the same rule: batch-clamped"),
    (("--no-predict", "--model", "gpt2"), "--model would be ignored"),
    (("--model", "gpt2x"), "There is no model 'gpt2x'"),
    (("--seq-len", "0"), "--seq-len"),
    (("--fix", "--diff"), "--fix and --diff exclude each other"),
    (("-o", "no/such/folder.json"), "name a file in an existing folder"),
    (("--fail-on", "often"), "'often' is not one of"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[" ".join(arguments) for arguments, _says in BAD])
def test_wrong_usage_exits_with_2_and_says_what_can_be_given(
    cli: Cli, project: Path, arguments: tuple[str, ...], says: str
) -> None:
    (project / "binary.py").write_bytes(b"a = 1\0\0")
    (project / "notes.txt").write_text("hello\n")
    (project / "data.jsonl").write_text('{"text": "hello"}\n')
    (project / "empty").mkdir()
    ended = cli("doctor", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert ended.err.startswith("brim: ")
    assert "Traceback" not in ended.err


def test_reading_code_imports_no_torch(project: Path) -> None:
    program = (
        "import sys, json; from brim.cli import main; code = main(['doctor', '.']);"
        "print(json.dumps([code, [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]]), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=project)
    assert json.loads(ended.stderr) == [1, []]


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys, json; from brim.cli import main; code = main(['doctor', '--help']);"
        "print(json.dumps([code, [m for m in ('torch', 'pydantic', 'rich', 'yaml') if m in sys.modules]]), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(ended.stderr) == [0, []]


def in_terminal(folder: Path, *arguments: str, columns: int = 80, answer: str = "", **environment: str) -> tuple[int, str]:
    """Run `brim doctor` in a real terminal, and answer its question."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (40, columns))
    with subprocess.Popen(
        [sys.executable, "-m", "brim", "doctor", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(follower)
        os.write(leader, answer.encode())
        parts = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            parts.append(part)
        code = process.wait()
    os.close(leader)
    return code, b"".join(parts).decode()


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_without_colour_is_enough(project: Path, columns: int) -> None:
    code, out = in_terminal(project, columns=columns, NO_COLOR="1")
    assert code == 1
    assert "\x1b[3" not in out
    text = re.sub(r"\x1b\[[0-9;]*[mK]", "", out)
    assert max(cell_len(line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")) <= columns
    assert "train.py:8" in text


def test_on_a_terminal_fix_asks(project: Path) -> None:
    _code, out = in_terminal(project, "--fix", answer="n\n")
    assert "Apply this? Files: 1. [y/N]" in out
    assert "Nothing was changed." in out
    assert (project / "train.py").read_text(encoding="utf-8") == TRAIN
    _code, out = in_terminal(project, "--fix", answer="y\n")
    assert (project / "train.py").read_text(encoding="utf-8") == CLEAN


def test_code_cannot_steer_the_terminal(cli: Cli, project: Path) -> None:
    (project / "train.py").write_text(TRAIN.replace("gpu, 2)", "gpu, 2)  # \x1b[31mred\x07"), encoding="utf-8")
    assert "\x1b" not in cli("doctor").out
    assert "\x1b" not in cli("doctor", "--fix").err


def test_a_ledger_and_the_folder_of_a_run_are_audited_as_a_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "ledger.jsonl").write_text(RULES["run-promise-broken"].bad["ledger.jsonl"])
    (run / "trainer_state.json").write_text('{"train_batch_size": 4}')
    for target in ("run", "run/ledger.jsonl"):
        ended = cli("doctor", target)
        assert ended.code == 1
        assert re.search(r"high  run-promise-broken  run/ledger\.jsonl:\d+", ended.out)
        assert "Files read: 1, lines: 25." in ended.out


def test_a_project_with_a_ledger_in_it_is_audited_as_both(cli: Cli, project: Path) -> None:
    (project / "ledger.jsonl").write_text(RULES["run-promise-broken"].bad["ledger.jsonl"])
    out = cli("doctor").out
    assert "batch-clamped" in out
    assert "run-promise-broken" in out


def test_a_notebook_is_mended_in_its_cell(cli: Cli, project: Path) -> None:
    (project / "train.py").unlink()
    sources = ["%pip install torch", CONFIG, TRAIN.replace("from config import Config\n\n\n", "")]
    cells: list[dict[str, object]] = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": text} for text in sources
    ]
    text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
    (project / "train.ipynb").write_text(text)
    ended = cli("doctor", "train.ipynb")
    assert re.search(r"high  batch-clamped  train\.ipynb:\d+ \(cell 3\)", ended.out)
    assert cli("doctor", "train.ipynb", "--fix").code == 0
    assert (project / "train.ipynb").read_text() == text.replace("min(config.batch_size_per_gpu, 2)", "config.batch_size_per_gpu")


def test_a_file_that_is_no_config_is_told_and_not_called_clean(cli: Cli, project: Path) -> None:
    (project / "package.json").write_text('{"name": "x", "version": "1.0.0"}')
    assert "package.json is no training config that doctor knows" in cli("doctor", "package.json").out
    assert "package.json" not in cli("doctor", ".").out
    (project / "broken.json").write_text('{"train_batch_size": 4,\n"gradient_accumulation_steps": ,\n')
    alone = cli("doctor", "broken.json")
    assert alone.code == 2
    assert "broken.json" in alone.err
    assert "line" in alone.err
    assert "broken.json" in cli("doctor", ".").out


def test_a_config_is_audited_alone_and_beside_code(cli: Cli, project: Path) -> None:
    rule = RULES["config-product"]
    for name, text in rule.bad.items():
        (project / name).write_text(text)
    assert "config-product" in cli("doctor", *rule.bad).out
    both = cli("doctor", ".").out
    assert "config-product" in both
    assert "batch-clamped" in both
