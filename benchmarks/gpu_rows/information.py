"""litgpt and torchtune: their own model code, for which transformers' model of the same sizes stands. Printed, not counted."""

from __future__ import annotations

import torch

from brim.memory.setup import Setup, Target

from .case import Case, OutOfScopeError, Row, adapters_to, find_config, measured_bytes

READ = (
    "one GPU, bfloat16 throughout, no padding; litgpt: outputs held over the step, no clipping, real lengths shorter than the stated cap;"
    " torchtune: packed batches at full length, its compilation, its chunked loss and its optimizer inside backward not modelled"
)
MODELS = {
    "phi-1.5 1.3 B": "microsoft/phi-1_5",
    "phi-2": "microsoft/phi-2",
    "Phi-3-mini-4k-instruct": "microsoft/Phi-3-mini-4k-instruct",
    "falcon-7b": "tiiuae/falcon-7b",
    "Llama 3.1 8B": "meta-llama/Llama-3.1-8B",
    "Llama 3.2 3B": "meta-llama/Llama-3.2-3B",
}
_TARGETS = {
    "microsoft/phi-1_5": ("q_proj", "v_proj"),
    "microsoft/phi-2": ("all-linear",),
    "microsoft/Phi-3-mini-4k-instruct": ("all-linear",),
    "tiiuae/falcon-7b": ("query_key_value",),
}


def case_of(row: Row) -> tuple[Case, float]:
    """A row as an estimate."""
    if row["model"] not in MODELS:
        raise OutOfScopeError(f"missing field: config of {row['model']}")
    if row["n_gpu"] != "1" or row["sharding"] != "none":
        raise OutOfScopeError(f"sharded: {row['sharding']}, by Lightning's FSDP or torchtune's")
    if not row["seq_len"].isdigit() or "Adapter" in row["method"] or "offload" in row["grad_ckpt"]:
        raise OutOfScopeError("missing field: length" if not row["seq_len"] else f"method {row['method']}, {row['grad_ckpt']}")
    name = MODELS[row["model"]]
    quantised = "nf4" in row["method"] or row["method"].startswith("QLoRA")
    setup = Setup(
        config=find_config(name),
        task="causal-lm",
        micro_batch=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        padded=False,
        method="full" if row["method"] == "full" else "qlora" if quantised else "lora",
        lora_rank=int(row["lora_rank"] or 8),
        lora_targets=_TARGETS.get(name, ("q_proj", "v_proj")),
        precision="bf16",
        prepared=False,
        checkpointing="full" if row["grad_ckpt"] == "yes" or row["id"] in {"torchtune-002", "torchtune-005"} else "none",
        max_grad_norm=None,
    )
    metric = "allocated" if row["metric"] == "active" else row["metric"]
    case = Case(setup, Target("cuda", (8, 0)), metric, loss="shifted", upcasts_logits=True, keeps="step", change=_all_half)
    return case, measured_bytes(row)


def _all_half(model: torch.nn.Module) -> None:
    adapters_to(torch.bfloat16, model)
