"""The same steps at several capacities of the card, in float: `brim.steps`, a hand-written loop with a gradient scaler, and a Hugging Face
Trainer with brim attached. `result`: for each loop and capacity, the ledger's sequences, losses and norms, and the phases that ran out of memory.
"""

import gc
import random
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import brim
from brim import Budget
from brim.step.ledger import read_ledger

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
draw = random.Random(0)
ROWS = [{"input_ids": [draw.randrange(3, 512) for _token in range(draw.randrange(12, 96))]} for _row in range(48)]
CAPACITIES = [None, *map(int, sys.argv[1:])]
"""MiB for the caching allocator; None: the whole card."""


def pad(rows):
    rows = [row["input_ids"] for row in rows]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).cuda()


def with_steps(folder, scaler=None):
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    options = {} if scaler is None else {"scaler": scaler}
    loop = brim.steps(
        ROWS,
        network,
        optimizer,
        effective_batch=16,
        budget=Budget.sequences(16),
        collate=pad,
        ledger=folder,
        max_norm=1.0,
        **options,
    )
    for step in loop:
        step.run()


def with_scaler(folder):
    with_steps(folder, torch.amp.GradScaler("cuda"))


def with_trainer(folder):
    arguments = TrainingArguments(
        output_dir=str(folder), report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, per_device_train_batch_size=16,
        num_train_epochs=1, learning_rate=1e-3, max_grad_norm=1.0, seed=7,
    )  # fmt: skip
    trainer = Trainer(model(), arguments, data_collator=pad, train_dataset=ROWS)
    brim.attach(trainer, ledger=folder, budget=Budget.sequences(16))
    trainer.train()


def run(loop, capacity):
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if capacity is None else (capacity << 20) / total)
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        loop(Path(folder))
        (ledger,) = Path(folder).rglob("*.jsonl")
        steps = list(read_ledger(ledger).steps)
    return {
        "ids": [sorted(step.sequence_ids) for step in steps],
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "phases": sorted({split.phase for step in steps for split in step.splits}),
        "slices": [[part.sequences for part in step.slices] for step in steps],
    }


result = {loop.__name__: [run(loop, capacity) for capacity in CAPACITIES] for loop in (with_steps, with_scaler, with_trainer)}
