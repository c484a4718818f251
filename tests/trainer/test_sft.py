"""TRL's SFTTrainer: its losses, its metrics, its ways to lay out a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

import brim
from brim.step.budget import Budget
from brim.trainer.hf import BrimMixin
from tests.trainer.small import ids_of, lines, logged, near
from tests.trainer.words import TEXTS, model_of, tokenizer


class BrimSFTTrainer(BrimMixin, SFTTrainer):  # type: ignore[misc]
    """The mixin before the class."""


METRICS = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")
KINDS = {
    "language-modeling": [{"text": text} for text in TEXTS],
    "prompt-completion": [{"prompt": text[:12], "completion": text[12:]} for text in TEXTS],
}


def make(folder: Path, kind: Any, rows: list[dict[str, str]], own: dict[str, Any] | None = None, **options: Any) -> Any:
    words = tokenizer()
    defaults = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
        "save_strategy": "no", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "num_train_epochs": 1, "max_length": 64, "gradient_checkpointing": False,
    }  # fmt: skip
    args = SFTConfig(**{**defaults, **options})
    data = Dataset.from_list(rows)
    return kind(model=model_of(words), args=args, train_dataset=data, processing_class=words, **(own or {}))


def told(trainer: Any) -> dict[str, list[float]]:
    return {name: logged(trainer, name) for name in METRICS}


def same(one: dict[str, list[float]], other: dict[str, list[float]]) -> bool:
    return all(one[name] == near(other[name], 2e-5) for name in METRICS)


@pytest.mark.parametrize("data", KINDS)
def test_losses_and_metrics_are_one_a_step_and_the_same_for_every_slicing(tmp_path: Path, data: str) -> None:
    runs = []
    for name, budget in (("one", Budget.sequences(1)), ("all", Budget.tokens(400))):
        trainer = make(tmp_path / name, BrimSFTTrainer, KINDS[data], {"budget": budget})
        trainer.train()
        runs.append(told(trainer))
        assert all(len(values) == 3 for values in runs[-1].values())
    assert same(runs[0], runs[1])
    assert ids_of(tmp_path / "one") == ids_of(tmp_path / "all")
    tokens = sum(line["tokens"] for line in lines(tmp_path / "one"))
    assert runs[0]["num_tokens"][-1] == tokens


def test_an_attached_trainer_says_what_the_plain_one_says_of_the_whole_data(tmp_path: Path) -> None:
    """All of it is one step, so that the order plays no role; only the plain metrics are means of means."""
    rows = KINDS["prompt-completion"][:8]
    options: dict[str, Any] = {"num_train_epochs": 3}
    plain = make(tmp_path / "plain", SFTTrainer, rows, per_device_train_batch_size=8, gradient_accumulation_steps=1, **options)
    plain.train()
    attached = make(tmp_path / "brim", SFTTrainer, rows, **options)
    brim.attach(attached, budget=Budget.sequences(3))
    attached.train()
    assert len(logged(plain)) == 3
    assert same(told(attached), told(plain))


def test_rows_laid_end_to_end_without_padding_are_the_same_step(tmp_path: Path) -> None:
    runs = []
    for name, options in (("padded", {}), ("free", {"padding_free": True, "max_length": None})):
        trainer = make(tmp_path / name, BrimSFTTrainer, KINDS["language-modeling"], {"budget": Budget.sequences(3)}, **options)
        trainer.train()
        runs.append(told(trainer))
    assert same(runs[0], runs[1])
    steps = lines(tmp_path / "free")
    assert sum(line["padded_tokens"] for line in steps) < 1.1 * sum(line["tokens"] for line in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dft"},
        {"label_smoothing_factor": 0.1},
        {"packing": True, "max_length": 48},
        {"gradient_checkpointing": True},
    ],
    ids=["dft", "smoothing", "packing", "checkpointing"],
)
def test_other_losses_of_trl_do_not_depend_on_slices(tmp_path: Path, options: dict[str, Any]) -> None:
    runs = []
    for name, budget in (("one", Budget.sequences(1)), ("all", Budget.sequences(8))):
        trainer = make(tmp_path / name, BrimSFTTrainer, KINDS["prompt-completion"], {"budget": budget}, **options)
        trainer.train()
        runs.append(told(trainer))
    assert same(runs[0], runs[1])


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    straight = make(tmp_path, BrimSFTTrainer, KINDS["language-modeling"], **options)
    straight.train()
    again = make(tmp_path, BrimSFTTrainer, KINDS["language-modeling"], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(again)[4:] == near(logged(straight)[4:])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 5, 6]
