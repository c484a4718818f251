"""Configurations drawn by seed: models of the catalogue, cards, methods, precisions, optimizers, shapes.

Small and medium models are drawn most often, so that 200 cases can be measured in about 20 minutes on one core.
"""

from __future__ import annotations

import random
from typing import Any

Case = dict[str, Any]
"""The fields of `brim.Settings`, plus `model` and `gpu`."""

CARDS = ("t4", "rtx-2080-ti", "rtx-3080", "rtx-3090", "rtx-4090", "l4", "a10g", "a100-40gb", "a100-80gb", "h100")
_TURING = ("t4", "rtx-2080-ti")

_MODELS = {
    "small": """distilgpt2 gpt2 cerebras-gpt-111m smollm2-135m pythia-160m opt-125m gpt-neo-125m gemma-3-270m opt-350m smollm2-360m
        gpt2-medium pythia-410m codegen-350m-mono qwen2.5-0.5b qwen1.5-0.5b qwen3-0.6b bloom-560m xglm-564m""",
    "medium": """gpt2-large llama-3.2-1b tinyllama gemma-3-1b olmo-1b olmo-2-1b pythia-1b qwen2.5-1.5b smollm2-1.7b qwen3-1.7b opt-1.3b
        falcon-rw-1b stablelm-2-1.6b phi-1.5 gpt2-xl gpt-neo-1.3b bloom-1b1 deepseek-coder-1.3b""",
    "large": "gemma-2-2b phi-2 qwen2.5-3b llama-3.2-3b phi-3-mini-4k qwen3-4b starcoder2-3b granite-3.1-2b smollm3-3b",
    "largest": "llama-3.1-8b mistral-7b-v0.1 qwen2.5-7b qwen3-8b",
    "encoder": """bert-base-uncased bert-large-uncased distilbert-base-uncased roberta-base roberta-large xlm-roberta-base
        electra-base-discriminator modernbert-base albert-base-v2 bge-base-en-v1.5 deberta-v3-small""",
    "seq2seq": """t5-small t5-base flan-t5-small flan-t5-base flan-t5-large mt5-small bart-base bart-large pegasus-large opus-mt-en-zh
        m2m100-418m nllb-200-distilled-600m""",
}
_SHARES = {"small": 0.38, "medium": 0.18, "large": 0.07, "largest": 0.03, "encoder": 0.17, "seq2seq": 0.17}
_EAGER_ONLY = ("bloom-560m", "bloom-1b1", "gemma-2-2b", "codegen-350m-mono", "deberta-v3-small")
_MAX_TOKENS = {"small": 8192, "medium": 4096, "large": 4096, "largest": 2048, "encoder": 8192, "seq2seq": 4096}
_LENGTHS = (64, 128, 128, 256, 256, 384, 512, 512, 512, 768, 1024, 1024, 2048, 100, 200, 333, 500, 1000)
_BATCHES = (1, 1, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16, 32)


def draw(count: int, seed: int) -> list[Case]:
    """`count` different cases. With the same seed, a longer list begins with the cases of a shorter one."""
    randomness = random.Random(f"brim/memory_emulated/{seed}")
    cases: list[Case] = []
    while len(cases) < count:
        case = _draw_case(randomness)
        if case not in cases:
            cases.append(case)
    return cases


def _draw_case(randomness: random.Random) -> Case:
    size = weighted(randomness, _SHARES)
    model = randomness.choice(_MODELS[size].split())
    gpu = randomness.choice(CARDS)
    method = weighted(randomness, _methods(size))
    precision = weighted(randomness, _precisions(gpu, method))
    length = randomness.choice([length for length in _LENGTHS if length <= _max_length(size, model)])
    batch = randomness.choice([batch for batch in _BATCHES if batch * length <= _MAX_TOKENS[size]])
    case: Case = {
        "model": model,
        "gpu": gpu,
        "method": method,
        "precision": precision,
        "micro_batch": batch,
        "seq_len": length,
        "checkpointing": weighted(randomness, {"none": 0.6, "full": 0.4}),
        "optimizer": weighted(randomness, _optimizers(method)),
        "attention": "eager" if model in _EAGER_ONLY else weighted(randomness, {"sdpa": 0.8, "eager": 0.2}),
        "padded": randomness.random() < 0.5,
        "accumulation": int(weighted(randomness, {"1": 0.75, "2": 0.15, "4": 0.1})),
        "max_grad_norm": 1.0 if randomness.random() < 0.85 else None,
    }
    if model.startswith("gpt-neo"):  # the only attention that transformers implements for it
        case["attention"] = "eager"
    if method != "full":
        case["lora_rank"] = randomness.choice((8, 16, 64))
        case["lora_targets"] = ["all-linear"] if randomness.random() < 0.3 else []
    return case


def _methods(size: str) -> dict[str, float]:
    if size == "encoder":
        return {"full": 0.8, "lora": 0.2}
    if size == "largest":
        return {"lora": 0.5, "qlora": 0.3, "lora-8bit": 0.2}
    return {"full": 0.55, "lora": 0.25, "qlora": 0.12, "lora-8bit": 0.08}


def _precisions(gpu: str, method: str) -> dict[str, float]:
    if gpu in _TURING:
        return {"fp32": 0.35, "fp16": 0.05, "amp-fp16": 0.6} if method == "full" else {"fp32": 0.1, "fp16": 0.2, "amp-fp16": 0.7}
    return {"fp32": 0.15, "bf16": 0.35, "fp16": 0.05, "amp-bf16": 0.35, "amp-fp16": 0.1}


def _optimizers(method: str) -> dict[str, float]:
    common = {"adamw": 0.35, "adamw-fused": 0.25, "adamw-8bit": 0.1, "paged-adamw-8bit": 0.08, "adamw-loop": 0.05}
    return common if method != "full" else {**common, "adafactor": 0.08, "sgd": 0.03, "sgd-momentum": 0.06}


def _max_length(size: str, model: str) -> int:
    if size == "encoder":
        return 1024 if model == "modernbert-base" else 512
    return 512 if size == "seq2seq" else 1024 if "gpt2" in model or size == "largest" else 2048


def weighted(randomness: random.Random, weights: dict[str, float]) -> str:
    return randomness.choices(list(weights), list(weights.values()))[0]
