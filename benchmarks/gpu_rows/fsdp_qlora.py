"""AnswerDotAI/fsdp_qlora: the notebook that profiles a "1B" Llama, and train.py on two consumer cards."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.memory.setup import Setup, Target
from brim.memory.sharding.shard import Parallel
from brim.memory.tracing.quantized import QuantizedLinear

from .case import Case, Change, OutOfScopeError, Row, adapters_to, find_config, in_order, measured_bytes, set_dropout

if TYPE_CHECKING:
    from collections.abc import Mapping

READ = (
    "notebook: everything bfloat16, loss = logits.mean(), logits in float32, outputs with keys and values held to the end, LoRA dropout"
    " 0.1, no optimizer; torch 2.1 (a mean keeps its input), transformers 4.36/37 (each layer has its own table of rotary positions and"
    " looks it up), 4-bit scales not double-quantised, 4-bit layers keep their input; rows 033-044 were read after forward and after"
    " backward; GPU taken as sm80 or newer. train.py: bfloat16, rank 64 on all but o_proj, float32 logits copied once more for the loss,"
    " outputs held over the optimizer's step, torch 2.2 as its README recommends, FSDP1 as FSDP2, NO_SHARD as one device"
)
NOTEBOOK: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
_POSITIONS = 2048
"""LlamaConfig's default; a longer sequence makes longer tables."""
YI_34B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "num_hidden_layers": 60,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "vocab_size": 64000,
    "tie_word_embeddings": False,
}
"""01-ai/Yi-34B, config.json."""


def case_of(row: Row) -> tuple[Case, float]:
    """A row as an estimate."""
    return (_of_notebook if "nbs/" in row["source"] else _of_train)(row), measured_bytes(row)


def _of_notebook(row: Row) -> Case:
    checkpointing = row["grad_ckpt"] == "yes"
    length = int(row["seq_len"])
    setup = Setup(
        config=NOTEBOOK,
        task="causal-lm",
        micro_batch=1,
        length=length,
        padded=False,
        method={"full": "full", "LoRA": "lora", "QLoRA": "qlora"}[row["method"].partition(" ")[0]],  # type: ignore[arg-type]
        lora_rank=8,
        precision="bf16",
        prepared=False,
        checkpointing="full" if checkpointing else "none",
    )
    changes: list[Change] = [
        _plain_scales,
        _keep_inputs,
        partial(_rotary_tables, length),
        partial(set_dropout, 0.1),
        partial(adapters_to, torch.bfloat16),
    ]
    return Case(
        setup,
        Target("cuda", (8, 0)),
        "allocated",
        optimizer_steps=False,
        loss="mean",
        keeps="step",
        caches=not checkpointing,
        old_torch="2.1",
        sampled="sampled" in row["notes"],
        change=in_order(*changes),
    )


def _of_train(row: Row) -> Case:
    setup = Setup(
        config=_config(row["model"]),
        task="causal-lm",
        micro_batch=int(row["micro_batch"]),
        length=int(row["seq_len"]),
        padded=False,
        method="qlora" if row["method"].startswith("QLoRA") else "lora",
        lora_rank=64,
        lora_targets=("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
        lora_dtype="bfloat16",
        precision="bf16",
        prepared=False,
        checkpointing="full",
        max_grad_norm=0.3,
    )
    changes = in_order(_plain_scales, store_as_bfloat16, partial(set_dropout, 0.1))
    return Case(
        setup,
        Target("cuda", (8, 6) if "3090" in row["gpu"] else (8, 9)),
        row["metric"],
        loss="shifted",
        keeps="step",
        repeats_heads=True,
        change=changes,
        parallel=_parallel(row["sharding"]),
        card=row["gpu"].lower().replace(" ", "-"),
    )


def _config(name: str) -> Mapping[str, Any]:
    if name == "Mistral-7B-v0.2":  # differs from v0.1 in that it has no window, and in its rotary base
        return {**find_config("mistralai/Mistral-7B-v0.1"), "sliding_window": None}
    return YI_34B if name == "Yi-34B" else find_config(name)


def _parallel(words: str) -> Parallel | None:
    if "NO_SHARD" in words:
        return None
    if not words.startswith("FSDP"):
        raise OutOfScopeError(f"sharding {words}")
    return Parallel("fsdp", 2, offload="parameters" if "offload" in words else "none")


def _plain_scales(model: nn.Module) -> None:
    """4 bits without double quantisation: the scales are float32."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.scales = nn.Parameter(torch.empty_like(module.scales, dtype=torch.float32), requires_grad=False)


def _keep_inputs(model: nn.Module) -> None:
    """bitsandbytes of early 2024: `MatMul4Bit` kept its input in an attribute, out of checkpointing's sight.

    The notebook shows it: after backward, with the outputs held, 10 bytes a hidden value, token and layer are still there.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.keeps_input = True


def store_as_bfloat16(model: nn.Module) -> None:
    """`quant_storage`: packed bytes seen as bfloat16, so that FSDP splits them; the scales stay whole on every rank."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            count = module.weight.numel() // 2
            module.weight = nn.Parameter(module.weight.new_empty(count, 1, dtype=torch.bfloat16), requires_grad=False)


def _rotary_tables(length: int, model: Any) -> None:
    """transformers/models/llama/modeling_llama.py of 4.37: `cos_cached`, `sin_cached` and `cos[position_ids]` in every layer."""

    def look_up(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        cos, sin = kwargs["position_embeddings"]
        return args, {**kwargs, "position_embeddings": (cos.clone(), sin.clone())}

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        size = layer.self_attn.head_dim
        for name in ("cos_cached", "sin_cached"):
            table = torch.empty(max(_POSITIONS, length), size, dtype=torch.bfloat16, device="meta")
            layer.register_buffer(name, table, persistent=False)
        layer.self_attn.register_forward_pre_hook(look_up, with_kwargs=True)
