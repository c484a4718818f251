"""`brim train`, as a person runs it: from a model folder and a data file to a model that loads in plain transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import UsageError
from brim.records import RunCard, TrainingResult
from brim.step.checker import check_ledger
from brim.step.ledger import read_ledger
from brim.trainer import train
from brim.trainer.train import _sums
from brim.trainer.words import banner, product, promise
from brim.workload.embedded import data_file, write_model
from tests.conftest import Cli, Finished, once
from tests.step.ledgers import HEADER, in_memory, step_of

QUICK = ("--device", "cpu", "--workers", "0", "--no-probe", "--no-verify", "--precision", "fp32")


@pytest.fixture(scope="session")
def model(shared: Path) -> Path:
    folder = shared / "embedded-model"
    once(folder, lambda: write_model(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="session")
def rows(shared: Path) -> Path:
    """The first rows of the embedded data."""
    folder = shared / "embedded-rows"

    def write() -> None:
        lines = data_file().read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "rows.jsonl").write_text("".join(lines[:72]), encoding="utf-8")

    once(folder, write)
    return folder / "rows.jsonl"


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def result_of(ended: Finished) -> TrainingResult:
    assert ended.code == 0, ended.err
    return TrainingResult.from_json(ended.out)


def losses(folder: Path) -> list[float]:
    return [entry.loss or 0.0 for entry in read_ledger(folder / "ledger.jsonl").steps]


def ids(folder: Path) -> list[list[int]]:
    return [sorted(entry.sequence_ids) for entry in read_ledger(folder / "ledger.jsonl").steps]


@pytest.mark.usefixtures("one_thread")
def test_the_whole_way_under_a_hard_limit_and_on_with_another(model: Path, rows: Path, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run"
    asked = (
        "train",
        str(model),
        "--data",
        str(rows),
        "--effective-batch",
        "16",
        "--eval-split",
        "8",
        "--learning-rate",
        "2e-3",
        *QUICK,
    )
    ended = cli(*asked, "--max-steps", "3", "--memory", "120MiB", "-o", str(folder), "--json")
    result = result_of(ended)
    assert result.finished
    assert result.promise_kept
    assert (result.steps, result.effective_batch) == (3, 16)
    assert result.last_loss is not None
    assert result.first_loss is not None
    assert result.last_loss < result.first_loss
    assert result.evaluation is not None
    assert result.evaluation.sequences == 8
    assert Path(result.report).is_file()
    card = RunCard.read(folder / "run.json")
    for words in ("Effective batch", product(card), "in the training process, no workers", "the limit is hard"):
        assert words in ended.err
    assert not check_ledger(read_ledger(folder / "ledger.jsonl"))
    _loads_in_plain_transformers(folder, model)
    assert card.command[:3] == ("brim", "train", str(model))
    assert card.options.eval_split == 8

    taken = ids(folder)
    again = cli("train", "--resume", str(folder), "--memory", "300MiB", "--max-steps", "5")
    assert again.code == 0, again.err
    assert "kept: 5 of 5 steps" in again.out
    assert ids(folder)[:3] == taken
    assert len(losses(folder)) == 5

    before = (folder / "model.safetensors").read_bytes()
    finished = cli("train", "--resume", str(folder))
    assert finished.code == 0
    assert "This run is finished" in finished.err
    assert (folder / "model.safetensors").read_bytes() == before
    fewer = cli("train", "--resume", str(folder), "--max-steps", "4")
    assert fewer.code == 2
    assert "has taken 5 steps already" in fewer.err
    refused = cli("train", "--resume", str(folder), "--seed", "7")
    assert refused.code == 2
    assert "would make its steps other ones" in refused.err
    busy = cli(*asked, "-o", str(folder))
    assert busy.code == 2
    assert f"brim train --resume {folder}" in busy.err


def _loads_in_plain_transformers(folder: Path, before: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(before)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(trained.get_parameter(name), base.get_parameter(name))
    tokenizer: Any = AutoTokenizer
    assert tokenizer.from_pretrained(folder)("2 + 2")["input_ids"]


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_adapters_have_twice_their_rank_as_alpha_and_a_run_of_an_older_brim_keeps_its_8(
    model: Path, rows: Path, tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "run"
    asked = ("train", str(model), "--data", str(rows), *QUICK, "--effective-batch", "16", "--method", "lora", "--lora-rank", "16")
    ended = cli(*asked, "--lora-dropout", "0.1", "--max-steps", "2", "-o", str(folder))
    assert ended.code == 0, ended.err
    assert "lora r=16 alpha=32 dropout=0.1" in ended.err
    assert "lora_dropout 0.1): other slices draw other noise" in ended.err
    assert _adapters(folder) == (16, 32, 0.1)
    refused = cli("train", "--resume", str(folder), "--lora-alpha", "8")
    assert refused.code == 2
    assert "lora-alpha = 32" in refused.err

    card = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del card["settings"]["lora_alpha"], card["settings"]["lora_dropout"]
    for name in ("lora_alpha", "lora_dropout"):
        card["asked"].pop(name, None)
    (folder / "run.json").write_text(json.dumps(card), encoding="utf-8")
    again = cli("train", "--resume", str(folder), "--max-steps", "3", "--lora-alpha", "8")
    assert again.code == 0, again.err
    assert "lora r=16 alpha=8" in again.err
    assert _adapters(folder) == (16, 8, 0.0)
    assert RunCard.read(folder / "run.json").settings.lora_alpha == 8


def _adapters(folder: Path) -> tuple[int, int, float]:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return config["r"], config["lora_alpha"], config["lora_dropout"]


@pytest.mark.usefixtures("one_thread")
def test_a_dry_run_shows_everything_and_writes_nothing(model: Path, rows: Path, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run"
    ended = cli("train", str(model), "--data", str(rows), "--device", "cpu", "--memory", "160MiB", "--dry-run", "-o", str(folder))
    assert ended.code == 0, ended.err
    first = "Effective batch: 32 sequences per optimizer step. Micro-batch: chosen to fit the memory."
    assert first in ended.err.splitlines()[0]
    for words in (
        "Nothing was started",
        "Effective batch 32: none was given.",
        "their sum does not",
        "At the peak",
        str(folder),
    ):
        assert words in ended.out
    assert not folder.exists()


@pytest.mark.usefixtures("one_thread")
def test_names_of_the_trainer_are_kept_in_the_card(model: Path, rows: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli(
        "train", "--model", str(model), "--train-file", str(rows), *QUICK, "--batch-size", "16", "--per-device-train-batch-size", "4",
        "--grad-accum", "4", "--max_length", "100", "--lr", "1e-3", "--warmup-ratio", "0.5", "--adam-beta2", "0.95", "--run-name", "mine",
        "--eval-strategy", "epoch", "--save-strategy", "steps", "--dry-run", "--json", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    first = "Effective batch: 16 sequences per optimizer step. Micro-batch: 4 sequences in one forward pass, as given."
    assert first in ended.err.splitlines()[0]
    card = RunCard.from_json(ended.out)
    assert (card.effective_batch, card.micro_batch, card.accumulation, card.data.max_length) == (16, 4, 4, 100)
    recipe = card.recipe
    assert (recipe.learning_rate, recipe.adam_beta1, recipe.adam_beta2, recipe.adam_epsilon) == (1e-3, 0.9, 0.95, 1e-8)
    assert (recipe.warmup_steps, card.total_steps) == (3, 5)
    assert card.options.run_name == "mine"
    assert any("--run-name" in words for words in card.not_in_force)
    for tokens, is_in_row in ((10_000, True), (100, False)):  # where much is cut, a note has the figures
        data = replace(card.data, cut=3, cut_tokens=5, tokens=tokens)
        assert ("sequences cut: 3 (tokens lost: 5)" in dict(banner(replace(card, data=data)))["Data"]) == is_in_row


@pytest.mark.usefixtures("one_thread")
def test_what_cannot_come_true_is_said_in_the_banner(model: Path, rows: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli(
        "train", str(model), "--data", str(rows), *QUICK, "--effective-batch", "100", "--warmup", "50", "--dry-run", "-o",
        str(tmp_path / "run"),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    first = ended.out.splitlines()[1]
    assert "Not in force" in first
    assert "Effective batch 100: the data has 72 sequences" in first
    assert ended.out.count("the data has 72 sequences") == 1
    assert "100 asked for; every step holds all 72 sequences of the data" in ended.out
    assert "100 in every step" not in ended.out + ended.err
    assert "Warm-up takes 50 steps, and there are 1" in ended.out


@pytest.mark.usefixtures("one_thread")
def test_a_pinned_micro_batch_that_does_not_fit_is_refused_with_its_bytes(
    model: Path, rows: Path, tmp_path: Path, cli: Cli
) -> None:
    folder = tmp_path / "run"
    ended = cli(
        "train", str(model), "--data", str(rows), "--micro-batch", "32", "--memory", "100MiB", *QUICK, "-o", str(folder)
    )  # fmt: skip
    assert ended.code == 1
    assert "--micro-batch 32 needs" in ended.err
    assert "MiB as predicted, and 100 MiB may be taken: nothing was started." in ended.err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--max-length", "8", "--seq-len", "9"), "to different values"),
        (("--probe", "x", "--no-probe"), "contradict"),
        (("--adam-beta2", "0.95", "--optimizer", "lion"), "--adam-beta2: these belong to AdamW"),
        (("--columns", "question"), "'question' is not MEANING=COLUMN. Example: prompt=question,response=answer."),
        (("--columns", "prompt=q,prompt=r"), "'prompt=q,prompt=r' gives a meaning twice."),
        (("--sharding", "fsdp"), "--gpus N"),
        (("--plan", "nowhere.json"), "nowhere.json"),
        (("--epochs", "0"), "--epochs"),
        (("--precision", "amp-fp16"), "needs a GPU"),
        (("--report-to", "nothing"), "transformers reports to"),
        (("--micro-batch", "7", "--effective-batch", "3"), "is more than a step has"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_wish_is_told_before_anything_is_written(
    words: tuple[str, ...], told: str, model: Path, rows: Path, tmp_path: Path, cli: Cli
) -> None:
    ended = cli("train", str(model), "--data", str(rows), *words, "-o", str(tmp_path / "run"), "--device", "cpu")
    assert ended.code == 2
    assert told in ended.err
    assert not (tmp_path / "run").exists()


def test_the_measured_memory_is_that_of_the_steps_that_were_predicted() -> None:
    entries = [step_of(number, peak_reserved_bytes=size) for number, size in ((1, 900), (2, 800), (3, 500), (4, 600))]
    assert _sums(in_memory(*entries), 4)["peak_bytes"] == 900
    resumed = replace(HEADER, resumed_from_step=2)
    assert _sums(in_memory(*entries, headers=(HEADER, resumed)), 4)["peak_bytes"] == 600


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (((1, 6),), "kept in all 2 steps that the ledger records, of 8. The ledger has no record of 6 earlier steps: it was deleted or damaged."),
        (((3, 3),), "kept in all 2 steps that the ledger records, of 8. The ledger has no record of 1 earlier step: it was deleted or damaged."),
    ],
)  # fmt: skip
def test_steps_without_a_record_are_told_apart_from_steps_that_were_not_taken(lost: Any, said: str) -> None:
    result = TrainingResult(
        folder="r", finished=True, steps=2, total_steps=8, effective_batch=4, promise_kept=True, lost_steps=lost
    )
    assert promise(result) == said


def test_two_trainings_in_one_folder_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_LOCK_SECONDS", 0.2)
    with train.only_one(tmp_path / "run"), pytest.raises(UsageError, match="is at work in"), train.only_one(tmp_path / "run"):
        pass
    with train.only_one(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_what_it_takes_is_in_the_help(cli: Cli) -> None:
    said = cli("train", "--help").out
    for flag in ("--resume DIR", "--dry-run", "--effective-batch", "--eval-split", "--no-verify", "--max-bad"):
        assert flag in said
