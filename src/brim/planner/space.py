"""Everything that a plan may choose, and why some of it need not be looked at.

What the user said is pinned. Micro-batch, checkpointing, attention, precision, the implementation of AdamW, a chunked loss and the engine
that shards are free: they leave the recipe as it is. Another optimizer, another method and offload are tried only where the user lets them
vary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import BrimError, UsageError
from brim.locale import _
from brim.machine.detect import why_no_flash_attention
from brim.memory.compatibility import check
from brim.memory.estimate import device_defaults, fill
from brim.workload.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.where import Where


Vary = Literal["optimizer", "method", "offload", "precision"]
VARY: tuple[Vary, ...] = ("optimizer", "method", "offload", "precision")
_OTHER_OPTIMIZERS = ("adamw-8bit", "paged-adamw-8bit", "adafactor")
_OTHER_METHODS = ("lora", "qlora")
_SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp")
_ENGINES = ("zero1", "zero2", "zero3", "fsdp")

_SCALES_OF_LOGITS = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Granite, Cohere, Falcon-H1."""


@dataclass(frozen=True)
class Structure:
    """Settings but for the micro-batch and the accumulation."""

    settings: Settings
    dominated_by: str = ""
    """Why it need not be traced: another one of the space is at least as fast and as small. Empty: it must be looked at."""


@dataclass(frozen=True)
class Space:
    """All structures of one question."""

    structures: tuple[Structure, ...]
    refused: dict[str, int]
    """Reasons why some cannot run there, and how many."""


def structures_of(pinned: dict[str, Any], base: Settings, model: object, where: Where, vary: frozenset[str]) -> Space:
    """`pinned` are the settings that the user gave, `base` the same with everything filled in."""
    found: dict[Settings, Structure] = {}
    refused: dict[str, int] = {}
    first: BrimError | None = None
    for choice in _choices(pinned, base, where, vary):
        try:
            # What belongs to LoRA is filled in, or dropped, by the method.
            settings = fill(replace(base, **(choice | _of_method(choice, pinned))), model, where)
            check(settings, getattr(model, "config", None), where.gpu)
        except BrimError as error:
            first = first or error
            refused[str(error)] = refused.get(str(error), 0) + 1
            continue
        found.setdefault(settings, Structure(settings, _dominated(settings, pinned, where)))
    if not found:
        assert first is not None
        raise first
    return Space(tuple(found.values()), refused)


def may_chunk(pinned: dict[str, Any], base: Settings, model: object, where: Where) -> bool:
    """Whether a chunked loss may be chosen: it is the model's own loss, unless the model scales its logits behind its head."""
    config = getattr(model, "config", None)
    if config is None or where.gpu is None or "loss" in pinned or base.loss != "standard" or base.task != "causal-lm":
        return False
    inner = config.get("text_config") or config
    return not any(inner.get(name) not in {None, 1} for name in _SCALES_OF_LOGITS)


def read_vary(words: tuple[str, ...]) -> frozenset[str]:
    """The words of `--vary`, checked."""
    for word in words:
        if word not in VARY:
            text = _("--vary {word!r} is not possible; one of: {words}.")
            raise UsageError(text.format(word=word, words=", ".join(VARY)))
    return frozenset(words)


def _choices(pinned: dict[str, Any], base: Settings, where: Where, vary: frozenset[str]) -> Iterator[dict[str, Any]]:
    free = {
        "method": [base.method, *(_OTHER_METHODS if "method" in vary else ())],
        "precision": _precisions(pinned, where, vary),
        "checkpointing": _free(pinned, "checkpointing", ["none", "full"]),
        "attention": _attentions(pinned, where),
        "optimizer": _optimizers(pinned, where, vary),
        "sharding": _free(pinned, "sharding", list(_SHARDINGS)) if base.ranks > 1 else [base.sharding],
        "offload": [base.offload, *(("optimizer", "parameters") if "offload" in vary else ())],
    }
    for values in product(*(dict.fromkeys(values) for values in free.values())):
        choice = dict(zip(free, values, strict=True))
        if _can_offload(choice, base) and _is_worth_a_look(choice, pinned) and _is_the_same_recipe(choice, pinned):
            yield choice


def _can_offload(choice: dict[str, Any], base: Settings) -> bool:
    """Offload needs an engine that does it; one GPU has none but for that."""
    return choice["offload"] == "none" or choice["sharding"] in _ENGINES or base.ranks == 1


def _is_the_same_recipe(choice: dict[str, Any], pinned: dict[str, Any]) -> bool:
    """DeepSpeed flattens what trains into one row: Adafactor, which keeps moments of rows and columns, becomes another optimizer."""
    return choice["optimizer"] != "adafactor" or not str(choice["sharding"]).startswith("zero") or "sharding" in pinned


def _is_worth_a_look(choice: dict[str, Any], pinned: dict[str, Any]) -> bool:
    """Adapters are small: another optimizer, or offloading its state, saves nothing there."""
    if choice["method"] == "full":
        return True
    return "optimizer" in pinned or choice["optimizer"] not in _OTHER_OPTIMIZERS


def _of_method(choice: dict[str, Any], pinned: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if choice["method"] == "full":
        extra |= {"lora_rank": None, "lora_alpha": None, "lora_dropout": 0.0, "lora_targets": (), "lora_dtype": None}
        extra["base_dtype"] = None
    if choice["offload"] != "none" and choice["sharding"] == "none" and "sharding" not in pinned:
        extra["sharding"] = "zero3" if choice["offload"] == "parameters" else "zero2"
    return extra


def _free(pinned: dict[str, Any], name: str, values: list[Any]) -> list[Any]:
    return [pinned[name]] if name in pinned else values


def _precisions(pinned: dict[str, Any], where: Where, vary: frozenset[str]) -> list[Any]:
    """What trains is held in float32; LoRA's frozen base may be half. Weights that train in half precision are another recipe."""
    usual = device_defaults(where)["precision"]
    values = _free(pinned, "precision", list(dict.fromkeys((usual, "fp32"))))
    return [*values, "bf16"] if "precision" in vary and usual == "amp-bf16" else values


def _attentions(pinned: dict[str, Any], where: Where) -> list[Any]:
    """flash-attention 2 is a package of its own: chosen where it is known to be importable, and elsewhere only if asked for."""
    if "attention" in pinned:
        return [pinned["attention"]]
    has_flash2 = where.gpu is not None and where.gpu.flash_attention and where.is_here and not why_no_flash_attention()
    return ["flash2", None, "eager"] if has_flash2 else [None, "eager"]


def _optimizers(pinned: dict[str, Any], where: Where, vary: frozenset[str]) -> list[Any]:
    values = _free(pinned, "optimizer", list(dict.fromkeys((device_defaults(where)["optimizer"], "adamw"))))
    # A paged optimizer keeps its state on the host: that is offload too.
    others = [word for word in _OTHER_OPTIMIZERS if "offload" in vary or not word.startswith("paged")]
    return [*values, *others] if "optimizer" in vary else values


def _dominated(settings: Settings, pinned: dict[str, Any], where: Where) -> str:
    if settings.attention == "eager" and "attention" not in pinned:
        return _("eager attention holds the scores of all pairs of tokens, and sdpa does not")
    is_free = "optimizer" not in pinned and where.gpu is not None
    if settings.optimizer == "adamw" and is_free and settings.offload == "none":
        return _("adamw-fused makes the same update with fewer kernels and no temporaries")
    return ""
