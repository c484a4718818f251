"""The state of a run: which step is next, and what must be equal for the remaining steps to be the promised ones.

It is a handful of numbers, whatever the length of the data, and it says nothing of ranks, budgets or GPUs: those may change.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.step.batch import BatchPlan
    from brim.step.oom import Guard
    from brim.step.ranks import Ranks


def state_of(plan: BatchPlan, guard: Guard, done: int) -> dict[str, Any]:
    """The state of a run: O(1), whatever its length."""
    epoch, _place = plan.epoch_of(done)
    return {
        "step": done, "epoch": epoch, "seed": plan.seed, "effective_batch": plan.effective_batch, "sequences": plan.n,
        "drop_last": plan.drop_last, "fingerprint": plan.fingerprint(),
        "guard": {"unit": guard.budget.unit, "budget": guard.budget.limit, **guard.state()},
    }  # fmt: skip


def check_state(plan: BatchPlan, guard: Guard, state: Mapping[str, Any] | None) -> int:
    """Steps done before; an error where the data or the recipe is another, for then the remaining steps would not be the promised ones."""
    if state is None:
        return 0
    now = state_of(plan, guard, int(state["step"]))
    changed = [name for name in ("effective_batch", "seed", "sequences", "drop_last") if state[name] != now[name]]
    if changed or state["fingerprint"] != now["fingerprint"]:
        text = _("This run cannot go on as promised: {changes}.")
        told = ", ".join(f"{name} {state[name]} -> {now[name]}" for name in changed) or _(
            "the lengths of the sequences are others"
        )
        raise UsageError(text.format(changes=told), hint=_("Give the same data, seed and effective batch, or start a new run."))
    learned = state["guard"]
    if (learned["unit"], learned["budget"]) == (guard.budget.unit, guard.budget.limit):
        guard.restore(learned)
    return int(state["step"])


def check_agreement(plan: BatchPlan, guard: Guard, ranks: Ranks) -> None:
    """Ranks that plan differently would train some sequences twice and others never, and nobody would know before the step was taken."""
    slices = plan.slices(0, guard.budgets or guard.budget)
    mine = plan.fingerprint(), zlib.crc32(repr([[ids.tolist() for ids in share] for share in slices]).encode())
    for rank, theirs in enumerate(ranks.gather(mine)):
        if theirs != mine:
            raise UsageError(
                _("Rank {rank} plans other steps than rank {other}.").format(rank=rank, other=ranks.rank),
                hint=_("Give every rank the same data, seed, effective batch and budget."),
            )
