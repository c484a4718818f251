"""litgpt and torchtune: their own model code, for which transformers' model of the same sizes stands. Printed, not counted."""

from __future__ import annotations

from typing import Any

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
    "Llama 3.1 70B": "meta-llama/Llama-3.1-70B",
    "Llama2-7B": "meta-llama/Llama-2-7b-hf",
    "StableLM Alpha 3 B": "stablelm",
    "StableLM Alpha 3B": "stablelm",
    "stablelm-base-alpha-3b": "stablelm",
}
STABLELM: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "vocab_size": 50688,
    "rotary_pct": 0.25,
    "use_parallel_residual": False,
}
"""litgpt/config.py, `stablelm-base-alpha-3b`."""
_TARGETS = {
    "microsoft/phi-1_5": ("q_proj", "v_proj"),
    "microsoft/phi-2": ("all-linear",),
    "microsoft/Phi-3-mini-4k-instruct": ("all-linear",),
    "tiiuae/falcon-7b": ("query_key_value",),
    "stablelm": ("query_key_value",),
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
        config=STABLELM if name == "stablelm" else find_config(name),
        task="causal-lm",
        micro_batch=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        padded=False,
        method="full" if row["method"] == "full" else "qlora" if quantised else "lora",
        lora_rank=int(row["lora_rank"] or 8),
        lora_targets=_TARGETS.get(name, ("q_proj", "v_proj")),
        precision="amp-bf16" if row["precision"] == "bf16-mixed" else "bf16",
        base_dtype="float32" if row["precision"] == "bf16-mixed" else None,
        prepared=False,
        checkpointing="full" if row["grad_ckpt"] == "yes" or row["id"] in {"torchtune-002", "torchtune-005"} else "none",
        max_grad_norm=None,
    )
    metric = "allocated" if row["metric"] == "active" else row["metric"]
    case = Case(setup, Target("cuda", (8, 0)), metric, loss="shifted", upcasts_logits=True, keeps="step", change=_all_half)
    return case, measured_bytes(row)


def _all_half(model: torch.nn.Module) -> None:
    adapters_to(torch.bfloat16, model)
