"""What a loss is the mean of is found by asking the model; a loss that cannot be cut exactly is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from brim.errors import UnsupportedError
from brim.step.batch import BatchPlan
from brim.step.budget import Budget
from brim.step.ledger import read_ledger
from brim.step.loading import StepDataset
from brim.step.loss import counting_of, looking_on
from brim.step.micro import IGNORED, Counting, MicroBatch
from brim.step.oom import Guard
from brim.trainer.hf import attach
from tests.step import toys
from tests.step.faults import swiftly

Features = dict[str, Any]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    with swiftly():
        yield


def asked(model: torch.nn.Module, data: Sequence[Features], collate: Callable[[Any], Any] = toys.collate) -> Counting:
    """As the loop asks before its first step."""

    plan = BatchPlan([len(row["input_ids"]) for row in data], effective_batch=len(data))
    steps = StepDataset(data, collate, plan, Guard(Budget.tokens(1 << 20)))
    return counting_of(steps, model, lambda batch, _items: model(**batch)["loss"])


class Own(torch.nn.Module):
    """A model that makes its loss itself from the losses of tokens, whatever else it is passed."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(toys.VOCABULARY, 8)
        self.head = torch.nn.Linear(8, toys.VOCABULARY)
        self.loss = loss

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None, **_kwargs: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))[:, :-1]
        labels = labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
        return {"loss": self.loss(losses, labels != IGNORED), "logits": logits}


def mean(losses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return losses.sum() / counts.sum()


def mean_of_row_means(losses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return (losses.sum(1) / counts.sum(1)).mean()


def over_padding(losses: torch.Tensor, _counts: torch.Tensor) -> torch.Tensor:
    return losses.mean()


def summed(losses: torch.Tensor, _counts: torch.Tensor) -> torch.Tensor:
    return losses.sum()


def test_a_causal_model_counts_next_tokens() -> None:
    assert asked(toys.model(), toys.data(16)) == "next-token"


def bert(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(
        BertConfig(
            vocab_size=toys.VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            **options,
        )
    )


def test_an_encoder_that_labels_tokens_counts_all_labels() -> None:
    data = [
        {"input_ids": one["input_ids"], "labels": [token % 5 for token in one["input_ids"]]} for one in toys.data(16, longest=20)
    ]
    assert asked(bert(BertForTokenClassification, num_labels=5), data) == "token"


@pytest.mark.parametrize(
    ("labels", "options"), [([0, 1, 2], {"num_labels": 3}), ([0.5, -1.0, 2.0], {"num_labels": 1})], ids=["class", "value"]
)
def test_one_answer_a_sequence_is_counted_by_sequences(labels: list[Any], options: dict[str, Any]) -> None:
    data = toys.data(3, longest=20)

    def collate(features: Sequence[Features]) -> Features:
        batch: Features = dict(toys.collate(features))
        return {**batch, "labels": torch.tensor([labels[data.index(one)] for one in features])}

    found = asked(bert(BertForSequenceClassification, **options), data, collate)
    batch = collate(data)
    assert MicroBatch(np.arange(3), np.array([5, 5, 5]), batch).items(found) == 3


def test_an_encoder_with_a_decoder_counts_all_labels_of_the_target() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"decoder_start_token_id": 0, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=toys.VOCABULARY, dropout_rate=0.0, **sizes))
    targets = toys.data(8, seed=1, longest=12)
    data = [
        {"input_ids": one["input_ids"], "target": target["input_ids"]}
        for one, target in zip(toys.data(8, longest=20), targets, strict=True)
    ]

    def collate(features: Sequence[Features]) -> Features:
        source = toys.collate([{"input_ids": one["input_ids"], "labels": one["input_ids"]} for one in features])
        target = toys.collate([{"input_ids": one["target"], "labels": one["target"]} for one in features])
        return {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "labels": target["labels"]}

    assert asked(model, data, collate) == "token"


@pytest.mark.parametrize(("loss", "expected"), [(mean, "next-token"), (mean_of_row_means, "sequence")])
def test_a_model_that_takes_the_mean_itself_is_seen_through(loss: Loss, expected: Counting) -> None:
    assert asked(Own(loss), toys.data(16)) == expected


@pytest.mark.parametrize("loss", [over_padding, summed])
def test_a_loss_that_slices_would_change_is_refused(loss: Loss) -> None:
    with pytest.raises(
        UnsupportedError, match="not a mean over its labels: the gradient of two sequences together misses by"
    ) as caught:
        asked(Own(loss), toys.data(16))
    assert "Slices would then change the gradient" in str(caught.value.hint)


def test_a_loss_that_is_no_number_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not a mean over its labels"):
        asked(Own(lambda losses, _counts: losses.sum() / 0), toys.data(16))


def test_without_a_supervised_token_there_is_nothing_to_ask() -> None:
    data = [{"input_ids": [1, 2, 3], "labels": [IGNORED] * 3} for _place in range(4)]
    assert asked(Own(summed), data) == "next-token"


def test_rows_of_one_token_teach_a_causal_model_nothing_and_break_nothing(tmp_path: Path) -> None:
    single = [{"input_ids": [5], "labels": [5]} for _row in range(4)]
    assert asked(toys.model(), [*single, *toys.data(4)]) == "next-token"
    assert asked(toys.model(), single) == "next-token"
    norms = {}
    for name, rows in (("with", [*single, *toys.data(4)]), ("without", toys.data(4))):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=1,
            per_device_train_batch_size=1, gradient_accumulation_steps=len(rows), dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(toys.model(), arguments, train_dataset=rows, data_collator=toys.collate)
        attach(trainer, budget=Budget.sequences(1)).train()
        (entry,) = read_ledger(tmp_path / name / "ledger.jsonl").steps
        norms[name] = entry.grad_norm
    assert norms["with"] == pytest.approx(norms["without"], rel=1e-5)


@pytest.mark.parametrize("loss", [mean, mean_of_row_means])
def test_a_mean_behind_keywords_has_the_same_gradient_in_every_cut(loss: Loss, tmp_path: Path) -> None:
    """Such a model takes `**kwargs`, so the Trainer believes that it divides by the items of all micro-batches; it does not."""

    def run(sequences: int) -> tuple[list[float], torch.Tensor]:
        model = Own(loss)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(sequences)), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=3,
            per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=toys.data(24), data_collator=toys.collate)
        attach(trainer, budget=Budget.sequences(sequences)).train()
        entries = read_ledger(tmp_path / str(sequences) / "ledger.jsonl").steps
        assert all(entry.sequences == 8 for entry in entries)
        return [entry.grad_norm or 0.0 for entry in entries], model.head.weight.detach()

    (norms, weight), (whole_norms, whole) = run(1), run(8)
    assert norms == pytest.approx(whole_norms, rel=1e-4)
    torch.testing.assert_close(weight, whole, rtol=1e-4, atol=1e-6)


