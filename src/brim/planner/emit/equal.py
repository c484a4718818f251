"""The plan's batch in equal micro-batches, which is all that other tools know.

They multiply: micro-batch x accumulation x ranks. So they can say an effective batch if, and only if, it is a multiple of the ranks.
Where the plan's slices differ and that holds, a smaller micro-batch divides it exactly; where it does not hold, the format is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from brim.errors import UnsupportedError
from brim.locale import _

if TYPE_CHECKING:
    from brim.workload.records import Configuration


@dataclass(frozen=True)
class Equal:
    """`micro_batch x accumulation x ranks` is the effective batch, exactly."""

    micro_batch: int
    accumulation: int


def equal_cut(configuration: Configuration) -> Equal:
    """The largest equal micro-batches that are no larger than the plan's."""
    effective, ranks = configuration.effective_batch, configuration.world_size
    if effective % ranks:
        first, *more = nearest_multiples(effective, ranks)
        names = _("{first} or {second}").format(first=first, second=more[0]) if more else str(first)
        text = _("{effective} sequences do not divide by {ranks} GPUs, and this format takes equal micro-batches only.")
        hint = _("Take --effective-batch {sizes}, or train with brim, which cuts {effective} exactly.")
        raise UnsupportedError(text.format(effective=effective, ranks=ranks), hint=hint.format(sizes=names, effective=effective))
    share = effective // ranks
    micro_batch = next(size for size in range(min(configuration.micro_batch, share), 0, -1) if share % size == 0)
    return Equal(micro_batch, share // micro_batch)


def nearest_multiples(effective: int, step: int) -> tuple[int, ...]:
    """The multiples of `step` just below and just above; none of them is 0."""
    below = effective - effective % step
    return tuple(size for size in (below, below + step) if size)


def cut_note(configuration: Configuration, cut: Equal) -> str | None:
    """What is said where the equal cut is not the plan's own."""
    if not configuration.slices:
        return None
    ranks = configuration.world_size
    text = _(
        "The plan's slices differ (up to {planned} sequences); equal ones of {micro} x {accumulation} keep {effective} exactly, in smaller "
        "steps. The nearest batches that keep {planned}: {sizes}."
    )
    sizes = nearest_multiples(configuration.effective_batch, configuration.micro_batch * ranks)
    return text.format(
        planned=configuration.micro_batch, micro=cut.micro_batch, accumulation=cut.accumulation,
        effective=configuration.effective_batch, sizes=", ".join(str(size) for size in sizes),
    )  # fmt: skip
