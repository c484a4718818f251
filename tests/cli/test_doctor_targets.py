"""What `brim doctor` looks at besides the file that is named, and that it says so where it does not look."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import brim
from brim.audit.rules import RULES
from brim.errors import RecordError, UnknownNameError, UsageError
from tests.cli.test_doctor import CLEAN, CONFIG, TRAIN

if TYPE_CHECKING:
    from tests.conftest import Cli

BROKEN_PROMISE = RULES["run-promise-broken"].bad["ledger.jsonl"]
HEALTHY = RULES["run-promise-broken"].good["ledger.jsonl"]
OBSERVATION = '{"schema": "brim.observation/1", "train_batch_size": 4, "gradient_accumulation_steps": 8, "micro_batch_size": 1}'
LAUNCHED = """\
import argparse

from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()
loader = DataLoader(range(100), batch_size=min(args.batch_size, 4))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and us in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def test_ledgers_below_a_folder_are_audited_and_their_records_are_no_configs(cli: Cli) -> None:
    write("train.py", CLEAN)
    write("config.py", CONFIG)
    write("out/first/ledger.jsonl", BROKEN_PROMISE)
    write("out/first/observation.json", OBSERVATION)
    write("out/second/ledger.jsonl", HEALTHY)
    for target, files in ((".", 4), ("out", 2)):
        ended = cli("doctor", target)
        assert ended.code == 1
        assert "run-promise-broken  out/first/ledger.jsonl:" in ended.out
        assert "observation.json" not in ended.out
        assert f"Files read: {files}," in ended.out


def test_own_runs_are_audited_where_their_folder_is_named_and_told_of_elsewhere(cli: Cli) -> None:
    write("train.py", "a = 1\n")
    write("brim-runs/first/ledger.jsonl", BROKEN_PROMISE)
    ended = cli("doctor", ".")
    assert ended.code == 0
    assert "Note: Not every run in '.' was audited. To audit the others: `brim doctor brim-runs`" in ended.out
    assert "run-promise-broken" in cli("doctor", "brim-runs").out


def test_runs_that_are_too_deep_or_too_many_are_named(cli: Cli) -> None:
    write("runs/a/b/c/ledger.jsonl", BROKEN_PROMISE)
    ended = cli("doctor", "runs")
    assert ended.code == 0
    assert "`brim doctor runs/a/b/c`" in ended.out
    for number in range(22):
        write(f"many/{number:02}/ledger.jsonl", HEALTHY)
        os.utime(f"many/{number:02}/ledger.jsonl", (number, number))
    ended = cli("doctor", "many")
    assert "Files read: 20," in ended.out
    assert "`brim doctor many/01 many/00`" in ended.out


@pytest.mark.parametrize("text", ["", '{"schema": "brim.ledger/1", "kind": "step"}\n', '{"amount": 3}\n'])
def test_a_ledger_that_cannot_be_read_is_a_note_in_a_folder_and_an_error_alone(cli: Cli, text: str) -> None:
    write("train.py", "a = 1\n")
    write("out/ledger.jsonl", text)
    write("well/ledger.jsonl", BROKEN_PROMISE)
    ended = cli("doctor", ".")
    assert ended.code == 1
    assert "Note: out/ledger.jsonl" in ended.out
    assert "run-promise-broken" in ended.out
    for target in ("out", "out/ledger.jsonl"):
        alone = cli("doctor", target)
        assert (alone.code, alone.out) == (2, "")
        with pytest.raises(RecordError):
            brim.doctor(target)


def test_a_launcher_brings_the_scripts_that_it_calls(cli: Cli, here: Path) -> None:
    write("jobs/train.py", LAUNCHED)
    write("jobs/train.sh", "# python other.py\npython train.py --batch-size 64\n")
    write("jobs/all.sh", 'cd "$(dirname "$0")"\nbash train.sh\n')
    for launcher in ("jobs/train.sh", "jobs/all.sh"):
        ended = cli("doctor", launcher)
        assert ended.code == 1
        assert "batch-clamped  jobs/train.py:8" in ended.out
        assert "You set 64 (jobs/train.sh:2)" in ended.out
        assert "other.py" not in ended.out
    write("module.sh", "torchrun tools/train.py --batch-size 64\npython -m jobs.train --batch-size 2\npython gone.py\n")
    ended = cli("doctor", "module.sh")
    assert "jobs/train.py:8" in ended.out
    assert "Note: module.sh calls gone.py, which is neither in its folder nor in the current one, and was not read." in ended.out


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("broken.json", '{"train_batch_size": 4,\n"gradient_accumulation_steps": ,\n', 2),
        ("missing.json", '{"train_batch_size": 4,\n"gradient_accumulation_steps": }\n', 2),
        ("plain.json", '{"a": 1\n"b": 2}\n', 2),
        ("broken.yaml", "per_device_train_batch_size: 4\nbf16: [true\n", 3),
        ("broken.toml", "a = 1\nb = \n", 2),
    ],
)
def test_a_config_that_was_named_and_is_broken_ends_it(cli: Cli, name: str, text: str, line: int) -> None:
    write(name, text)
    write("train.py", "a = 1\n")
    for targets in ([name], ["train.py", name]):
        ended = cli("doctor", *targets)
        assert (ended.code, ended.out) == (2, "")
        assert f"{name} cannot be read in line {line}: " in ended.err
    ended = cli("doctor", ".")
    assert ended.code == 0
    assert (name in ended.out) == (name in {"broken.json", "missing.json", "broken.yaml"}), "others are no training configs"


