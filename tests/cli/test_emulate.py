"""`brim emulate`: what it says before it runs anything. The runs themselves are in tests/emulated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import Cli


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--", "python", "train.py"), "--gpu is missing"),
        (("--gpu", "t4"), "A command is needed"),
        (("--gpu", "t5", "--", "python"), "no GPU 't5'"),
        (("--gpu", "mi300x", "--", "python"), "only CUDA cards can be emulated"),
        (("--gpu", "t4", "--", "no-such-program"), "there is no such program"),
        (("--gpu", "t4", "--memory", "1MiB", "--", "python"), "too small"),
        (("--gpu", "t4*99", "--", "python"), "at most"),
        (("--gpu", "t4", "--steps", "0", "--", "python"), "0"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(cli: Cli, words: tuple[str, ...], text: str) -> None:
    done = cli("emulate", *words)
    assert done.code == 2
    assert text in done.err
    assert "Traceback" not in done.err


@pytest.mark.skipif(sys.platform != "linux", reason="another message comes first on other systems")
def test_a_cpu_build_of_torch_is_named_with_the_cure(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\ngit_version = 'abc'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = cli("emulate", "--gpu", "t4", "--", str(python), "train.py")
    assert done.code == 2
    assert "CPU build of PyTorch (2.13.0+cpu)" in done.err
    assert "torch===" in done.err


def test_a_script_that_is_not_executable_is_named_with_the_command(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()\n")
    done = cli("emulate", "--gpu", "t4", "--", str(script))
    assert done.code == 2
    assert "is not an executable program" in done.err
    assert f"python {script}" in done.err.replace("\n", "")