def test_looking_on_leaves_no_trace() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    model[1].eval()
    before, randomness = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with looking_on(model, torch.device("cpu")):
        model(torch.rand(3, 4))
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("loss", "expected"), [(mean, "next-token"), (mean_of_row_means, "sequence")])
def test_a_fresh_model_for_which_all_tokens_are_nearly_alike_is_seen_through_too(loss: Loss, expected: Counting) -> None:
    model = Own(loss)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05)
    assert asked(model, toys.data(16)) == expected


def test_a_mean_with_weights_is_refused_whichever_rows_come_first() -> None:
    rows: list[Features] = [{**row, "labels": place % 4 == 0} for place, row in enumerate(toys.data(24, longest=20))]

    def collate(features: Sequence[Features]) -> Features:
        batch: Features = dict(toys.collate([{**row, "labels": row["input_ids"]} for row in features]))
        return {**batch, "labels": torch.tensor([int(row["labels"]) for row in features])}

    model = bert(BertForSequenceClassification)
    steps = StepDataset(
        rows, collate, BatchPlan([len(row["input_ids"]) for row in rows], effective_batch=8), Guard(Budget.tokens(1 << 20))
    )
    weight = torch.tensor([1.0, 8.0])

    def weighted(batch: Features, _items: int | None) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return torch.nn.functional.cross_entropy(logits, batch["labels"], weight=weight)

    with pytest.raises(UnsupportedError, match="not a mean over its labels"):
        counting_of(steps, model, weighted)


def test_a_token_mean_over_labels_that_the_batch_does_not_show_is_refused() -> None:
    model = toys.model()

    def collate(features: Sequence[Features]) -> Features:
        return {name: value for name, value in toys.collate(features).items() if name != "labels"}

    rows = toys.data(16)
    steps = StepDataset(
        rows, collate, BatchPlan([len(row["input_ids"]) for row in rows], effective_batch=16), Guard(Budget.tokens(1 << 20))
    )
    with pytest.raises(UnsupportedError):
        counting_of(
            steps,
            model,
            lambda batch, _items: model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss,
        )


def test_rows_of_a_single_label_and_padding_on_the_left_do_not_hide_what_is_wrong() -> None:
    single = [{"input_ids": [3], "labels": [3]} for _row in range(24)] + [
        {"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in toys.data(8)
    ]
    assert asked(bert(BertForTokenClassification, num_labels=toys.VOCABULARY), single) == "token"

    def on_the_left(features: Sequence[Features]) -> Features:
        return {
            name: value.flip(1)
            for name, value in toys.collate([{k: v[::-1] for k, v in row.items()} for row in features]).items()
        }

    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in toys.data(16)]
    with pytest.raises(UnsupportedError) as caught:
        asked(toys.model(), rows, on_the_left)
    assert caught.value.hint is not None
    assert "pad on the right" in caught.value.hint


def test_a_mixture_of_experts_is_counted_by_tokens_whatever_its_balance_costs() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=toys.VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.02, initializer_range=0.1,
    )  # fmt: skip
    model = MixtralForCausalLM(config)  # type: ignore[no-untyped-call]
    rows = toys.data(16)
    steps = StepDataset(
        rows, toys.collate, BatchPlan([len(row["input_ids"]) for row in rows], effective_batch=16), Guard(Budget.tokens(1 << 20))
    )

    def told_the_count(batch: Features, items: int | None) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, num_items_in_batch=items).loss
        return loss

    assert counting_of(steps, model, told_the_count) == "next-token"
    assert model.router_aux_loss_coef == 0.02
