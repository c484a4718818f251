"""axolotl's examples: what a README says a yaml needs (axolotl-ai-cloud/axolotl, examples/)."""

from __future__ import annotations

from functools import partial
from typing import Any

from brim.memory.setup import Setup, Target

from .case import Case, Change, OutOfScopeError, Row, find_config, in_order, measured_bytes, set_dropout
from .qwen import train_embeddings

READ = (
    "Trainer's bf16 autocast, packed so no mask, flash attention 2; norms, embeddings and head in bfloat16; cut_cross_entropy = no logits;"
    " the paged optimizer's state counted as off the device; GPU taken as sm89; yaml at HEAD, README perhaps older (row 024: 8-bit"
    " weights and the trained copies of embedding and head alone are more than the README's 11 GB)"
)
_OPTIMIZERS = {
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "paged_adamw_32bit": "sgd",
}
_MIXTURES = ("GLM-4.7-Flash", "Qwen3-Next", "gpt-oss", "granite-4.0-tiny", "Llama-4-Scout")
SAME_AS = {
    "mistralai/Devstral-Small-2507": "mistralai/Mistral-Small-24B-Base-2501",
    "mistralai/Magistral-Small-2506": "mistralai/Mistral-Small-24B-Base-2501",
}
"""Both are trained from Mistral Small 3.1, whose text model has the sizes of Mistral Small 24B."""
CONFIGS: dict[str, dict[str, Any]] = {
    # Known from the Hub; 4.62e9 parameters as its card says (grouped heads, ReLU squared: docs.arcee.ai).
    "arcee-ai/AFM-4.5B": {
        "model_type": "arcee", "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 36, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128004, "hidden_act": "relu2", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    # Known from the Hub; 8.02e9 parameters as its card says.
    "mistralai/Ministral-8B-Instruct-2410": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "sliding_window": None, "tie_word_embeddings": False,
    },
    # Known from the Hub: Qwen2's layers, 7.83e9 parameters with one layer of multi-token prediction that training does not run.
    "XiaomiMiMo/MiMo-7B-RL": {
        "model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 151680, "tie_word_embeddings": False,
    },
    # The model card's table, and a copy of its config.json in the tests of an MLX port.
    "ByteDance-Seed/Seed-OSS-36B-Instruct": {
        "model_type": "seed_oss", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136, "attention_bias": True, "tie_word_embeddings": False,
    },
}  # fmt: skip


def case_of(row: Row) -> tuple[Case, float]:
    """A row as an estimate."""
    flags = row["notes"].partition("flags:")[2]
    _refuse(row, flags)
    targets = ("all-linear",) if row["lora_targets"] == "all-linear" else tuple(row["lora_targets"].split(","))
    setup = Setup(
        config=_config(row["model"]),
        task="causal-lm",
        micro_batch=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        padded=False,
        accumulation=4,
        method="qlora" if "load_in_4bit" in flags else "lora-8bit",
        lora_rank=int(row["lora_rank"]),
        lora_targets=targets,
        precision="amp-bf16",
        prepared=False,
        optimizer=_OPTIMIZERS[row["optimizer"]],  # type: ignore[arg-type]
        checkpointing="full",
    )
    changes: list[Change] = [train_embeddings] if row["source"].endswith("llama-3/lora-8b.yml") else []
    changes.append(partial(set_dropout, 0.05))
    loss = "hidden" if "cut_cross_entropy" in flags else "labels"
    case = Case(setup, Target("cuda", (8, 9)), "unknown", loss=loss, change=in_order(*changes))  # type: ignore[arg-type]
    return case, measured_bytes(row)


def _refuse(row: Row, flags: str) -> None:
    for flag in ("activation_offloading", "torch_compile"):
        if flag in flags:
            raise OutOfScopeError(f"method: {flag}, which brim does not model")
    if row["optimizer"] not in _OPTIMIZERS:
        raise OutOfScopeError(f"method: optimizer {row['optimizer']}, which brim does not model")
    if row["sharding"] != "none" and not row["n_gpu"]:
        raise OutOfScopeError("missing field: number of GPUs")
    if any(name in row["model"] for name in _MIXTURES):
        if "load_in" in flags:
            raise OutOfScopeError("method: experts of a mixture in 4 or 8 bits, which brim does not model")
        raise OutOfScopeError(f"missing field: config of {row['model']}")


def _config(name: str) -> Any:
    return CONFIGS.get(name) or find_config(SAME_AS.get(name, name))
