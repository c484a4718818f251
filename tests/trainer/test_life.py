"""Everything else of the Trainer keeps working around the step."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import brim
from brim.step.budget import Budget
from tests.trainer.small import arguments, by_hand, ids_of, lines, llama, logged, near, pad, ragged, trainer_of, weights


class Counter(TrainerCallback):
    """How often each thing happened."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.begun = self.substeps = self.updates = self.epochs = self.evaluations = self.saves = 0

    def on_step_begin(self, *_details: Any, **_keywords: Any) -> None:
        self.begun += 1

    def on_substep_end(self, *_details: Any, **_keywords: Any) -> None:
        self.substeps += 1

    def on_optimizer_step(self, *_details: Any, **_keywords: Any) -> None:
        self.updates += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
        self.steps.append(state.global_step)

    def on_epoch_end(self, *_details: Any, **_keywords: Any) -> None:
        self.epochs += 1

    def on_evaluate(self, *_details: Any, **_keywords: Any) -> None:
        self.evaluations += 1

    def on_save(self, *_details: Any, **_keywords: Any) -> None:
        self.saves += 1


def test_callbacks_are_called_once_for_each_optimizer_step(tmp_path: Path) -> None:
    counter = Counter()
    trainer = trainer_of(
        tmp_path, ragged(20), callbacks=[counter], num_train_epochs=2, budget=Budget.sequences(1),
        eval_dataset=ragged(4, 9), eval_strategy="epoch", save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer.train()
    assert counter.steps == [1, 2, 3, 4, 5, 6]
    assert (counter.begun, counter.updates, counter.substeps) == (6, 6, 0)
    assert (counter.epochs, counter.evaluations, counter.saves) == (2, 2, 3)


def test_a_callback_may_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ragged(16)
    trainer = trainer_of(
        tmp_path, rows, callbacks=[EarlyStoppingCallback(early_stopping_patience=1)], num_train_epochs=9,
        eval_dataset=rows, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True, save_total_limit=2,
    )  # fmt: skip
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_global_step) == (2, 1)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert len(lines(tmp_path)) == 2
    [summary] = lines(tmp_path, "summary")
    assert (summary["finished"], summary["reason"]) == (False, "A callback ended the training.")
    assert "brim: ended early after step 2: A callback ended the training. Steps: 2, " in capsys.readouterr().err


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, ragged(16), num_train_epochs=3, eval_dataset=ragged(4, 9), eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1,
    )  # fmt: skip
    trainer.train()
    best = min(logged(trainer, "eval_loss"))
    assert trainer.state.best_metric == best
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best)


