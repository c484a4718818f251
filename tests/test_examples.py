"""The examples do what their pages say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from brim import check_ledger, read_ledger

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def main_of(name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = module.main
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


def test_the_same_window_in_other_slices_is_the_same_step_and_the_mistakes_are_not() -> None:
    found = main_of("gradient_accumulation")()
    truth = found["batch 32"]
    for name in ("8 x 4", "4 x 8"):
        assert found[name].loss == pytest.approx(truth.loss, rel=1e-6)
        for one, other in zip(found[name][1:], truth[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)
    assert norm_ratio(found["never divided"].gradient, truth.gradient) == pytest.approx(8, rel=0.05)
    assert norm_ratio(found["mean of means"].short, truth.short) == pytest.approx(5 / 8, rel=0.05)
    assert torch.cosine_similarity(found["mean of means"].gradient, truth.gradient, dim=0) < 0.99
    assert torch.cosine_similarity(found["cleared too often"].gradient, truth.gradient, dim=0) < 0.6


def norm_ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one.norm() / other.norm())


def test_trl_learns_and_every_step_holds_what_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = main_of("sft")(["--output", str(tmp_path), "--brim"])
    assert losses[-1] < 0.6 * losses[0]
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert {step.sequences for step in ledger.steps} == {12}
    assert not check_ledger(ledger)
    assert "supervised" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_of_trl_also_runs_without_brim(tmp_path: Path) -> None:
    losses = main_of("sft")(["--output", str(tmp_path)])
    assert losses[-1] < 0.6 * losses[0]
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.slow
def test_a_t5_learns_the_same_in_every_memory(tmp_path: Path) -> None:
    first, *others = main_of("seq2seq_t5")(["--output", str(tmp_path)]).values()
    assert len(others) == 2
    assert all(losses == pytest.approx(first, rel=1e-4) for losses in others)
    assert first[-1] < first[0]
    slices = {len(read_ledger(path).steps[0].slices) for path in tmp_path.glob("*/ledger.jsonl")}
    assert len(slices) == 3


@pytest.mark.slow
def test_a_stitched_model_learns_the_same_at_batch_size_1_and_4(tmp_path: Path) -> None:
    losses = main_of("stitched")(["--output", str(tmp_path)])
    assert losses[1] == pytest.approx(losses[4], rel=1e-4)
    assert losses[1][-1] < losses[1][0]


def test_the_recommendations_grow_with_the_memory() -> None:
    rows_grow(main_of("recommend")(["--models", "7b"]))


def test_the_whole_table_of_recommendations() -> None:
    found = main_of("recommend")([])
    rows_grow(found)
    assert len(found) == 12
    for memory_gb in (8, 16, 24, 40):
        assert found["7b", memory_gb] >= found["13b", memory_gb] >= found["30b", memory_gb]
    assert found["30b", 8] == 0


def rows_grow(found: dict[tuple[str, int], int]) -> None:
    """More memory never holds less."""
    for model in {name for name, _memory in found}:
        sizes = [size for (name, _memory), size in sorted(found.items()) if name == model]
        assert sizes == sorted(sizes)
        assert sizes[-1] > 0


def test_every_example_is_listed() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(FOLDER.iterdir()) if path.suffix in {".py", ".yaml"} and path.name not in text] == []


SCRIPTS = {
    "trainer": ["--brim"], "own_loop": [], "sft": ["--brim"], "seq2seq_t5": [], "stitched": [],
    "gradient_accumulation": None, "recommend": None,
}  # fmt: skip
"""What each is called with, beside where its output goes; None: it writes nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_as_a_script(name: str, tmp_path: Path) -> None:
    words = SCRIPTS[name]
    ended = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *([] if words is None else [*words, "--output", str(tmp_path)])],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
