"""The recipe of a run: what was asked for, with the usual where nothing was said."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from brim.locale import _
from brim.records import TrainingRecipe
from brim.trainer.beforehand import too_long_a_warmup

if TYPE_CHECKING:
    from brim.trainer.request import TrainRequest
    from brim.workload.settings import Settings

FULL_RATE, ADAPTER_RATE = 5e-5, 2e-4
"""transformers' own default; and what QLoRA's authors take for adapters (arXiv 2305.14314, appendix B.2)."""


def recipe_of(
    request: TrainRequest, settings: Settings, total: int, *, assumptions: list[str], notes: list[str]
) -> TrainingRecipe:
    """For so many steps. What is assumed, and what a reader must know, is added to the lists."""
    rate = request.learning_rate
    if rate is None:
        rate = FULL_RATE if settings.method == "full" else ADAPTER_RATE
        assumptions.append(_("Learning rate {rate}: none was given.").format(rate=rate))
    warmup = request.warmup
    steps = math.ceil(warmup * total) if 0 < warmup < 1 else int(warmup)
    notes += too_long_a_warmup(steps, total, rate)
    schedule = request.schedule
    if schedule == "constant" and steps:
        schedule = "constant-with-warmup"
    return TrainingRecipe(
        learning_rate=rate, schedule=schedule, warmup_steps=steps, epochs=request.epochs, max_steps=request.max_steps,
        weight_decay=request.weight_decay, adam_beta1=request.adam_beta1, adam_beta2=request.adam_beta2,
        adam_epsilon=request.adam_epsilon, max_grad_norm=settings.max_grad_norm, seed=request.seed, loss_on=request.loss_on,
    )  # fmt: skip
