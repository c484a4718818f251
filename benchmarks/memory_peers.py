"""Brim beside two others that predict a step's memory without running it, on the same work in one run.

    python benchmarks/memory_peers.py [--rounds N] [--small]

- torch's own `MemTracker` (torch.distributed._tools.mem_tracker) runs the whole step on fake tensors and counts storages. It knows the
  CPU's kernels where there is no GPU, so both are asked for the CPU here.
- `accelerate estimate-memory` multiplies the size of the weights; its functions are called as its command calls them, on a model from a
  config, since the command itself wants the Hub.

First small models, where the truth is measured: the step is really run, and torch's profiler records every allocation
(`brim.memory.tracing.measured`). Then one configuration of an 8B Llama, full fine-tuning in bfloat16 with checkpointing, where only time
can be compared: brim and MemTracker take turns N times, and the ratio of the medians counts. Both are warmed up by the small models. Exit 1
if the ratio is below 20, or if brim is farther from the truth than MemTracker by more than a tenth of a percent. `--small` leaves the 8B
model out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils.modeling import calculate_maximum_sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import brim
from brim.memory.peaks import walk_plain
from brim.memory.setup import Setup, Target
from brim.memory.tracing.building import build_model, make_batch
from brim.memory.tracing.depth import trace_deep
from brim.memory.tracing.measured import measure_step

LEAST_RATIO = 20.0
MOST_BEHIND_PERCENT = 0.1
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4000,
}  # fmt: skip
_GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 4000, "n_positions": 512}
SMALL: dict[str, dict[str, Any]] = {
    "llama, fp32, padded": {},
    "llama, fp32, unpadded": {"padded": False},
    "llama, bf16, unpadded": {"padded": False, "precision": "bf16"},
    "llama, bf16, checkpointed": {"precision": "bf16", "checkpointing": "full"},
    "llama, bf16, 1 x 32 tokens": {"precision": "bf16", "micro_batch": 1, "length": 32},
    "llama, LoRA, bf16": {"method": "lora", "precision": "bf16"},
    "gpt2, fp32, padded": {"config": _GPT2},
    "gpt2, fp32, checkpointed": {"config": _GPT2, "checkpointing": "full"},
}
IGNORES = "micro-batch, length, activations, logits, checkpointing, method, optimizer, kernels, the allocator"


@dataclass(frozen=True)
class Row:
    """Bytes."""

    name: str
    truth: int
    brim: int
    mem_tracker: int | None
    accelerate: int

    def error(self, peer: str) -> float | None:
        """Percent above the truth."""
        found = getattr(self, peer)
        return None if found is None else 100 * (found / self.truth - 1)

    def line(self) -> str:
        errors = (self.error(peer) for peer in ("brim", "mem_tracker", "accelerate"))
        shown = "".join(f"{'failed' if error is None else f'{error:+.3f} %':>14}" for error in errors)
        return f"{self.name:<30} {self.truth:>13,}{shown}"


def by_brim(setup: Setup) -> int:
    target = Target("cpu", threads=torch.get_num_threads())
    return walk_plain(trace_deep(setup, target).trace).peak_bytes()


def by_mem_tracker(setup: Setup) -> int:
    """Two steps, as its documentation shows it; the second has the optimizer's state."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(setup, device="cpu")
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable)
        batch = make_batch(setup, device="cpu")
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *(value for value in batch.values() if isinstance(value, torch.Tensor)))
        with tracker:
            for _step in range(2):
                tracker.reset_mod_stats()
                loss = model(**batch).loss
                loss.backward()
                del loss
                torch.nn.utils.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        peak = tracker.get_tracker_snapshot("peak")
    return sum(found["Total"] for found in peak.values())


def by_accelerate(setup: Setup) -> int:
    """The column "Training using Adam" of its table."""
    word = {"fp32": "float32", "bf16": "bfloat16"}[setup.precision]
    config = transformers.AutoConfig.for_model(**setup.config)
    automatic: Any = transformers.AutoModel
    with init_empty_weights():
        model = automatic.from_config(config, dtype=torch.float32)
    size, _largest = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(size, word).values()))


def judge(name: str, settings: dict[str, Any]) -> Row:
    arguments: dict[str, Any] = {"config": _LLAMA, "micro_batch": 4, "length": 256, **settings}
    setup = Setup(task="causal-lm", **arguments)
    try:
        tracked = by_mem_tracker(setup)
    except Exception as error:
        print(f"MemTracker, {name}: {type(error).__name__}: {error}")
        tracked = None
    return Row(name, measure_step(setup).peak_bytes, by_brim(setup), tracked, by_accelerate(setup))


@dataclass(frozen=True)
class Race:
    rounds: int
    brim_seconds: list[float]
    mem_tracker_seconds: list[float]
    brim_bytes: int
    mem_tracker_bytes: int
    accelerate_bytes: int

    @property
    def ratio(self) -> float:
        """How many times as long MemTracker takes."""
        return statistics.median(self.mem_tracker_seconds) / statistics.median(self.brim_seconds)


def race(rounds: int) -> Race:
    config = brim.find_model("llama-3-8b").config
    assert config is not None
    setup = Setup(config=config, task="causal-lm", micro_batch=4, length=2048, precision="bf16", checkpointing="full")
    times: dict[str, list[float]] = {"brim": [], "mem_tracker": []}
    found: dict[str, int] = {}
    for _round in range(rounds):
        for name, work in (("brim", by_brim), ("mem_tracker", by_mem_tracker)):
            began = time.process_time()
            found[name] = work(setup)
            times[name].append(time.process_time() - began)
            print(f"  {name:<12} {times[name][-1]:8.2f} s of CPU time   {found[name]:>16,} bytes", flush=True)
    return Race(rounds, times["brim"], times["mem_tracker"], found["brim"], found["mem_tracker"], by_accelerate(setup))


def report(rows: list[Row]) -> dict[str, float]:
    """The median error of each, without its sign."""
    medians = {}
    for peer in ("brim", "mem_tracker", "accelerate"):
        errors = [abs(error) for row in rows if (error := row.error(peer)) is not None]
        medians[peer] = statistics.median(errors) if errors else float("nan")
        worst = max(errors, default=float("nan"))
        print(f"{peer:<12} median |error| {medians[peer]:.4f} %, worst {worst:.4f} %, {len(errors)} of {len(rows)} cases")
    return medians


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    print(f"{'measured on the CPU':<30} {'bytes':>13}{'brim':>14}{'MemTracker':>14}{'accelerate':>14}")
    rows = []
    for name, settings in SMALL.items():
        rows.append(judge(name, settings))
        print(rows[-1].line(), flush=True)
    medians = report(rows)
    print(f"accelerate estimate-memory ignores {IGNORES}")
    passed = medians["brim"] <= medians["mem_tracker"] + MOST_BEHIND_PERCENT
    document: dict[str, Any] = {"rows": [asdict(row) for row in rows], "medians": medians}
    if not options.small:
        print("llama-3-8b, 4 x 2048 tokens, bf16, checkpointed, AdamW, in turns:")
        found = race(options.rounds)
        passed = passed and found.ratio >= LEAST_RATIO
        print(f"MemTracker takes {found.ratio:.0f} times as long as brim (bar: {LEAST_RATIO:.0f})")
        print(f"accelerate says {found.accelerate_bytes:,} bytes, whatever the batch")
        document |= {"race": asdict(found), "ratio": found.ratio}
    print(f"the bars are {'kept' if passed else 'MISSED'}")
    print(json.dumps({"passed": passed, **document}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
