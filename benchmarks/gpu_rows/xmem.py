"""xMem's evaluation of gpt-neo-125M on an RTX 3060 (Stone-ResearchLife/xMem, experiments_llm/evaluation.py @03f7a21)."""

from __future__ import annotations

from brim.memory.setup import Setup, Target

from .case import Case, Row, find_config, measured_bytes

READ = (
    "fp32, eager attention (GPT-Neo had no other), every batch taken as padded to 128, where the tokenizer cuts; the loop holds `outputs`,"
    " keys and values among them, until the next forward returns; no clipping; nvidia-smi = reserved + context"
)


def case_of(row: Row) -> tuple[Case, float]:
    """A row as an estimate."""
    setup = Setup(
        config=find_config(row["model"]),
        task="causal-lm",
        micro_batch=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        optimizer="sgd" if row["optimizer"] == "SGD" else "adamw",
        attention="eager",
        max_grad_norm=None,
    )
    case = Case(setup, Target("cuda", (8, 6)), "nvidia-smi", keeps="always", caches=True, card="rtx-3060")
    return case, measured_bytes(row)
