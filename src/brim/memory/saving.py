"""The one change that would save most.

Changes that leave the optimizer step as it is (checkpointing, a chunked loss, a fused optimizer, smaller micro-batches and more of them)
come first; another optimizer, method or precision is another recipe, and is looked at only where the first kind does not make the step
fit. What a change could save at most is known from the kinds at the peak, so that few of them need an estimate of their own.
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


@dataclass(frozen=True)
class Change:
    """Settings to change, and the bytes that this can save at most."""

    settings: dict[str, Any]
    most_bytes: float
    same_step: bool


def best_saving(question: Question, answer: Estimate) -> Saving | None:
    """Try the promising changes; None where nothing saves anything worth saying."""
    gpu = question.where.gpu
    has_bf16 = gpu is None or gpu.bf16 or gpu.vendor == "unknown"
    for same_step in (True, False):
        changes = [change for change in _changes(answer, has_bf16=has_bf16) if change.same_step is same_step]
        best = _best(question, answer, sorted(changes, key=lambda change: -change.most_bytes))
        if best is not None and (best.fits or not same_step):
            return best
    return best


def _best(question: Question, answer: Estimate, changes: list[Change]) -> Saving | None:
    best: Saving | None = None
    now = answer.smallest_surviving_limit_bytes
    least = _WORTH * now
    for change in changes:
        if change.most_bytes <= (best.saved_bytes if best is not None else least):
            continue
        try:
            changed = replace(question, settings=replace(question.settings, **change.settings)).answer()
        except BrimError:
            continue
        saved = now - changed.smallest_surviving_limit_bytes
        if saved > (best.saved_bytes if best is not None else least):
            words = {name: str(value) for name, value in change.settings.items()}
            best = Saving(
                change=words,
                saved_bytes=saved,
                smallest_surviving_limit_bytes=changed.smallest_surviving_limit_bytes,
                fits=changed.fits,
                same_step=change.same_step,
            )
    return best


def _changes(answer: Estimate, *, has_bf16: bool) -> Iterator[Change]:
    settings = answer.settings
    at_peak: dict[str, int] = {str(kind): size for kind, size in answer.by_kind.items()}
    passing = sum(at_peak.get(kind, 0) for kind in ("activations", "logits", "temporary"))
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
        yield Change({"method": "lora", "lora_rank": 8}, sum(held.values()) - held["parameters"] * 0.9, same_step=False)
    if settings.method == "lora":
        yield Change({"method": "qlora"}, 0.8 * held["parameters"], same_step=False)
    if settings.precision == "fp32" and settings.method == "full" and has_bf16:
        yield Change({"precision": "bf16"}, 0.5 * answer.smallest_surviving_limit_bytes, same_step=False)
