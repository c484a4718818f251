"""huggingface/peft: MetaMathQA of its method comparison (its own loop, one L40S), and the documents' runs of a 70B on two GPUs.

The loop sorts 20 batches at a time by length, longest first, and pads each batch to its own longest sequence (utils.py, `BucketIterator`).
It reads `memory_reserved()` after every step, and the 99th percentile of those readings is judged. Until mid-2025 it gave cached
memory back after every step (run.py @ec4739d), so that a reading belongs to its batch; since then after every tenth
(`ACCELERATOR_EMPTY_CACHE_SCHEDULE`), so that a reading belongs to the longest batch of ten. How long those batches are is not
published; it is the same for all rows of a schedule, and calibrated (`FITTED`).
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from functools import partial

from brim.memory.setup import Setup, Target
from brim.memory.sharding.shard import Parallel

from .case import Case, OutOfScopeError, Row, find_config, in_order, measured_bytes, set_dropout
from .fsdp_qlora import store_as_bfloat16
from .run import estimate

READ = (
    "reserved of the training steps, 99th percentile (the column's own peak includes generation with batch 50); the padded length is"
    " calibrated on the OTHER rows of the same empty_cache schedule; outputs, keys and values among them, held over the step. Documents:"
    " bfloat16 adapters and loss as transformers then had it, FSDP1 described by the model of FSDP2"
)
LONGEST = 768
"""The tokenizer's limit."""
FITTED: dict[str, dict[str, int]] = {
    "each step": {"peft-mm-142": 504, "peft-mm-143": 503, "peft-mm-144": 503},
    "each tenth step": {
        "peft-mm-028": 598,
        "peft-mm-032": 598,
        "peft-mm-033": 598,
        "peft-mm-034": 598,
        "peft-mm-088": 431,
        "peft-mm-098": 598,
    },
}
"""The padded length at which each row's estimate would be exact (`python benchmarks/memory_gpu.py --calibrate`)."""


def case_of(row: Row) -> tuple[Case, float]:
    """A row as an estimate, at the length that the other rows of its schedule have."""
    if "MetaMathQA" not in row["source"]:
        return _of_documents(row), measured_bytes(row)
    case, measured = _of_comparison(row)
    lengths = [length for name, length in FITTED[schedule_of(row)].items() if name != row["id"]]
    length = round(statistics.median(lengths)) if lengths else LONGEST
    return replace(case, setup=replace(case.setup, length=length)), measured


def schedule_of(row: Row) -> str:
    """How often cached memory was given back: the runs of mid-2025 are those with torch 2.7."""
    return "each step" if "torch 2.7" in row["notes"] else "each tenth step"


def fit(row: Row) -> int:
    """The padded length at which the estimate equals the measurement, by halving."""
    case, measured = _of_comparison(row)
    low, high = 100, LONGEST
    while high - low > 2:
        middle = (low + high) // 2
        found = estimate(replace(case, setup=replace(case.setup, length=middle)))
        low, high = (middle, high) if found.reserved < measured else (low, middle)
    return high


def _of_comparison(row: Row) -> tuple[Case, float]:
    if row["method"] not in {"LORA", "full"}:
        raise OutOfScopeError(f"method {row['method']}")
    if row["optimizer"] != "AdamW":
        raise OutOfScopeError(f"method: optimizer {row['optimizer']}")
    found = re.search(r"train-step reserved p99=([\d.]+) GB", row["notes"])
    if found is None:
        raise OutOfScopeError("missing field: a figure for the training steps alone")
    setup = Setup(
        config=find_config(row["model"]),
        task="causal-lm",
        micro_batch=int(row["micro_batch"]),
        length=LONGEST,
        method="full" if row["method"] == "full" else "lora",
        lora_rank=int(row["lora_rank"] or 8),
        lora_targets=tuple(row["lora_targets"].split(",")),
        precision="bf16",
        freeze=("lora_B",) if "mica" in row["source"] else (),  # trains A only: 5,505,024 parameters
    )
    case = Case(setup, Target("cuda", (8, 9)), "reserved", keeps="step", caches=True, empties=True, card="l40s")
    return case, float(found[1]) * 1e9


def _of_documents(row: Row) -> Case:
    """examples/sft/run_peft_qlora_{deepspeed_stage3,fsdp}.sh: TRL's trainer, 4 bits stored as bfloat16."""
    sharding = "zero3" if "ZeRO" in row["sharding"] else "fsdp"
    setup = Setup(
        config=find_config(row["model"]),
        task="causal-lm",
        micro_batch=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        padded=False,
        accumulation=4 if sharding == "zero3" else 2,
        method="qlora",
        lora_rank=int(row["lora_rank"]),
        lora_targets=("all-linear",),
        lora_dtype="bfloat16",
        precision="bf16",
        prepared=False,
        checkpointing="full",
    )
    return Case(
        setup,
        Target("cuda", (8, 0)),
        "unknown",
        loss="shifted",
        repeats_heads=True,
        change=in_order(store_as_bfloat16, partial(set_dropout, 0.1)),
        parallel=Parallel(sharding, 2, offload="parameters" if "offload" in row["sharding"] else "none", hidden=8192),  # type: ignore[arg-type]
    )
