"""What cannot be promised is refused before anything starts, with the reason and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer, Trainer

import brim
from brim.errors import BrimError, UnsupportedError, UsageError
from brim.trainer.hf import BrimMixin
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


WRONG: list[tuple[str, Any, str]] = [
    ("effective_batch", 16.0, "effective_batch is 16.0, and must be a whole number."),
    ("effective_batch", "64", "effective_batch is '64', and must be a whole number."),
    ("effective_batch", True, "effective_batch is True, and must be a whole number."),
    ("effective_batch", 0, "effective_batch must be at least 1, and is 0."),
    ("budget", 4096, "budget is 4096, and a number alone does not say of what."),
    ("budget", "8GB", "budget is '8GB', and a number alone does not say of what."),
    ("budget", 0, "budget is 0, and a number alone does not say of what."),
    ("on_broken", "raise", "on_broken is 'raise'; 'stop', 'warn' are known."),
    ("ledger", 7, "ledger is 7, and must be a file, a folder or False."),
]


@pytest.mark.parametrize(("name", "value", "told"), WRONG, ids=[f"{name}={value!r}" for name, value, _told in WRONG])
def test_an_option_that_is_wrong_is_refused_and_the_trainer_stays_as_it_was(
    tmp_path: Path, name: str, value: Any, told: str
) -> None:
    plain = trainer_of(tmp_path, ragged(8), kind=Trainer)
    callbacks = len(plain.callback_handler.callbacks)
    for give in (lambda: brim.attach(plain, **{name: value}), lambda: trainer_of(tmp_path, ragged(8), **{name: value})):
        with pytest.raises(UsageError) as caught:
            give()
        assert caught.value.message == told
    assert type(plain) is Trainer
    assert len(plain.callback_handler.callbacks) == callbacks
    assert plain.args.gradient_accumulation_steps == 2


def test_lengths_that_are_no_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lengths is 7, and must be a list of numbers"):
        trainer_of(tmp_path, ragged(8), lengths=7).train()


def test_an_accumulation_that_is_set_afterwards_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(8), kind=Trainer)
    brim.attach(trainer)
    trainer.args.gradient_accumulation_steps = 4
    with pytest.raises(UsageError, match="gradient_accumulation_steps was set to 4 after brim was attached") as caught:
        trainer.train()
    assert caught.value.hint == "Set it before brim.attach, or give effective_batch=... there."


class OwnLoader(Trainer):
    """Makes its own batches."""

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class OwnSampler(Trainer):
    """Chooses its own order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return super()._get_train_sampler(train_dataset)


class Heir(OwnSampler):
    """Has it from its parent."""


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (OwnLoader, "OwnLoader has its own get_train_dataloader"),
        (OwnSampler, "OwnSampler has its own _get_train_sampler"),
        (Heir, "OwnSampler has its own _get_train_sampler"),
    ],
    ids=["loader", "sampler", "inherited"],
)
def test_a_trainer_that_makes_its_own_batches_is_refused(tmp_path: Path, kind: type[Trainer], told: str) -> None:
    plain = trainer_of(tmp_path, ragged(8), kind=kind)
    with pytest.raises(UnsupportedError, match=f"{told}, and with brim's step it would never be asked") as caught:
        brim.attach(plain)
    assert caught.value.hint
    assert type(plain) is kind
    mixed = type("Mixed", (BrimMixin, kind), {})
    with pytest.raises(UnsupportedError, match=told):
        trainer_of(tmp_path, ragged(8), kind=mixed)


def test_a_mixin_after_its_trainer_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(UsageError, match="Wrong names BrimMixin after its Trainer") as caught:
        type("Wrong", (Trainer, BrimMixin), {})
    assert caught.value.hint == "Name it first: class Wrong(BrimMixin, Trainer)."
    right = type("Right", (BrimMixin, Seq2SeqTrainer), {})
    assert issubclass(type("Heir", (right,), {}), BrimMixin)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(8))
    trainer.optimizer = torch.optim.AdamW(llama().parameters())
    with pytest.raises(UsageError, match="optimizer holds none of the model's parameters"):
        trainer.train()
    assert not (tmp_path / "ledger.jsonl").exists()


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
