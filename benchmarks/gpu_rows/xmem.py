"""xMem's evaluation of gpt-neo-125M on an RTX 3060 (Stone-ResearchLife/xMem).

What is judged is `max(used - used at the start)`, read from NVML (the evaluation's `_get_ground_truth`). The monitor starts inside the
training loop, after `set_per_process_memory_fraction` (exp/trainer/__init__.py @0715122, `train_on_gpu`), which has asked the device how
much memory it has and so has made the CUDA context: the difference is what the allocator reserved, and the code of the kernels that were
loaded later.
"""

from __future__ import annotations

from brim.memory.setup import Setup, Target

from .case import Case, Row, find_config, measured_bytes

READ = (
    "fp32, eager attention (GPT-Neo had no other), every batch taken as padded to 128, where the tokenizer cuts; the loop holds `outputs`,"
    " keys and values among them, until the next forward returns, and drops gradients before it (the records' `zero_grad_mode` is null,"
    " which its loop reads as 0); no clipping; NVML's figure less what was used when the monitor started, with the context: reserved"
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
    case = Case(setup, Target("cuda", (8, 6)), "reserved", keeps="always", caches=True, card="rtx-3060")
    return case, measured_bytes(row)
