"""The examples do what their pages say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def main_of(name: str) -> Callable[[list[str]], list[float]]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[list[str]], list[float]] = module.main
    return found


def test_the_trainer_script_has_the_same_losses_before_and_after_brim(tmp_path: Path) -> None:
    main = main_of("trainer")
    before = main(["--output", str(tmp_path / "before")])
    after = main(["--output", str(tmp_path / "after"), "--brim"])
    assert len(before) == 5
    assert after == pytest.approx(before, rel=1e-5)
    assert not (tmp_path / "before" / "ledger.jsonl").exists()
    assert (tmp_path / "after" / "ledger.jsonl").exists()


def test_the_trainer_script_is_about_forty_lines() -> None:
    assert len((FOLDER / "trainer.py").read_text(encoding="utf-8").splitlines()) <= 50


def test_the_loop_of_ones_own_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    main = main_of("own_loop")
    straight = main(["--output", str(tmp_path / "straight")])
    first = main(["--output", str(tmp_path / "broken"), "--stop", "5"])
    second = main(["--output", str(tmp_path / "broken")])
    assert (len(first), len(second)) == (5, 7)
    assert [*first, *second] == pytest.approx(straight, rel=1e-6)
    assert straight[-1] < straight[0]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["trainer.py", "--brim"], ["own_loop.py"]], ids=["trainer", "own_loop"])
def test_an_example_runs_as_a_script(words: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(FOLDER / words[0]), *words[1:], "--output", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "loss" in ended.stdout
