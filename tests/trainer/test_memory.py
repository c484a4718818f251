"""`brim train` under a hard limit: what is predicted to fit survives, what is shown is comparable, and a crash names its cause."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.errors import ChildError, OutOfMemoryError
from brim.memory.outside import process_bytes
from brim.records import RunCard, TrainingResult
from brim.sizes import MIB, format_bytes
from brim.trainer.manifest import checkpoints, damage_of
from brim.trainer.words import banner, closing
from brim.workload.embedded import data_file, write_model
from tests.trainer import squeezed

ROOT = Path(__file__).parents[2]
LIMIT = 200 * MIB


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def train(model: Path, folder: Path, **settings: Any) -> TrainingResult:
    usual: dict[str, Any] = {
        "device": "cpu", "workers": 0, "probe": False, "verify": False, "precision": "fp32", "effective_batch": 4, "micro_batch": 1,
        "max_steps": 6, "save_steps": 3, "seq_len": 200, "max_bad": 5, "eval_split": 8, "checkpointing": "none",
    }  # fmt: skip
    return brim.train(model, data=data_file(), output=folder, **{**usual, **settings})


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "amp-bf16", "micro_batch": 3, "effective_batch": 6},
        {"method": "lora"},
        {"optimizer": "sgd", "micro_batch": 2},
    ],
    ids=["fp32", "bf16", "amp-bf16", "lora", "sgd"],
)
def test_what_is_predicted_to_fit_survives_at_just_that_limit(model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    cards: list[RunCard] = []
    train(model, tmp_path / "roomy", memory=LIMIT, **settings, dry_run=True, before=cards.append)
    needed = _needed(cards[0], model, settings)
    result = train(model, tmp_path / "tight", memory=needed, **settings)
    assert result.finished
    assert result.promise_kept
    assert result.splits == 0
    assert result.evaluation is not None
    assert result.predicted_bytes is not None
    assert result.peak_bytes is not None
    assert abs(result.peak_bytes - result.predicted_bytes) <= process_bytes(str(settings.get("precision", "fp32")))


def _needed(card: RunCard, model: Path, settings: dict[str, Any]) -> int:
    """The smallest limit that is not refused before training: the longest row decides, whether a step of the run has it or not."""
    longest = brim.estimate(
        str(model), device="cpu", memory=LIMIT, seq_len=card.settings.seq_len, checkpointing="none", accumulation=2,
        **{"precision": "fp32", "micro_batch": 1, **{name: value for name, value in settings.items() if name != "effective_batch"}},
    )  # fmt: skip
    assert card.predicted is not None
    margin = 1 << 10  # of a micro-batch that was asked for
    return margin + max(longest.smallest_surviving_limit_bytes, card.predicted.smallest_surviving_limit_bytes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "name", "words", "hint"),
    [
        (11, "SIGSEGV", "probably ran out of memory under --memory 200 MiB", "larger --memory"),
        (4, "SIGILL", "lacks an instruction", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (9, "SIGKILL", "out-of-memory killer", "smaller --memory"),
    ],
)
def test_a_training_that_a_signal_ended_names_the_cause_and_the_workaround(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str, words: str, hint: str
) -> None:
    monkeypatch.setenv(squeezed.VARIABLE, f"0:3:{name}")
    folder = tmp_path / "run"
    with pytest.raises(ChildError, match=rf"signal {number} \({name}\)") as caught:
        train(model, folder, memory=LIMIT, save_steps=2, worker="tests.trainer.squeezed")
    assert words in str(caught.value)
    assert hint in str(caught.value.hint)
    assert f"--resume {folder}" in str(caught.value.hint)
    assert [damage_of(path) for path in checkpoints(folder)] == [None]
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.long
def test_out_of_memory_in_the_optimizer_names_the_command_that_continues(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(squeezed.VARIABLE, "0:4:optimizer")
    folder = tmp_path / "a run"
    with pytest.raises(OutOfMemoryError, match="in the optimizer's step") as caught:
        train(model, folder, memory=LIMIT, save_steps=2, worker="tests.trainer.squeezed")
    assert (
        f"checkpoint-2 is whole: continue from it with brim train --resume '{folder}'." in f"{caught.value} {caught.value.hint}"
    )


def _result(**facts: Any) -> TrainingResult:
    usual: dict[str, Any] = {
        "folder": "run",
        "finished": True,
        "steps": 1,
        "total_steps": 1,
        "effective_batch": 4,
        "promise_kept": True,
    }
    return TrainingResult(**usual, **facts)


def test_on_a_card_reserved_is_compared_with_reserved_and_the_limit_with_the_device() -> None:
    result = _result(
        peak_bytes=900 * MIB, predicted_reserved_bytes=890 * MIB, predicted_bytes=1320 * MIB, memory_limit_bytes=15000 * MIB
    )
    assert dict(closing(result))["Memory"] == (
        "900 MiB reserved at the peak, 890 MiB predicted; with the CUDA context 1.29 GiB predicted of 14.6 GiB allowed"
    )


def test_on_the_cpu_both_figures_leave_out_the_same() -> None:
    result = _result(peak_bytes=33 * MIB, predicted_bytes=32 * MIB, memory_limit_bytes=64 * MIB)
    assert dict(closing(result))["Memory"] == (
        "33.0 MiB at the peak, 32.0 MiB predicted, 64.0 MiB allowed (not counted: what Python and its libraries hold)"
    )


def test_the_banner_names_what_is_reserved_on_top_of_the_limit(model: Path, tmp_path: Path) -> None:
    cards: list[RunCard] = []
    train(model, tmp_path / "run", memory=LIMIT, dry_run=True, before=cards.append)
    assert cards[0].process_bytes == process_bytes("fp32")
    assert f"with {format_bytes(cards[0].process_bytes)} on top of it" in dict(banner(cards[0]))["Memory"]
