"""Encoder and decoder: two lengths a row, and the Seq2SeqTrainer's own evaluation by generating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

import brim
from brim.step.budget import Budget
from brim.trainer.hf import BrimMixin
from tests.trainer.small import ids_of, lines, logged, near
from tests.trainer.words import tokenizer

Row = dict[str, list[int]]


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def rows_of(count: int) -> list[Row]:
    random = torch.Generator().manual_seed(2)

    def tokens() -> list[int]:
        length = int(torch.randint(3, 16, (1,), generator=random))
        return [*torch.randint(3, 64, (length,), generator=random).tolist(), 1]

    return [{"input_ids": tokens(), "labels": tokens()} for _row in range(count)]


class BrimSeq2SeqTrainer(BrimMixin, Seq2SeqTrainer):  # type: ignore[misc]
    """The mixin before the class."""


def collator(model: Any, words: PreTrainedTokenizerFast) -> DataCollatorForSeq2Seq:
    return DataCollatorForSeq2Seq(words, model=model)


def make(folder: Path, rows: list[Row], kind: Any, budget: Budget | None = None, **options: Any) -> Any:
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3, lr_scheduler_type="constant",
        predict_with_generate=True, generation_max_length=6, **options,
    )  # fmt: skip
    model, words = t5(), tokenizer()
    own = {"budget": budget} if issubclass(kind, BrimMixin) else {}
    return kind(
        model=model, args=args, train_dataset=rows, eval_dataset=rows[:4], data_collator=collator(model, words),
        processing_class=words, compute_metrics=lambda found: {"width": found.predictions.shape[1]}, **own,
    )  # fmt: skip


@pytest.mark.parametrize(
    "budget", [Budget.sequences(1), Budget.tokens(90), None], ids=["one-sequence", "ninety-tokens", "from-the-arguments"]
)
def test_sources_and_targets_of_any_length_make_the_step_of_one_large_batch(tmp_path: Path, budget: Budget | None) -> None:
    rows = rows_of(16)
    trainer = make(tmp_path, rows, BrimSeq2SeqTrainer, budget, num_train_epochs=2)
    trainer.train()
    model = t5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    collate, losses = collator(model, tokenizer()), []
    for batch in ids_of(tmp_path):
        loss = model(**collate([rows[place] for place in sorted(batch)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert logged(trainer) == near(losses)
    tokens = sum(len(row["input_ids"]) + len(row["labels"]) for row in rows)
    assert sum(line["tokens"] for line in lines(tmp_path)) == 2 * tokens
    assert sum(line["supervised_tokens"] for line in lines(tmp_path)) == 2 * sum(len(row["labels"]) for row in rows)


def test_evaluation_generates_as_ever(tmp_path: Path) -> None:
    trainer = make(tmp_path, rows_of(16), Seq2SeqTrainer, eval_strategy="epoch", num_train_epochs=1)
    before = trainer.evaluate()
    brim.attach(trainer)
    trainer.train()
    assert logged(trainer, "eval_width")[-1] == before["eval_width"]
    assert logged(trainer, "eval_loss")[-1] < before["eval_loss"]
