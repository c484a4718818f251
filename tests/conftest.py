"""What all tests share. Real parts: real child processes, real limits, real files."""

from __future__ import annotations

import os

# Before torch loads, and for child processes too: some virtual machines report AMX and do not have it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# No test may reach for the network: what is not on this disk does not exist.
os.environ["HF_HUB_OFFLINE"] = "1"
for variable in ("BRIM_LANG", "BRIM_CONFIG", "BRIM_DEBUG", "LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE", "COLUMNS", "FORCE_COLOR"):
    os.environ.pop(variable, None)

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from brim import locale
from brim.cli import main

SHARED = Path(__file__).parents[2] / "shared"


@dataclass(frozen=True)
class Finished:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Cli = Callable[..., Finished]


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test speaks English and has a cache folder of its own."""
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "cache"))
    locale.activate("en")
    yield
    locale.activate("en")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process: `cli("gpus", "t4")`."""

    def call(*arguments: str) -> Finished:
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return Finished(code, out, err)

    return call


@pytest.fixture
def shell(tmp_path: Path) -> Cli:
    """Run the command line as a user does, in a process of its own."""

    def call(*arguments: str, environment: dict[str, str] | None = None, folder: Path | None = None) -> Finished:
        ended = subprocess.run(
            [sys.executable, "-m", "brim", *arguments],
            capture_output=True, text=True, check=False, timeout=120, encoding="utf-8",
            env={**os.environ, **(environment or {})}, cwd=folder or tmp_path,
        )  # fmt: skip
        return Finished(ended.returncode, ended.stdout, ended.stderr)

    return call
