"""Which of the numbers that decide a training step a name speaks of: `per_device_train_batch_size`, `bs`, `grad_accum`, `lr`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

Quantity = Literal["batch", "eval-batch", "effective-batch", "accumulation", "workers", "pinning", "learning-rate", "length"]

_EVALUATION = re.compile(
    r"(^|_)(eval|evaluate|evaluation|val|valid|validation|test|dev|infer|inference|predict|generate|gen)(_|$)"
)
_WHOLE = re.compile(r"(^|_)(global|effective|total|target|eff|gbs)(_|$)")
_NOT_A_SIZE = re.compile(
    r"(^|_)(num|n|max|min|idx|index|id|ids|per_batch|norm|dim|first|fn|sampler|time|count|start|end|shape|rollout|image|replay|limit|"
    r"list|sizes|ratio|scale|multiplier|factor|warmup|increment|candidates|choices|options|range|encode|encoding|query|write|read|"
    r"map|chunk|buffer|db|upload|commit|insert|stats|calibration|vocab|cache|step|find|finder|auto|tuner|last|next|prev|previous|current|cur|this|"
    r"new|old|each|every|in|on|of|to|by|is|has|data|sample|input|output|loss|tokens|seconds|dummy|fake|random|raw|get|load|make|process)(_|$)"
)
_NOT_A_LOADER = re.compile(
    r"^((max|min|num_max|thread|io|http|web|server|uvicorn|gunicorn|api|ray|rollout|actor|vllm)_|"
    r"(\w+_)?(pre_?process(ing)?|tokeniz\w*|encod\w*|dataset|map|download|upload|convert|filter)_)(num_?|n_?)?(workers|proc)$"
)
"""Workers of thread pools, web servers and `datasets.map`, which load no batches."""
_PATTERNS: tuple[tuple[Quantity, re.Pattern[str]], ...] = (
    (
        "accumulation",
        re.compile(
            r"^(train_?)?(num_?|n_?)?(gradient_?|grad_?|grads_?)?(accum|accumulation|accumulate|acc)(ulation)?"
            r"(_?(grad(ient)?s?))?(_?(steps?|batches|iters?|freq|every|factor))?$"
        ),
    ),
    ("accumulation", re.compile(r"^(ga|ga_steps|gas|update_freq|steps_per_update|batches_per_update)$")),
    ("batch", re.compile(r"^((\w+_)?(batch|micro_?batch|mini_?batch)_?sizes?(_\w+)?|(\w+_)?(bs|bsz|mbs))$")),
    (
        "batch",
        re.compile(
            r"^(samples_per_(gpu|device)|images_per_gpu|micro_batch|minibatch|(\w+_)?batch|batch_per_(gpu|device|card|rank))$"
        ),
    ),
    (
        "workers",
        re.compile(r"^(\w+_)?(num_?workers?|n_?workers?|nworkers?|workers|loader_?workers|data_?workers|dataloader_?workers)$"),
    ),
    ("pinning", re.compile(r"^(\w+_)?pin_?mem(ory)?$")),
    ("learning-rate", re.compile(r"^(base_|init_|initial_|peak_|max_)?(lr|learn(ing)?_rate)$")),
    (
        "length",
        re.compile(
            r"^(max_?|train_|model_)?(max_)?(seq|sequence|source|src|target|tgt|input|prompt|context|block|text|token|ctx)_?"
            r"(len|length|size)$|^max_?(len|length)$|^(model_max_length|seqlen|max_seqlen|n_ctx|max_tokens_per_sample|cutoff_len)$"
        ),
    ),
)


@lru_cache(maxsize=20_000)
def quantity_of(name: str) -> Quantity | None:
    """What a name means, or None."""
    plain = _snake(name)
    if plain in {"acc", "grad_acc_norm", "persistent_workers"} or _NOT_A_LOADER.match(plain):
        return None
    for quantity, pattern in _PATTERNS:
        if not pattern.match(plain):
            continue
        if quantity != "batch":
            return quantity
        if _WHOLE.search(plain):
            return "effective-batch"
        if _EVALUATION.search(plain):
            return "eval-batch"
        return None if _NOT_A_SIZE.search(plain) else "batch"
    return None


def _snake(name: str) -> str:
    """`perDeviceBatchSize`, `BATCH_SIZE`, `--batch-size` in one spelling."""
    name = name.strip().lstrip("-").replace("-", "_").lstrip("_")
    if not name.isupper():
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return name.lower()


def is_for_evaluation(text: str) -> bool:
    """Whether a name or a piece of code speaks of evaluation data."""
    return any(_EVALUATION.search(_snake(word)) for word in re.findall(r"\w+", text))
