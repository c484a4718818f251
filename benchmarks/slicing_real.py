"""Real instructions, four ways into micro-batches: useful tokens a second, padding, and whether steps know of each other's lengths.

    python benchmarks/slicing_real.py ../shared/data/sft/alpaca_en_1k.json

Effective batch 64, one CPU, one model; every way runs the whole epoch, one optimizer step of each in turn, so that whatever else the
machine does meets all of them alike. All have the same peak of memory: the largest micro-batch of each holds at most as many padded
tokens as 8 of the longest sequences, which is what plain shuffling needs. The peers are transformers' own samplers.

The bars: brim wastes at most 5 % where shuffling wastes over 40 %; at least 1.7 times the useful tokens a second of shuffling, 0.97 of
`group_by_length`, 1.1 of `batch_rebalance`; mean lengths of successive steps are those of uniform shuffling over 30 epochs, and those
of `group_by_length` are not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from brim.machine.budget import MALLOC_ENVIRONMENT
from brim.machine.device import CpuDevice
from brim.sizes import format_bytes
from brim.step.batch import BatchPlan
from brim.step.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EFFECTIVE_BATCH = 64
MICRO_BATCH = 8
SEED = 42
EPOCHS_OF_LENGTHS = 30
PERMUTATIONS = 2000

Steps = list[list[list[int]]]
"""`[optimizer step][micro-batch]`: sequences."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--repeats", type=int, default=2, help="epochs that every way runs")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC_ENVIRONMENT.items()):
        # Freed memory goes back at once, so that the peak of each way can be read; the same for all.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_ENVIRONMENT})
    # Two threads that wait for each other on a busy machine measure the machine.
    torch.set_num_threads(1)
    sequences = tokenized(options.data)
    lengths = np.array([len(sequence) for sequence in sequences])
    limit = MICRO_BATCH * int(lengths.max())
    print(
        f"{len(lengths)} sequences, {lengths.mean():.0f} tokens on average, {lengths.max()} at most; limit {limit} padded tokens"
    )
    ways: dict[str, Callable[[int], Steps]] = {
        "shuffled": lambda epoch: shuffled(lengths, epoch),
        "group_by_length": lambda epoch: grouped(lengths, epoch),
        "batch_rebalance": lambda epoch: rebalanced(lengths, epoch, limit),
        "brim": lambda epoch: sliced(lengths, epoch, limit),
    }
    passed = throughput(sequences, ways, options.repeats)
    passed &= sampling(lengths, ways)
    return 0 if passed else 1


def tokenized(path: Path) -> list[list[int]]:
    """Instruction and answer in the tokens of a BPE that is trained on them: about as long as a real model's."""
    from tokenizers import ByteLevelBPETokenizer

    rows = json.loads(path.read_text(encoding="utf-8"))
    texts = ["\n".join(part for part in (row["instruction"], row.get("input", ""), row["output"]) if part) for row in rows]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=8000, show_progress=False)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def shuffled(lengths: Any, epoch: int) -> Steps:
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    return in_batches(order)


def grouped(lengths: Any, epoch: int) -> Steps:
    sampler = LengthGroupedSampler(
        EFFECTIVE_BATCH, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(SEED + epoch)
    )
    return in_batches(list(sampler))


def in_batches(order: Sequence[int]) -> Steps:
    steps = [order[start : start + EFFECTIVE_BATCH] for start in range(0, len(order), EFFECTIVE_BATCH)]
    return [[list(step[start : start + MICRO_BATCH]) for start in range(0, len(step), MICRO_BATCH)] for step in steps]


def rebalanced(lengths: Any, epoch: int, limit: int) -> Steps:
    """With the fewest micro-batches whose largest is within the limit in every epoch that is run: its best at this peak."""
    for accumulation in range(1, EFFECTIVE_BATCH + 1):
        if all(_largest(lengths, _rebalanced(lengths, each, accumulation)) <= limit for each in range(4)):
            return _rebalanced(lengths, epoch, accumulation)
    raise AssertionError


def _rebalanced(lengths: Any, epoch: int, accumulation: int) -> Steps:
    sampler = BatchRebalanceSampler(
        lengths=lengths.tolist(), effective_batch_size=EFFECTIVE_BATCH, dp_size=1, grad_accum=accumulation, seed=SEED,
        drop_last=False,
    )  # fmt: skip
    sampler.set_epoch(epoch)
    batches = [list(batch) for batch in sampler]
    return [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]


def sliced(lengths: Any, epoch: int, limit: int) -> Steps:
    plan = BatchPlan(lengths, effective_batch=EFFECTIVE_BATCH, seed=SEED)
    return [[ids.tolist() for ids in step[0]] for step in plan.epoch(epoch, Budget.tokens(limit))]


def _largest(lengths: Any, steps: Steps) -> int:
    return max(len(micro) * int(lengths[micro].max()) for step in steps for micro in step)