def test_evaluation_in_between_does_not_change_the_training(tmp_path: Path) -> None:
    rows, runs = ragged(24), []
    for name, options in (("quiet", {}), ("evaluated", {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True})):
        trainer = trainer_of(tmp_path / name, rows, eval_dataset=ragged(6, 9), **options)
        trainer.train()
        runs.append(logged(trainer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_slice_and_load_what_one_process_would(tmp_path: Path, persistent: bool) -> None:
    rows = ragged(20)
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": persistent, "dataloader_prefetch_factor": 2}
    trainer = trainer_of(tmp_path, rows, num_train_epochs=2, **options)
    trainer.train()
    assert logged(trainer) == near(by_hand(llama(), rows, ids_of(tmp_path))[0])
    places = [place for line in lines(tmp_path) for place in line["sequence_ids"]]
    assert sorted(places) == sorted([*range(20), *range(20)])
    assert places[:20] != places[20:]


def test_a_short_last_batch_can_be_dropped(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(20), num_train_epochs=2, dataloader_drop_last=True)
    trainer.train()
    assert [line["sequences"] for line in lines(tmp_path)] == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("length", "steps"),
    [({"max_steps": 5}, 5), ({"num_train_epochs": 1.5}, 5), ({"num_train_epochs": 0.4}, 2), ({"max_steps": 2, "num_train_epochs": 4}, 2)],
    ids=["max_steps", "epoch-and-a-half", "less-than-one", "both"],
)  # fmt: skip
def test_a_run_is_as_long_as_the_arguments_say(tmp_path: Path, length: dict[str, Any], steps: int) -> None:
    trainer = trainer_of(tmp_path, ragged(20), **length)
    trainer.train()
    assert trainer.state.global_step == steps
    assert len(lines(tmp_path)) == steps


def test_training_twice_goes_on_with_the_weights_and_begins_a_new_run(tmp_path: Path) -> None:
    rows = ragged(16)
    trainer = trainer_of(tmp_path, rows)
    trainer.train()
    first = logged(trainer)
    trainer.train()
    second = logged(trainer)
    batches = ids_of(tmp_path)
    assert batches[:2] == batches[2:]
    assert len(lines(tmp_path, "header")) == 2
    assert [*first, *second] == near(by_hand(llama(), rows, batches)[0])


def test_tokens_and_flops_count_every_micro_batch(tmp_path: Path) -> None:
    rows = ragged(16)
    real = sum(len(row["input_ids"]) for row in rows)
    found = {}
    for wanted in ("all", "non_padding"):
        trainer = trainer_of(tmp_path / wanted, rows, include_num_input_tokens_seen=wanted, budget=Budget.sequences(3))
        trainer.train()
        found[wanted] = trainer.state.num_input_tokens_seen
        padded = sum(line["padded_tokens"] for line in lines(tmp_path / wanted))
        # The Trainer's own estimate is six operations for each weight and token of a batch.
        flops = 6 * padded * trainer.model.num_parameters(exclude_embeddings=True)
        assert trainer.state.total_flos == pytest.approx(flops)
    assert found == {"all": padded, "non_padding": real}


def test_an_arrow_data_set_with_other_columns_works(tmp_path: Path) -> None:
    rows = ragged(16)
    data = Dataset.from_list([{**row, "text": "a" * place} for place, row in enumerate(rows)])
    trainer = trainer_of(tmp_path, data, remove_unused_columns=True, budget=Budget.tokens(50))
    trainer.train()
    assert logged(trainer) == near(by_hand(llama(), rows, ids_of(tmp_path))[0])


def test_lengths_that_are_given_stand_for_those_that_cannot_be_seen(tmp_path: Path) -> None:
    rows = ragged(16)
    hidden = [{"place": place} for place in range(16)]
    lengths = [len(row["input_ids"]) for row in rows]

    def collate(items: Any) -> dict[str, torch.Tensor]:
        return pad([rows[item["place"]] for item in items])

    trainer = trainer_of(tmp_path, hidden, data_collator=collate, lengths=lengths)
    trainer.train()
    assert logged(trainer) == near(by_hand(llama(), rows, ids_of(tmp_path))[0])


def test_the_options_of_attach_are_those_of_the_mixin(tmp_path: Path) -> None:
    rows = ragged(20)
    trainer = trainer_of(tmp_path, rows, kind=Trainer)
    brim.attach(trainer, effective_batch=5, budget=Budget.sequences(2), ledger=tmp_path / "steps.jsonl")
    trainer.train()
    assert trainer.state.global_step == 4
    assert not (tmp_path / "ledger.jsonl").exists()
    assert (tmp_path / "steps.jsonl").exists()


def test_a_ledger_may_be_given_by_its_folder(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "out", ragged(8), kind=Trainer)
    brim.attach(trainer, ledger=tmp_path / "ledgers" / "first")
    trainer.train()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")] == ["ledgers/first/ledger.jsonl"]
    assert len(lines(tmp_path / "ledgers" / "first")) == 1


def test_two_trainers_on_the_same_arguments_have_the_same_effective_batch(tmp_path: Path) -> None:
    args, rows = arguments(tmp_path), ragged(16)
    trainers = [brim.attach(Trainer(llama(), args, data_collator=pad, train_dataset=rows), ledger=False) for _time in range(2)]
    for trainer in trainers:
        trainer.train()
        assert trainer.get_total_train_batch_size(trainer.args) == 8
        assert trainer.state.global_step == 2
    assert logged(trainers[0]) == logged(trainers[1])
    assert args.gradient_accumulation_steps == 2


def test_lengths_are_seen_anew_for_other_data(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(16))
    trainer.train()
    trainer.train_dataset = ragged(24, 5, longest=40)
    trainer.train()
    longest = [max(len(row["input_ids"]) for row in rows) for rows in (ragged(16), trainer.train_dataset)]
    headers = lines(tmp_path, "header")
    assert [header["sequences_in_data"] for header in headers] == [16, 24]
    assert [header["budget"]["limit"] for header in headers] == [4 * tokens for tokens in longest]
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    assert sum(line["tokens"] for line in lines(tmp_path)[2:]) == tokens


@pytest.mark.parametrize("ledger", [True, False], ids=["with-a-ledger", "without-a-ledger"])
def test_the_screen_says_what_is_in_force_and_how_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ledger: bool
) -> None:
    trainer_of(tmp_path, ragged(20), ledger=ledger, budget=Budget.tokens(2048)).train()
    first, last = (line for line in capsys.readouterr().err.splitlines() if line.startswith("brim: "))
    path = tmp_path / "ledger.jsonl" if ledger else "none"
    assert first == (f"brim: effective batch 8, steps in an epoch: 3, micro-batches of up to 2,048 tokens, ledger: {path}.")
    assert last.startswith("brim: the promise was kept. Steps: 3, sequences: 20, ")


