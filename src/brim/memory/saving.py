"""The change that would help most: where the step does not fit, the first that makes it fit; else the one that saves most.

Changes that leave the optimizer step as it is (checkpointing, a chunked loss, a fused optimizer, smaller micro-batches and more of them)
come first; another optimizer, method or precision is another recipe, and is looked at only where the first kind does not make the step
fit. Where no change fits alone, each recipe is tried together with checkpointing, a chunked loss and micro-batches of 1. What a change
could save at most is known from the kinds at the peak, so that few of them need an estimate of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError
from brim.records import Estimate, Saving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.estimate import Question

_WORTH = 0.02
"""Of what is needed: a smaller saving is not worth a sentence."""
_LORA_KEEPS, _QLORA_KEEPS = 0.45, 0.1
"""Of the weights' bytes, at least: float32 weights become a base of 16 or 4 bits."""


@dataclass(frozen=True)
class Change:
    """Settings to change, and the bytes that this can save at most."""

    settings: dict[str, Any]
    most_bytes: float
    same_step: bool


def best_saving(question: Question, answer: Estimate) -> Saving | None:
    """Try the promising changes; None where nothing saves anything worth saying."""
    changes = list(_changes(question, answer))
    same, other = ([change for change in changes if change.same_step is same_step] for same_step in (True, False))
    best = _best(question, answer, same)
    if best is not None and best.fits:
        return best
    first = _first_that_fits(question, answer, other) if not answer.fits else None
    return first or _best(question, answer, other) or best


def _first_that_fits(question: Question, answer: Estimate, recipes: list[Change]) -> Saving | None:
    """The nearest combination that fits: the same step before another recipe, and few changes before many."""
    for recipe in (Change({}, 0, same_step=True), *recipes):
        for eased in _eased(answer):
            both = Change({**recipe.settings, **eased.settings}, recipe.most_bytes + eased.most_bytes, recipe.same_step)
            if answer.peak_allocated_bytes - both.most_bytes > answer.limit_bytes:
                continue
            saving = _tried(question, answer, both) if both.settings else None
            if saving is not None and saving.fits:
                return saving
    return None


def _eased(answer: Estimate) -> Iterator[Change]:
    """Nothing, checkpointing, a chunked loss with it, and micro-batches of 1 with both: each makes the same step."""
    settings = answer.settings
    most, changed = _passing(answer), dict[str, Any]()
    yield Change({}, 0, same_step=True)
    if settings.checkpointing != "full":
        changed = {**changed, "checkpointing": "full"}
        yield Change(changed, most, same_step=True)
    if settings.loss == "standard" and settings.task == "causal-lm":
        changed = {**changed, "loss": "chunked"}
        yield Change(changed, most, same_step=True)
    if settings.micro_batch > 1:
        ones = {"micro_batch": 1, "accumulation": settings.accumulation * settings.micro_batch}
        yield Change({**changed, **ones}, most, same_step=True)


def _passing(answer: Estimate) -> int:
    """What lives at the peak and is no state of the training."""
    return sum(size for kind, size in answer.by_kind.items() if kind in {"activations", "logits", "temporary"})


def _best(question: Question, answer: Estimate, changes: list[Change]) -> Saving | None:
    best: Saving | None = None
    least = _WORTH * answer.smallest_surviving_limit_bytes
    for change in sorted(changes, key=lambda change: -change.most_bytes):
        if change.most_bytes <= (best.saved_bytes if best is not None else least):
            continue
        saving = _tried(question, answer, change)
        if saving is not None and saving.saved_bytes > (best.saved_bytes if best is not None else least):
            best = saving
    return best


def _tried(question: Question, answer: Estimate, change: Change) -> Saving | None:
    """None where it cannot run there."""
    try:
        changed = replace(question, settings=replace(question.settings, **change.settings)).answer()
    except BrimError:
        return None
    saved = answer.smallest_surviving_limit_bytes - changed.smallest_surviving_limit_bytes
    return Saving(
        change={name: str(value) for name, value in change.settings.items()},
        saved_bytes=max(0, saved),
        smallest_surviving_limit_bytes=changed.smallest_surviving_limit_bytes,
        fits=changed.fits,
        same_step=change.same_step,
    )


def _changes(question: Question, answer: Estimate) -> Iterator[Change]:
    gpu = question.where.gpu
    has_bf16 = gpu is None or gpu.bf16 or gpu.vendor == "unknown"
    settings = answer.settings
    at_peak: dict[str, int] = {str(kind): size for kind, size in answer.by_kind.items()}
    passing = _passing(answer)
    # What is not at the peak may be at the next one: bounds count the activations of forward too.
    if settings.checkpointing != "full":
        yield Change({"checkpointing": "full"}, passing, same_step=True)
    if settings.attention == "eager":
        yield Change({"attention": "sdpa"}, passing, same_step=True)
    if settings.loss == "standard" and settings.task == "causal-lm":
        yield Change({"loss": "chunked"}, at_peak.get("logits", 0) + at_peak.get("temporary", 0), same_step=True)
    divisor = next((each for each in range(2, settings.micro_batch + 1) if settings.micro_batch % each == 0), None)
    if divisor is not None:
        smaller = {"micro_batch": settings.micro_batch // divisor, "accumulation": settings.accumulation * divisor}
        yield Change(smaller, passing * (1 - 1 / divisor), same_step=True)
    if settings.optimizer in {"adamw", "adamw-loop"} and settings.offload == "none":
        yield Change({"optimizer": "adamw-fused"}, at_peak.get("temporary", 0), same_step=True)
    held = {kind: at_peak.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "temporary")}
    if settings.optimizer in {"adamw", "adamw-fused", "adamw-loop"}:
        yield Change({"optimizer": "adamw-8bit"}, held["optimizer"] + held["temporary"], same_step=False)
    if settings.method == "full":
        yield Change({"method": "lora"}, sum(held.values()) - _LORA_KEEPS * held["parameters"], same_step=False)
        if gpu is not None:
            yield Change({"method": "qlora"}, sum(held.values()) - _QLORA_KEEPS * held["parameters"], same_step=False)
    if settings.method == "lora":
        yield Change({"method": "qlora"}, 0.8 * held["parameters"], same_step=False)
    if settings.precision == "fp32" and settings.method == "full" and has_bf16:
        yield Change({"precision": "bf16"}, 0.5 * answer.smallest_surviving_limit_bytes, same_step=False)
