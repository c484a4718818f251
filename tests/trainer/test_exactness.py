"""The gradient of a step is that of one large batch, whatever computes the loss, and however it is sliced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, LlamaForCausalLM, Trainer

import brim
from brim.errors import UnsupportedError
from brim.step.budget import Budget
from brim.trainer.hf import BrimTrainer
from tests.trainer.small import Row, by_hand, equal, ids_of, lines, llama, logged, near, pad, ragged, trainer_of, weights
from tests.trainer.words import TEXTS, tokenizer

BUDGETS = [
    pytest.param(Budget.sequences(1), id="one-sequence"),
    pytest.param(Budget.sequences(8), id="eight-sequences"),
    pytest.param(Budget.tokens(60), id="sixty-tokens"),
    pytest.param(None, id="from-the-arguments"),
]


class OwnMean(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Takes the mean itself, and lets the trainer's count vanish in `**kwargs`."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **kwargs: Any) -> Any:
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits
        return {"loss": mean_of(logits, labels), "logits": logits}


class Deaf(OwnMean):  # type: ignore[no-untyped-call]
    """Takes no count at all, so that the Trainer divides by the number of micro-batches."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, attention_mask, labels)


def mean_of(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def of_kind(kind: Any) -> LlamaForCausalLM:
    """The weights of `llama()`."""
    plain = llama()
    model: LlamaForCausalLM = kind(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


def one_big_batch(rows: list[Row], steps: int = 1) -> tuple[list[float], list[float]]:
    return by_hand(llama(), rows, [range(len(rows))] * steps)


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_step_is_that_of_one_large_batch_for_every_budget(tmp_path: Path, budget: Budget | None) -> None:
    rows = ragged(30)
    trainer = trainer_of(tmp_path, rows, budget=budget, num_train_epochs=2)
    trainer.train()
    reference = llama()
    losses, norms = by_hand(reference, rows, ids_of(tmp_path))
    assert len(losses) == 8
    assert logged(trainer) == near(losses)
    assert logged(trainer, "grad_norm") == near(norms)
    assert torch.allclose(weights(trainer.model), weights(reference), atol=1e-5)


def test_an_attached_trainer_has_the_losses_of_the_plain_one_where_that_was_right(tmp_path: Path) -> None:
    """The whole data is one step, so that the order of shuffling plays no role."""
    rows = equal(8)
    plain = trainer_of(tmp_path / "plain", rows, kind=Trainer, num_train_epochs=6)
    plain.train()
    attached = trainer_of(tmp_path / "brim", rows, kind=Trainer, num_train_epochs=6)
    assert brim.attach(attached) is attached
    attached.train()
    assert len(logged(plain)) == 6
    assert logged(attached) == near(logged(plain))
    assert logged(attached, "grad_norm") == near(logged(plain, "grad_norm"))
    assert torch.allclose(weights(attached.model), weights(plain.model), atol=1e-5)


def test_a_model_that_counts_by_itself_behind_keywords_gets_the_right_gradient(tmp_path: Path) -> None:
    """The plain Trainer believes that it was told the count: the gradient comes out once for each micro-batch."""
    rows, options = equal(8), {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    _losses, [norm] = one_big_batch(rows)
    plain = trainer_of(tmp_path / "plain", rows, of_kind(OwnMean), Trainer, **options)
    plain.train()
    assert logged(plain, "grad_norm") == near([4 * norm])
    ours = trainer_of(tmp_path / "brim", rows, of_kind(OwnMean), budget=Budget.sequences(2), **options)
    ours.train()
    assert logged(ours, "grad_norm") == near([norm])


@pytest.mark.parametrize("kind", [OwnMean, Deaf])
def test_means_of_ragged_micro_batches_are_weighed_by_their_tokens(tmp_path: Path, kind: Any) -> None:
    """The plain Trainer takes the mean of the means, or their sum."""
    rows, options = ragged(8), {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_train_epochs": 4}
    losses, norms = one_big_batch(rows, 4)
    plain = trainer_of(tmp_path / "plain", rows, of_kind(kind), Trainer, **options)
    plain.train()
    assert logged(plain, "grad_norm") != near(norms, 1e-2)
    ours = trainer_of(tmp_path / "brim", rows, of_kind(kind), **options, budget=Budget.sequences(1))
    ours.train()
    assert logged(ours) == near(losses)
    assert logged(ours, "grad_norm") == near(norms)


class OwnLoss(BrimTrainer):
    """A subclass that computes the loss in its own way."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 2 * mean_of(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def test_a_subclass_may_compute_the_loss_itself(tmp_path: Path) -> None:
    rows = ragged(8)
    trainer = trainer_of(tmp_path, rows, kind=OwnLoss, budget=Budget.tokens(40), max_steps=1)
    trainer.train()
    [loss], _norms = one_big_batch(rows)
    assert logged(trainer) == near([2 * loss])


def sum_over_count(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """What the Trainer's page shows: a sum, divided by the count that it is given."""
    answer: torch.Tensor = mean_of(outputs.logits, labels, "sum") / num_items_in_batch
    return answer


def test_a_loss_function_that_is_given_is_used(tmp_path: Path) -> None:
    rows = ragged(16)
    trainer = trainer_of(tmp_path, rows, compute_loss_func=sum_over_count, budget=Budget.sequences(3))
    trainer.train()
    losses, norms = by_hand(llama(), rows, ids_of(tmp_path))
    assert logged(trainer) == near(losses)
    assert logged(trainer, "grad_norm") == near(norms)


def test_label_smoothing_is_the_same_for_every_slicing(tmp_path: Path) -> None:
    rows = ragged(16)
    runs = []
    for name, budget in (("one", Budget.sequences(1)), ("all", Budget.sequences(8))):
        trainer = trainer_of(tmp_path / name, rows, budget=budget, label_smoothing_factor=0.1)
        trainer.train()
        runs.append(logged(trainer) + logged(trainer, "grad_norm"))
    assert runs[0] == near(runs[1])
    assert runs[0][:2] != near(by_hand(llama(), rows, ids_of(tmp_path / "one"))[0], 1e-4)


def test_a_loss_that_is_no_mean_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def total(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return sum_over_count(outputs, labels, 1)

    trainer = trainer_of(tmp_path, ragged(16), compute_loss_func=total)
    before = weights(trainer.model)
    with pytest.raises(UnsupportedError, match="not a mean over its labels"):
        trainer.train()
    assert torch.equal(before, weights(trainer.model))


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    rows = ragged(16)
    trainer = trainer_of(tmp_path, rows, budget=Budget.sequences(2), gradient_checkpointing=True)
    trainer.train()
    losses, norms = by_hand(llama(), rows, ids_of(tmp_path))
    assert logged(trainer) == near(losses)
    assert logged(trainer, "grad_norm") == near(norms)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    rows = ragged(16)
    trainer = trainer_of(tmp_path, rows, budget=Budget.sequences(2), bf16=True)
    trainer.train()
    losses, norms = by_hand(llama(), rows, ids_of(tmp_path))
    assert logged(trainer) == near(losses, 1e-2)
    assert logged(trainer, "grad_norm") == near(norms, 3e-2)


def test_adapters_train_and_the_rest_stays(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    rows, runs = ragged(16), []
    for name, budget in (("one", Budget.sequences(1)), ("all", Budget.sequences(8))):
        torch.manual_seed(5)
        model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        frozen = {key: value.clone() for key, value in model.named_parameters() if not value.requires_grad}
        trainer = trainer_of(tmp_path / name, rows, model, budget=budget)
        trainer.train()
        assert all(torch.equal(frozen[key], value) for key, value in model.named_parameters() if key in frozen)
        runs.append(logged(trainer) + logged(trainer, "grad_norm"))
    assert runs[0] == near(runs[1])


def test_the_ledger_says_what_the_trainer_says(tmp_path: Path) -> None:
    rows = ragged(20)
    trainer = trainer_of(tmp_path, rows, lr_scheduler_type="linear")
    trainer.train()
    steps = lines(tmp_path)
    assert [line["loss"] for line in steps] == near(logged(trainer))
    assert [line["grad_norm"] for line in steps] == near(logged(trainer, "grad_norm"))
    assert [line["learning_rate"] for line in steps] == near([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert [line["sequences"] for line in steps] == [8, 8, 4]
    assert sorted(place for line in steps for place in line["sequence_ids"]) == list(range(20))
    assert sum(line["tokens"] for line in steps) == sum(len(row["input_ids"]) for row in rows)
    [header], [summary] = lines(tmp_path, "header"), lines(tmp_path, "summary")
    assert (header["effective_batch"], header["seed"], header["configuration"]["learning_rate"]) == (8, 3, 1e-3)
    assert summary["finished"]


def test_steps_without_a_supervised_token_learn_nothing_and_the_first_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in ragged(24)]
    trainer = trainer_of(tmp_path, rows, weight_decay=0.5)
    before = weights(trainer.model)
    trainer.train()
    assert torch.equal(before, weights(trainer.model))
    assert [line["skipped"] for line in lines(tmp_path)] == [True, True, True]
    said = [line for line in capsys.readouterr().err.splitlines() if "no supervised token" in line]
    assert said == ["brim: step 1 has no supervised token, so it was skipped. Further ones are only counted."]
    [summary] = lines(tmp_path, "summary")
    assert summary["skipped"] == 3


def masked_model(words: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    return BertForMaskedLM(config)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_collator_that_draws_at_random_does_not_hide_what_the_loss_counts(tmp_path: Path, seed: int) -> None:
    words = tokenizer()
    words.add_special_tokens({"mask_token": "<mask>"})
    draw = DataCollatorForLanguageModeling(words, mlm=True, mlm_probability=0.5)
    drawn: list[int] = []

    def collate(rows: Any) -> Any:
        batch = draw(rows)
        if len(rows) == 8:
            drawn.append(int((batch["labels"] != -100).sum()))
        return batch

    rows = [{"input_ids": words(text)["input_ids"]} for text in TEXTS]
    trainer = trainer_of(tmp_path, rows, masked_model(words), data_collator=collate, budget=Budget.sequences(8), seed=seed)
    trainer.train()
    # All labels count, the first of a row too: so it is for whoever does not shift them.
    assert [line["supervised_tokens"] for line in lines(tmp_path)] == drawn
    assert len(drawn) == 3


def test_what_a_micro_batch_may_cost_comes_from_the_arguments(tmp_path: Path) -> None:
    rows = ragged(16)
    trainer = trainer_of(tmp_path, rows, data_collator=pad)
    trainer.train()
    [header] = lines(tmp_path, "header")
    longest = max(len(row["input_ids"]) for row in rows)
    assert header["budget"] == {"unit": "tokens", "limit": 4 * longest}


def scaled(folder: Path, rows: list[Row], scale: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """As on a GPU: for a CPU accelerate leaves half precision out, so it is given a scaler and told to use it."""
    trainer = trainer_of(folder, rows, budget=Budget.sequences(2), **options)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.train()
    return trainer


def test_a_scaled_loss_gives_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ragged(16)
    trainer = scaled(tmp_path, rows, 2.0**10, monkeypatch)
    losses, norms = by_hand(llama(), rows, ids_of(tmp_path))
    assert logged(trainer) == near(losses, 1e-2)
    assert logged(trainer, "grad_norm") == near(norms, 1e-2)
    assert [line["skipped"] for line in lines(tmp_path)] == [False, False]


def test_a_step_that_overflows_is_skipped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = scaled(tmp_path, ragged(16), 2.0**127, monkeypatch, max_steps=4)
    skipped = [line["skipped"] for line in lines(tmp_path)]
    assert skipped[0]
    assert len(skipped) == 4
    assert weights(trainer.model).isfinite().all()
