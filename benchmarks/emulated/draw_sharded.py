"""Sharded configurations drawn by seed. Every kind of sharding gets the same number of cases with 2 and with 4 ranks.

Models are small, so that four processes train one in seconds. Precisions and optimizers are those that `brim train` accepts for the
sharding: FSDP2 has no loss scaling, and ZeRO and FSDP2 accept elementwise optimizers only.
"""

from __future__ import annotations

import random
from typing import Any

from emulated.draw import Case, weighted

SHARDINGS = ("ddp", "fsdp", "zero1", "zero2", "zero3")
RANKS = (2, 4)
_CARDS = ("t4", "rtx-3080", "rtx-4090", "a100-40gb")
_MODELS = """distilgpt2 gpt2 smollm2-135m pythia-160m opt-125m cerebras-gpt-111m gemma-3-270m smollm2-360m qwen2.5-0.5b
    bert-base-uncased distilbert-base-uncased roberta-base t5-small flan-t5-small bart-base"""
_ENCODERS = ("bert-base-uncased", "distilbert-base-uncased", "roberta-base")
_SEQ2SEQ = ("t5-small", "flan-t5-small", "bart-base")
_LENGTHS = (64, 128, 128, 200, 256, 256, 384, 500, 512)
_BATCHES = (1, 1, 2, 2, 3, 4, 8)
_MAX_TOKENS = 2048


def draw_sharded(count: int, seed: int) -> list[Case]:
    """`count` different cases. With the same seed, a longer list begins with the cases of a shorter one."""
    randomness = random.Random(f"brim/memory_emulated/sharded/{seed}")
    cases: list[Case] = []
    while len(cases) < count:
        turn = len(cases)
        case = _draw_case(randomness, SHARDINGS[turn % len(SHARDINGS)], RANKS[turn // len(SHARDINGS) % len(RANKS)])
        if case not in cases:
            cases.append(case)
    return cases


def _draw_case(randomness: random.Random, sharding: str, ranks: int) -> Case:
    gpu = randomness.choice(_CARDS)
    model = randomness.choice([name for name in _MODELS.split() if sharding != "fsdp" or name not in _SEQ2SEQ])
    method = "full" if model in (*_ENCODERS, *_SEQ2SEQ) else weighted(randomness, {"full": 0.65, "lora": 0.35})
    length = randomness.choice(_LENGTHS)
    case: Case = {
        "model": model,
        "gpu": gpu,
        "gpus": ranks,
        "sharding": sharding,
        "method": method,
        "precision": weighted(randomness, _precisions(gpu, sharding)),
        "micro_batch": randomness.choice([batch for batch in _BATCHES if batch * length <= _MAX_TOKENS]),
        "seq_len": length,
        "checkpointing": weighted(randomness, {"none": 0.65, "full": 0.35}),
        "optimizer": weighted(randomness, _optimizers(sharding)),
        "attention": weighted(randomness, {"sdpa": 0.85, "eager": 0.15}),
        "padded": randomness.random() < 0.5,
        "accumulation": int(weighted(randomness, {"1": 0.7, "2": 0.3})),
        "max_grad_norm": 1.0,
    }
    if sharding == "ddp":
        case["gradient_as_bucket_view"] = randomness.random() < 0.3
    if sharding == "fsdp":
        case["sync_each_batch"] = True
    if method != "full":
        case["lora_rank"] = randomness.choice((8, 16, 64))
        case["lora_targets"] = ["all-linear"] if randomness.random() < 0.3 else []
    return case


def _precisions(gpu: str, sharding: str) -> dict[str, Any]:
    if gpu == "t4":
        return {"fp32": 1.0} if sharding == "fsdp" else {"fp32": 0.4, "amp-fp16": 0.6}
    halves = {"bf16": 0.35, "amp-bf16": 0.35}
    return {"fp32": 0.2, **halves} if sharding == "fsdp" else {"fp32": 0.2, **halves, "amp-fp16": 0.1}


def _optimizers(sharding: str) -> dict[str, float]:
    common = {"adamw": 0.4, "adamw-fused": 0.3, "adamw-loop": 0.1, "sgd-momentum": 0.1}
    return {**common, "adamw-8bit": 0.1} if sharding == "ddp" else common