class Way:
    """One way, with its own model and optimizer."""

    def __init__(self, steps: list[Steps]) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8000,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        self.model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.steps = [step for epoch in steps for step in epoch]
        self.seconds = 0.0
        self.tokens = self.padded = self.micro_batches = self.peak_bytes = 0

    def run(self, index: int, sequences: list[list[int]]) -> None:
        device = CpuDevice()
        device.reset_peak()
        before = device.read().allocated_bytes
        began = time.perf_counter()
        step = self.steps[index]
        supervised = sum(len(sequences[place]) - 1 for micro in step for place in micro)
        for micro in step:
            batch = collate([sequences[place] for place in micro])
            self.model(**batch, num_items_in_batch=supervised).loss.backward()
            self.tokens += sum(len(sequences[place]) for place in micro)
            self.padded += batch["input_ids"].numel()
            self.micro_batches += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - began
        self.peak_bytes = max(self.peak_bytes, device.read().peak_allocated_bytes - before)


def collate(sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, sequences))
    ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def throughput(sequences: list[list[int]], ways: dict[str, Callable[[int], Steps]], repeats: int) -> bool:
    runs = {name: Way([way(epoch) for epoch in range(repeats)]) for name, way in ways.items()}
    for run in runs.values():  # everything that is done once is done now
        run.run(0, sequences)
        run.seconds = 0.0
        run.tokens = run.padded = run.micro_batches = run.peak_bytes = 0
    count = len(runs["brim"].steps)
    for index in range(count):
        names = list(runs)
        for name in names[index % 4 :] + names[: index % 4]:
            if index < len(runs[name].steps):
                runs[name].run(index, sequences)
    brim = runs["brim"]
    print(f"\n{'':16} {'padding':>8} {'micro-batches':>14} {'peak above rest':>16} {'tokens/s':>9} {'brim is':>8}")
    speed = {name: run.tokens / run.seconds for name, run in runs.items()}
    for name, run in runs.items():
        print(
            f"{name:16} {1 - run.tokens / run.padded:8.1%} {run.micro_batches / count:14.1f} {format_bytes(run.peak_bytes):>16} "
            f"{speed[name]:9.0f} {speed['brim'] / speed[name]:7.2f}x"
        )
    wasted = {name: 1 - run.tokens / run.padded for name, run in runs.items()}
    bars = {
        "brim's padding <= 5 %": wasted["brim"] <= 0.05,
        "shuffling's padding > 40 %": wasted["shuffled"] > 0.4,
        ">= 1.7 x shuffled": speed["brim"] >= 1.7 * speed["shuffled"],
        ">= 0.97 x group_by_length": speed["brim"] >= 0.97 * speed["group_by_length"],
        ">= 1.1 x batch_rebalance": speed["brim"] >= 1.1 * speed["batch_rebalance"],
        "peak <= shuffling's": brim.peak_bytes <= 1.02 * runs["shuffled"].peak_bytes,
    }
    return told(bars)


def sampling(lengths: Any, ways: dict[str, Callable[[int], Steps]]) -> bool:
    """Are mean lengths of neighbouring steps more alike than chance? Within epochs, by permuting the steps of each epoch."""
    random = np.random.default_rng(0)
    print(f"\nmean lengths of successive steps, {EPOCHS_OF_LENGTHS} epochs, {PERMUTATIONS} permutations")
    found = {}
    for name in ("brim", "group_by_length"):
        epochs = [mean_lengths(lengths, ways[name](epoch)) for epoch in range(EPOCHS_OF_LENGTHS)]
        value = neighbours(epochs)
        chance = np.array([neighbours([random.permutation(each) for each in epochs]) for _try in range(PERMUTATIONS)])
        found[name] = float((1 + (np.abs(chance - chance.mean()) >= abs(value - chance.mean())).sum()) / (1 + PERMUTATIONS))
        print(f"{name:16} correlation of neighbours {value:+.3f}, p = {found[name]:.4f}")
    spread = {
        name: np.concatenate([mean_lengths(lengths, ways[name](epoch)) for epoch in range(EPOCHS_OF_LENGTHS)]).std()
        for name in ("brim", "shuffled", "group_by_length")
    }
    print("spread of mean lengths: " + ", ".join(f"{name} {value:.1f}" for name, value in spread.items()))
    return told({"brim passes (p > 0.01)": found["brim"] > 0.01, "group_by_length fails": found["group_by_length"] <= 0.01})


def neighbours(epochs: list[Any]) -> float:
    """Correlation of a step's mean length with the next one's, over all epochs."""
    first = np.concatenate([each[:-1] for each in epochs])
    second = np.concatenate([each[1:] for each in epochs])
    return float(np.corrcoef(first, second)[0, 1])


def mean_lengths(lengths: Any, steps: Steps) -> Any:
    """Of every full step of an epoch."""
    ids = [[place for micro in step for place in micro] for step in steps]
    return np.array([lengths[step].mean() for step in ids if len(step) == EFFECTIVE_BATCH])


def told(bars: dict[str, bool]) -> bool:
    for bar, kept in bars.items():
        print(f"  {'kept  ' if kept else 'BROKEN'} {bar}")
    return all(bars.values())


if __name__ == "__main__":
    raise SystemExit(main())
