"""A T5 that learns to write dates, in three sizes of memory. Sources and targets have lengths of their own.

Look across a line: one step, three budgets, the same loss. The micro-batches differ (last lines), the training does not. Dropout is 0 here;
with T5's own 0.1 the sequences of every step would still be the same, and the noise would not.
"""

import argparse
import datetime as dt
from pathlib import Path

import torch
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

import brim

BUDGETS = {"4 rows": brim.Budget.sequences(4), "300 tokens": brim.Budget.tokens(300), "all at once": brim.Budget.sequences(32)}
DAYS = [dt.date(1999, 1, 1) + dt.timedelta(days=37 * number) for number in range(96)]
PAIRS = [(f"{day:%d} {day:%B} {day:%Y}", day.isoformat()) for day in DAYS]


def main(words: list[str] | None = None) -> dict[str, list[float]]:
    """Train once for each budget, and return the losses of each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=Path("build/seq2seq_t5"), help="where the runs go")
    choice = options.parse_args(words)
    losses = {name: train(budget, choice.output / name.replace(" ", "-")) for name, budget in BUDGETS.items()}

    print("step ", *(f"{name:>12}" for name in losses))
    for number, row in enumerate(zip(*losses.values(), strict=True), 1):
        print(f"{number:4}  ", *(f"{loss:12.5f}" for loss in row))
    print("\nmicro-batches of step 1, as rows x (source + target)")
    for name in losses:
        step = brim.read_ledger(choice.output / name.replace(" ", "-") / "ledger.jsonl").steps[0]
        shapes = ", ".join(f"{one.sequences} x ({one.length} + {one.target_length})" for one in step.slices[:3])
        print(f"{name}: {len(step.slices)}, {shapes}{', ...' if len(step.slices) > 3 else ''}")
    return losses


def train(budget: brim.Budget, output: Path) -> list[float]:
    """One pass over the dates with micro-batches within the budget."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()  # bytes: nothing to download
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    rows = [{"input_ids": tokenizer(source).input_ids, "labels": tokenizer(target).input_ids} for source, target in PAIRS]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(output), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=8, gradient_accumulation_steps=4, num_train_epochs=2, learning_rate=3e-3,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, arguments, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer, model), processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    brim.attach(trainer, budget=budget)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
