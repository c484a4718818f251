"""TRL's SFTTrainer on questions and answers, with brim attached. Only the answers are learned.

Look at the ledger's table: every step holds 12 sequences, as 3 x 4 promises, while the number of micro-batches follows their lengths; and
the loss is the mean over the supervised tokens of all 12. Without `--brim` the same script runs as TRL runs it, without such a table.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

import brim

PLACES = {"Oslo": "Norway", "Lima": "Peru", "Hanoi": "Vietnam", "Cairo": "Egypt", "Quito": "Ecuador", "Riga": "Latvia"}
ENDINGS = (".", ", as most people know.", ", and it has been so for a long time, whatever older maps may say.")
ROWS = [
    {"prompt": f"Where is {city}?", "completion": f" In {country}{ending}"}
    for city, country in PLACES.items()
    for ending in ENDINGS * 2
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Learned from the rows themselves: nothing to download."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    teacher = trainers.BpeTrainer(vocab_size=128, special_tokens=["<pad>", "</s>"], show_progress=False)
    learned.train_from_iterator([row["prompt"] + row["completion"] for row in ROWS], teacher)
    return PreTrainedTokenizerFast(tokenizer_object=learned, pad_token="<pad>", eos_token="</s>")


def main(words: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each step."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--brim", action="store_true", help="attach brim to TRL's trainer")
    options.add_argument("--output", type=Path, default=Path("build/sft"), help="where the run goes")
    choice = options.parse_args(words)

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir=str(choice.output), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no",
        logging_steps=1, per_device_train_batch_size=3, gradient_accumulation_steps=4, num_train_epochs=4, learning_rate=1e-2,
        max_length=128, gradient_checkpointing=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    if choice.brim:
        brim.attach(trainer)
    trainer.train()
    if choice.brim:
        show(choice.output / "ledger.jsonl")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def show(path: Path) -> None:
    """One line for each optimizer step, from the file that proves it."""
    print("step    loss  sequences  micro-batches             supervised  padding")
    for step in brim.read_ledger(path).steps:
        shapes = " ".join(f"{one.sequences}x{one.length}" for one in step.slices)
        padding = 1 - (step.tokens or 0) / (step.padded_tokens or 1)
        print(f"{step.step:4} {step.loss:7.4f} {step.sequences:10}  {shapes:25} {step.supervised_tokens:10} {padding:8.1%}")


if __name__ == "__main__":
    main()
