"""Recorded snapshots of one step: a course's own models, and TinyLlama on an 8-bit base (cranberrii/ftcourse)."""

from __future__ import annotations

from brim.memory.setup import Setup, Target

from .case import Case, OutOfScopeError, Row, find_config, measured_bytes

READ = (
    "TinyLlama on an 8-bit base, one forward and backward of a model that nobody put into training mode, so without checkpointing and"
    " dropout; heads repeated before attention as transformers did in 2024, after which no kernel that any GPU takes holds the S x S scores"
)


def case_of(row: Row) -> tuple[Case, float]:
    """A row as an estimate."""
    if not row["source"].startswith("cranberrii"):
        raise OutOfScopeError("a hand-written model, not the Hugging Face stack")
    setup = Setup(
        config=find_config(row["model"]),
        task="causal-lm",
        micro_batch=1,
        length=int(row["seq_len"]),
        padded=False,
        method="lora-8bit",
        lora_rank=16,
        precision="fp16",
        max_grad_norm=None,
    )
    case = Case(
        setup, Target("cuda", (7, 5)), row["metric"], optimizer_steps=False, loss="shifted", keeps="step", repeats_heads=True
    )
    return case, measured_bytes(row)
