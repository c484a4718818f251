"""What all tests share. Real parts: real child processes, real limits, real files."""

from __future__ import annotations

import os

# Before torch loads, and for child processes too: some virtual machines report AMX and do not have it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# One thread for torch here and in child processes: the cores are few, and threads of a tiny model only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# DeepSpeed is asked of the processor here and in child processes; otherwise it looks for a card first, and says that it found none.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# No test may reach for the network: what is not on this disk does not exist.
os.environ["HF_HUB_OFFLINE"] = "1"
for variable in ("BRIM_LANG", "BRIM_CONFIG", "BRIM_DEBUG", "LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE", "COLUMNS", "FORCE_COLOR"):
    os.environ.pop(variable, None)

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from brim import locale
from brim.cli import main

# `make test` draws the same examples each time, `make test-all` new ones. How long an example takes is the machine's business.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile("same")

SHARED = Path(__file__).parents[2] / "shared"


@dataclass(frozen=True)
class Finished:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Cli = Callable[..., Finished]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is dear and made once: all workers of this run have the same."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def traces(shared: Path) -> Path:
    """Traces of all tests, whoever needed them first: a trace's name says all that shapes it."""
    folder = shared / "traces"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, make: Callable[[], object]) -> None:
    """Fill a folder that workers share. One does it and the others wait; where it fails, the next one tries, in the folder made anew."""
    with FileLock(folder.with_suffix(".lock")):
        if (folder / "made").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make()
        (folder / "made").touch()


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test speaks English and has a cache folder of its own, in which only the traces are not its own."""
    cache = tmp_path.with_name(f"{tmp_path.name}-cache")
    cache.mkdir()
    (cache / "memory").symlink_to(traces, target_is_directory=True)
    monkeypatch.setenv("BRIM_CACHE", str(cache))
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
