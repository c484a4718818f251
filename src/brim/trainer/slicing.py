"""What a micro-batch of a run may cost, and what its steps will look like when they are cut by that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from brim.errors import BrimError
from brim.locale import _
from brim.step.batch import BatchPlan
from brim.step.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from brim.records import Measurement, RunCard

_STEPS_LOOKED_AT: Final = 200
_NOT_OF_A_BUDGET: Final = frozenset({"micro_batch", "accumulation", "eval_batch"})
_OF_SHARDING: Final = frozenset({"gpus", "nodes", "sharding", "offload", "sync_each_batch"})
"""What one process of several that hold the whole model has nothing to do with."""


@dataclass(frozen=True)
class Foreseen:
    """The steps of a run as they will be cut, one process's share of each."""

    largest: int
    """Sequences of the largest micro-batch."""
    fewest: int
    """Micro-batches of a step."""
    most: int
    costliest: tuple[int, ...]
    """Sequences of the costliest micro-batch, its length, and the length of its targets."""


def budgets_of(card: RunCard, probe: Measurement | None, say: Callable[[str], None]) -> Budget | list[Budget]:
    """Of each process, where their memory differs; else one for all."""
    if not card.memory_limits:
        return budget_of(card, probe, say)
    found = {limit: budget_of(replace(card, memory_limit_bytes=limit), probe, say) for limit in set(card.memory_limits)}
    return [found[limit] for limit in card.memory_limits]


def budget_of(card: RunCard, probe: Measurement | None, say: Callable[[str], None]) -> Budget:
    """As pinned, as measured, or as predicted."""
    from brim.planner.budget import budget
    from brim.workload.resolve import find_model

    if card.is_pinned:
        return Budget.pinned(card.micro_batch, because=_("--micro-batch {count}, as asked.").format(count=card.micro_batch))
    has_config = find_model(card.model, trust_remote_code=card.options.trust_remote_code).config is not None
    left_out = _NOT_OF_A_BUDGET if card.is_sharded else _NOT_OF_A_BUDGET | _OF_SHARDING
    settings = {
        name: value
        for name, value in vars(card.settings).items()
        if name not in left_out and (has_config or name in card.asked or name == "seq_len")
    }
    shared: dict[str, Any] = {
        "device": "cpu" if card.device == "cpu" else "cuda",
        "memory": card.memory_limit_bytes,
        "trust_remote_code": card.options.trust_remote_code,
        **settings,
    }
    if probe is not None:
        try:
            return budget(card.model, probe=probe, **shared)
        except BrimError as error:
            say(_("The probe cannot be used, so slices follow the prediction: {why}").format(why=error.message))
    return budget(card.model, margin=card.asked.get("margin"), **shared)


def foresee(card: RunCard, budgets: Budget | list[Budget], lengths: npt.ArrayLike) -> Foreseen:
    """The first steps of the run, cut now as they will be cut then; of several processes, those of the one that holds most."""
    plan = BatchPlan(
        lengths, effective_batch=card.effective_batch, seed=card.recipe.seed, ranks=card.world_size, together=card.is_sharded
    )
    several = [budgets] * card.world_size if isinstance(budgets, Budget) else budgets
    if card.speeds:
        several = [each.at_speed(speed) for each, speed in zip(several, card.speeds, strict=True)]
    rank = max(range(len(several)), key=lambda each: several[each].limit)
    budget, dealt_by = several[rank], budgets if isinstance(budgets, Budget) and not card.speeds else several
    # Ranks that are alike take turns in having most.
    ranks = range(len(several)) if isinstance(dealt_by, Budget) else (rank,)
    cut = [plan.slices(step, dealt_by) for step in range(min(card.total_steps, _STEPS_LOOKED_AT))]
    steps = [[part for part in step[each] if len(part)] for step in cut for each in ranks]
    steps = [step for step in steps if step] or [[plan.global_batch(0)[:1]]]
    shapes = {(len(part), *_longest(plan, part)) for step in steps for part in step}
    counts = [len(step) for step in steps]
    cost = budget.cost_of if budget.unit == "bytes" else _tokens
    return Foreseen(max(shape[0] for shape in shapes), min(counts), max(counts), max(shapes, key=lambda shape: cost(*shape)))


def _tokens(count: int, *lengths: int) -> float:
    return count * sum(lengths)


def _longest(plan: BatchPlan, part: Any) -> list[int]:
    found = plan.lengths_of(part).max(axis=0).tolist()
    return found if isinstance(found, list) else [found]