def test_no_ledger_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ragged(8), ledger=False)
    trainer.train()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_an_error_of_the_data_is_the_error_of_the_run_and_in_the_ledger(tmp_path: Path) -> None:
    def collate(rows: Any) -> Any:
        if any(len(row["input_ids"]) == longest for row in rows) and trainer.state.global_step:
            raise ValueError("this row cannot be read")
        return pad(rows)

    rows = ragged(24)
    longest = max(len(row["input_ids"]) for row in rows)
    trainer = trainer_of(tmp_path, rows, data_collator=collate, num_train_epochs=2)
    with pytest.raises(ValueError, match="cannot be read"):
        trainer.train()
    [summary] = lines(tmp_path, "summary")
    assert not summary["finished"]
    assert "cannot be read" in summary["reason"]
    assert weights(trainer.model).isfinite().all()


def test_a_trainer_that_is_deleted_gives_its_memory_back_at_once(tmp_path: Path) -> None:
    """As without brim: nothing waits for the garbage collector, which knows nothing of a GPU's memory."""
    trainer = trainer_of(tmp_path, ragged(8))
    trainer.train()
    gc.collect()
    gc.disable()
    try:
        model, optimizer = weakref.ref(trainer.model), weakref.ref(trainer.optimizer)
        del trainer
        assert model() is None
        assert optimizer() is None
    finally:
        gc.enable()


def test_looking_at_the_loader_in_between_does_no_harm(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        def on_step_end(self, *_details: Any, **_keywords: Any) -> None:
            seen.append(next(iter(trainer.get_train_dataloader())))

    seen: list[Any] = []
    trainer = trainer_of(tmp_path, ragged(16), callbacks=[Look()])
    trainer.train()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert set(seen[0].promised.tolist()) == ids_of(tmp_path)[0]


def test_gradients_need_not_be_clipped(tmp_path: Path) -> None:
    rows = ragged(8)
    trainer = trainer_of(tmp_path, rows, max_grad_norm=0.0, budget=Budget.sequences(3))
    trainer.train()
    assert logged(trainer, "grad_norm") == near(by_hand(llama(), rows, ids_of(tmp_path))[1])
