"""What cannot be promised is refused before anything starts, with the reason and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

import brim
from brim.errors import BrimError, UnsupportedError, UsageError
from tests.trainer.small import ids_of, llama, pad, ragged, trainer_of


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"auto_find_batch_size": True}, UsageError, "auto_find_batch_size"),
        ({"optim": "lomo"}, UnsupportedError, "lomo"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["q_proj"]}, UnsupportedError, "layerwise"),
        ({"train_sampling_strategy": "sequential"}, UnsupportedError, "sequential"),
    ],
    ids=["auto_find_batch_size", "lomo", "layerwise", "sequential"],
)
def test_a_setting_that_breaks_the_promise_is_refused(
    tmp_path: Path, options: dict[str, Any], kind: type[BrimError], named: str
) -> None:
    with pytest.raises(kind, match=named) as caught:
        trainer_of(tmp_path, ragged(8), **options)
    assert caught.value.hint
    plain = trainer_of(tmp_path, ragged(8), kind=Trainer, **options)
    with pytest.raises(kind, match=named):
        brim.attach(plain)
    assert type(plain) is Trainer
    assert plain.args.gradient_accumulation_steps == 2


def test_a_setting_that_is_changed_afterwards_is_refused_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(8))
    trainer.args.auto_find_batch_size = True
    with pytest.raises(UsageError, match="auto_find_batch_size"):
        trainer.train()


@pytest.mark.parametrize("engine", ["DeepSpeed", "FSDP"])
def test_engines_whose_micro_batches_are_collective_are_refused(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, ragged(8), kind=Trainer)
    monkeypatch.setattr(trainer, f"is_{engine.lower()}_enabled", True)
    with pytest.raises(UnsupportedError, match=engine):
        brim.attach(trainer)


@pytest.mark.parametrize("strategy", ["group_by_length", pytest.param("batch_rebalance", marks=pytest.mark.slow)])
def test_sorting_across_steps_is_not_done_and_said(tmp_path: Path, strategy: str) -> None:
    rows = ragged(24)
    with pytest.warns(UserWarning, match=f"{strategy}.* is not used"):
        trainer = trainer_of(tmp_path / "sorted", rows, train_sampling_strategy=strategy)
    trainer.train()
    trainer_of(tmp_path / "random", rows).train()
    assert ids_of(tmp_path / "sorted") == ids_of(tmp_path / "random")


def test_brim_is_attached_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(8), kind=Trainer)
    brim.attach(trainer)
    with pytest.raises(UsageError, match="already"):
        brim.attach(trainer)
    with pytest.raises(UsageError, match="already"):
        brim.attach(trainer_of(tmp_path, ragged(8)))


def test_brim_is_attached_to_trainers_only() -> None:
    with pytest.raises(UsageError, match="this is a LlamaForCausalLM") as caught:
        brim.attach(cast("Any", llama()))
    assert "brim.steps" in str(caught.value.hint)


class Stream(IterableDataset[Any]):
    """Rows without numbers."""

    def __iter__(self) -> Any:
        return iter(ragged(8))


def test_data_that_can_only_be_iterated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only be iterated"):
        trainer_of(tmp_path, Stream(), max_steps=2).train()


def test_no_data_and_empty_data_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no training data"):
        trainer_of(tmp_path, None, max_steps=2).train()
    with pytest.raises(UsageError, match="is empty"):
        trainer_of(tmp_path, []).train()


def test_data_whose_lengths_cannot_be_seen_asks_for_them(tmp_path: Path) -> None:
    rows = [{"ids": row["input_ids"]} for row in ragged(8)]
    with pytest.raises(UsageError, match="Item 0 of the data has no input_ids") as caught:
        trainer_of(tmp_path, rows, data_collator=pad).train()
    assert "lengths=" in str(caught.value.hint)
    with pytest.raises(UsageError, match="3 lengths for 8 sequences"):
        trainer_of(tmp_path, rows, lengths=[4, 5, 6]).train()


def test_a_model_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    model = llama()
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that trains"):
        trainer_of(tmp_path, ragged(8), model, optim="sgd").train()


def test_an_effective_batch_larger_than_the_data_is_one_step_an_epoch(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(6), num_train_epochs=2)
    trainer.train()
    assert ids_of(tmp_path) == [set(range(6))] * 2
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))
