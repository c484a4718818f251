"""brim's own seconds inside an optimizer step, against the step of a model with 100 million parameters, in one process on the CPU.

    python benchmarks/step_overhead.py [--steps 3]

Everything inside `step.run()` that is not forward, backward, the clipping and the optimizer's own step is brim's: taking the state of
random numbers, counting labels and tokens, telling other ranks (here none), reading the device, checking the promise, writing the
ledger. Slicing, reading and collating are in the loader, before the step; they are told beside it. The bar: at most 1 % of the step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import brim
from brim.step.update import Updater

EFFECTIVE_BATCH = 64
TOKENS = 2048
BAR = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured, after one that is not")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=640,
        intermediate_size=1728,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=10,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.0f}M parameters, effective batch {EFFECTIVE_BATCH}, micro-batches of at most {TOKENS} padded tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    theirs = Stopwatch()
    lengths = np.clip(np.random.default_rng(0).lognormal(3.4, 0.6, EFFECTIVE_BATCH * (options.steps + 1)), 8, 128).astype(int)
    data = [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        loop = brim.steps(
            data,
            model,
            optimizer,
            effective_batch=EFFECTIVE_BATCH,
            budget=brim.Budget.tokens(TOKENS),
            collate=collate,
            ledger=folder,
        )
        theirs.wrap(loop._engine, "_compute")
        theirs.wrap(loop._updater, "_clip")
        theirs.wrap(loop._updater, "_step")
        assert isinstance(loop._updater, Updater)
        rows = [measured(step, theirs) for step in loop][1:]
    whole, own, waited = (float(np.median(column)) for column in np.array(rows).T)
    print(
        f"step {whole:.2f} s; brim's own {own * 1e3:.2f} ms = {own / whole:.3%}; slicing and collating before it {waited * 1e3:.2f} ms"
    )
    print(f"  {'kept  ' if own <= BAR * whole else 'BROKEN'} at most {BAR:.0%} of the step")
    return 0 if own <= BAR * whole else 1


class Stopwatch:
    """Seconds inside what is not brim's."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def measured(step: Any, theirs: Stopwatch) -> tuple[float, float, float]:
    theirs.seconds = 0.0
    began = time.perf_counter()
    entry = step.run()
    whole = time.perf_counter() - began
    return whole, whole - theirs.seconds, entry.wait_seconds


def collate(features: Any) -> dict[str, torch.Tensor]:
    longest = max(len(feature["input_ids"]) for feature in features)
    padded = torch.tensor([feature["input_ids"] + [0] * (longest - len(feature["input_ids"])) for feature in features])
    return {"input_ids": padded, "attention_mask": (padded != 0).long(), "labels": padded.masked_fill(padded == 0, -100)}


if __name__ == "__main__":
    raise SystemExit(main())
