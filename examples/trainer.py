"""A Trainer script as people write it. `--brim` adds the line that makes every step exact and survives full memory."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import brim

SUBJECTS = ["The harbour", "A small engine", "Her notebook", "The old map", "Rain"]
ENDINGS = ["waits.", "tells more than it shows.", "was repaired twice, and still hums at night when nobody listens."]
ROWS = [list(f"{subject} {ending}".encode()) for subject in SUBJECTS for ending in ENDINGS for _copy in range(2)]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Bytes are the tokens; 0 pads, and is no label."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def main(words: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--brim", action="store_true", help="attach brim to the Trainer")
    options.add_argument("--output", default="build/example", help="where the run goes")
    choice = options.parse_args(words)

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    arguments = TrainingArguments(
        output_dir=choice.output, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=5, gradient_accumulation_steps=6, num_train_epochs=5, learning_rate=3e-3,
    )  # fmt: skip
    data = [{"input_ids": row} for row in ROWS]
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=data)
    if choice.brim:
        brim.attach(trainer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
