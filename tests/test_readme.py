"""What the README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from brim import gpus, models
from tests.conftest import Cli

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def _console_examples() -> list[tuple[str, list[str]]]:
    examples = []
    for block in _blocks(ROOT / "README.md", "console"):
        for part in block.split("$ ")[1:]:
            command, *lines = part.splitlines()
            examples.append((command, [line for line in lines if line and line != "..."]))
    return examples


@pytest.mark.parametrize(("command", "lines"), _console_examples(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_screen_of_the_readme_is_what_is_printed(command: str, lines: list[str], cli: Cli) -> None:
    program, *arguments = shlex.split(command)
    assert program == "brim"
    ended = cli(*arguments)
    assert ended.code == 0
    assert lines
    assert [line for line in ended.out.splitlines() if line][: len(lines)] == lines


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
@pytest.mark.skipif(sys.platform != "linux", reason="the example sets a memory budget")
def test_the_python_example_runs(path: Path, tmp_path: Path) -> None:
    (program,) = (block for block in _blocks(path, "python") if "__main__" in block)
    (tmp_path / "example.py").write_text(program, encoding="utf-8")
    ended = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines()[0] == "out-of-memory"


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_the_counts_in_the_readme_are_true(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    measured = sum(gpu.usable_is_measured for gpu in gpus())
    for count in (len(gpus()), len(models()), measured):
        assert re.search(rf"\b{count}\b|{count} ", text), count