def test_what_is_no_notebook_is_not_called_python(cli: Cli) -> None:
    for text in ("hello", '{"a": 1}'):
        write("a.ipynb", text)
        ended = cli("doctor", "a.ipynb")
        assert (ended.code, ended.out) == (2, "")
        assert "a.ipynb cannot be read as a notebook" in ended.err
        assert "Python: " not in ended.err


def git(*arguments: str, **options: object) -> None:
    subprocess.run(["git", *arguments], check=True, capture_output=True, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(("folder", "target"), [(".", "sub"), ("sub", "."), ("other", ".."), ("other", "../sub/train.py")])
def test_git_applies_the_diff_wherever_we_stand(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, folder: str, target: str
) -> None:
    git("init", "--quiet")
    write("sub/config.py", CONFIG)
    write("sub/train.py", TRAIN)
    (here / "other").mkdir()
    monkeypatch.chdir(folder)
    ended = cli("doctor", "--diff", target)
    assert ".." not in ended.out
    root = [] if folder != "other" else ["-C", ".."]
    assert ("Apply the diff with `git -C .. apply`" in ended.err) == bool(root)
    git(*root, "apply", "-", input=ended.out.encode())
    assert (here / "sub" / "train.py").read_text(encoding="utf-8") == CLEAN


def test_a_diff_is_written_to_a_file(cli: Cli, here: Path) -> None:
    git("init", "--quiet")
    write("config.py", CONFIG)
    write("train.py", TRAIN)
    ended = cli("doctor", "--diff", "-o", "mend.patch")
    assert (ended.out, ended.err) == ("", "Written: mend.patch\n")
    git("apply", "mend.patch")
    assert (here / "train.py").read_text(encoding="utf-8") == CLEAN


def test_long_lines_are_cut_on_the_screen_and_nowhere_else(cli: Cli) -> None:
    write("config.py", CONFIG)
    write("train.py", TRAIN.replace("gpu, 2)", "gpu, 2)  # " + "x" * 400))
    ended = cli("doctor")
    assert max(map(len, ended.out.splitlines())) <= 240
    assert "xxx…\n" in ended.out
    assert ended.out.count("= min(config") == 1, "a line is shown once"
    assert "x" * 400 in cli("doctor", "--json").out
    assert "x" * 400 in cli("doctor", "--diff").out


def test_of_long_lines_the_part_that_changes_is_shown(cli: Cli) -> None:
    write("config.py", CONFIG)
    write("train.py", TRAIN.replace("batch_size = min", "label, batch_size = " + repr("x" * 400) + ", min"))
    out = cli("doctor").out
    assert "x', min(config.batch_size_per_gpu, 2)\n" in out
    assert "x', config.batch_size_per_gpu\n" in out


def test_in_a_notebook_too_a_line_is_shown_once_and_as_code(cli: Cli) -> None:
    code = (
        "BATCH_SIZE = 64\nsize = min(BATCH_SIZE, 2)\nfrom torch.utils.data import DataLoader\nDataLoader([], batch_size=size)\n"
    )
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": code.splitlines(keepends=True)}
    document = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    write("a.ipynb", json.dumps(document, indent=1) + "\n")
    ended = cli("doctor", "a.ipynb")
    assert "    -size = min(BATCH_SIZE, 2)\n    +size = BATCH_SIZE\n" in ended.out
    assert ended.out.count("size = min(BATCH_SIZE, 2)") == 1


def test_the_order_is_by_cost_and_the_costliest_stands_at_the_end_again(cli: Cli) -> None:
    write("config.py", CONFIG)
    write("train.py", TRAIN.replace("shuffle=True", "shuffle=True, num_workers=0, pin_memory=False"))
    words = [line.split()[0] for line in cli("doctor").out.splitlines() if line.startswith(("high", "medium", "low"))]
    assert words == sorted(words, key=["high", "medium", "low"].index)
    assert "\nMost severe: batch-clamped, train.py:8.\nFindings: " in cli("doctor").out


def test_names_and_severities_of_the_api_are_checked() -> None:
    write("config.py", CONFIG)
    write("train.py", TRAIN)
    found = brim.doctor("train.py", only="batch-clamped")
    assert [each.rule for each in found.findings] == ["batch-clamped"]
    assert not brim.doctor("train.py", ignore="batch-clamped").at_least("high")
    with pytest.raises(UsageError, match="high, medium, low"):
        found.at_least("hi")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the same rule"):
        brim.doctor("train.py", only="batch-clamped", ignore=["batch-clamped"])
    with pytest.raises(UsageError, match="seq_len"):
        brim.doctor("train.py", seq_len=0)
    with pytest.raises(UnknownNameError, match="no model"):
        brim.doctor("train.py", model="nobody/knows-this")


def test_a_file_that_is_larger_than_any_config_is_refused(cli: Cli) -> None:
    write("config.json", '{"a": "' + "a" * (5 << 20))
    ended = cli("doctor", "config.json")
    assert ended.code == 2
    assert "config.json has 5.00 MiB; doctor reads scripts and configs of up to 4.00 MiB." in ended.err
