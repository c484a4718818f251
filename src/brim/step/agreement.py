"""What ranks must know of each other before they share a global batch: what each may hold, and how fast it is.

A budget is two functions and a limit. Functions need not travel: where all ranks have the same ones, which a few shapes show, it is enough
to hear each rank's limit and speed, and every rank builds all budgets from its own. Where they differ, because a memory model knows of
the GPU, or a probe has measured there, budgets travel whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from brim.errors import UsageError
from brim.locale import _, sentences
from brim.machine.catalogue import gpu_of_driver
from brim.machine.screen import say
from brim.step.budget import Budget, Cost, FloatArray
from brim.step.exchange import can_travel, travels

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from brim.machine.records import GPU
    from brim.step.oom import Guard
    from brim.step.ranks import Ranks
    from brim.step.slicing import IntArray

_COUNTS: Final = np.array([1, 2, 3, 8, 64])
_LENGTHS: Final = np.array([1, 8, 100, 1024, 4096])
_NUMBERS: Final = ("fp16", "bf16", "fp32")
"""In which peaks are compared: the first that all GPUs have."""


@travels
class _Said(NamedTuple):
    """What a rank tells the others. Plain values."""

    budgets: int | None
    """How many it was given; None: its own."""
    speeds: tuple[float, ...] | None
    limit: float
    cost: tuple[float, ...]
    seconds: tuple[float, ...]
    gpu: str
    flops: dict[str, float]


def agree_on_budgets(
    budget: Budget | Sequence[Budget], ranks: Ranks, *, speeds: Sequence[float] | None = None, gpu: GPU | None = None
) -> tuple[Budget, ...] | None:
    """The budgets of all ranks, the same on each of them; None where they do not differ. Collective.

    `budget` is this rank's own, or a list with one for each. `speeds` says of each rank how many times as fast it is as its budget has it.
    Without them, and where budgets differ in their limits only, ranks with different GPUs are as fast as their peaks in the catalogue;
    `gpu` is this rank's.
    """
    own = budget if isinstance(budget, Budget) else budget[min(ranks.rank, len(budget) - 1)]
    said = ranks.gather(_what_to_say(budget, own, speeds, gpu))
    _check(said, ranks.size)
    found = _gathered(own, ranks, said) if isinstance(budget, Budget) else list(budget)
    factors = said[0].speeds or (_by_peak(said) if isinstance(budget, Budget) else [1.0] * ranks.size)
    found = [each.at_speed(factor) for each, factor in zip(found, factors, strict=True)]
    return None if all(each == found[0] for each in found) else tuple(found)


def tell_guard(
    guard: Guard,
    given: Budget | Sequence[Budget] | None,
    ranks: Ranks,
    *,
    speeds: Sequence[float] | None,
    device: torch.device,
) -> None:
    """Agree, and let the guard know; what differs is said once. Without a budget that was given, the guard's own is this rank's."""
    guard.budgets = agree_on_budgets(given or guard.budget, ranks, speeds=speeds, gpu=gpu_of(device))
    if guard.budgets is not None and ranks.rank == 0:
        say(in_words(guard.budgets))


def gpu_of(device: torch.device) -> GPU | None:
    """The catalogue's entry for this device of torch's; None if it has none."""
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    return gpu_of_driver(properties.name, properties.total_memory)


def in_words(budgets: Sequence[Budget]) -> str:
    """For a person: that ranks differ, and in what."""
    limits = ", ".join(budget.format(budget.limit) for budget in budgets)
    alone = [float(_probe(budget.seconds, np.array([1]), np.array([1024]))[0]) for budget in budgets]
    fastest = min(alone)
    speeds = ", ".join(f"{fastest / each:.0%}" if each else "100%" for each in alone)
    return sentences(
        _("brim: ranks differ, and share each batch by what it costs them."),
        _("Micro-batches of up to {limits}; speeds {speeds}.").format(limits=limits, speeds=speeds),
    )


def _what_to_say(budget: Budget | Sequence[Budget], own: Budget, speeds: Sequence[float] | None, gpu: GPU | None) -> _Said:
    counts, lengths = (each.ravel() for each in np.meshgrid(_COUNTS, _LENGTHS))
    return _Said(
        budgets=None if isinstance(budget, Budget) else len(budget),
        speeds=None if speeds is None else tuple(map(float, speeds)),
        limit=float(own.limit),
        cost=tuple(_probe(own.cost, counts, lengths).tolist()),
        seconds=tuple(_probe(own.seconds, counts, lengths).tolist()),
        gpu="" if gpu is None else gpu.name,
        flops={} if gpu is None else {str(number): flops for number, flops in gpu.dense_flops.items()},
    )


def _check(said: Sequence[_Said], size: int) -> None:
    """After all have spoken, so that all hear of it and none waits."""
    if len({(each.budgets, each.speeds) for each in said}) > 1:
        raise UsageError(
            _("The ranks were given different lists of budgets or speeds."),
            hint=_("Give every rank the same list, with one entry for each rank, or only its own budget."),
        )
    for name, count in ((_("budgets"), said[0].budgets), (_("speeds"), None if said[0].speeds is None else len(said[0].speeds))):
        if count is not None and count != size:
            text = _("{name}: there are {count} for {ranks} ranks.")
            raise UsageError(text.format(name=name, count=count, ranks=size))


def _probe(cost: Cost, counts: IntArray, lengths: IntArray) -> FloatArray:
    try:
        found = cost(counts, lengths)
    except TypeError:  # it wants the targets' lengths too
        found = cost(counts, lengths, lengths)
    return np.broadcast_to(np.asarray(found, np.float64), counts.shape)


def _gathered(own: Budget, ranks: Ranks, said: Sequence[_Said]) -> list[Budget]:
    """From each rank's own: by its limit, or whole."""
    if len({(each.cost, each.seconds) for each in said}) == 1:
        return [own.with_limit(each.limit) for each in said]
    sent = ranks.gather(own if can_travel(own) else None)
    found = [each for each in sent if each is not None]
    if len(found) < len(sent):
        raise UsageError(
            _("The budgets of the ranks differ, and that of rank {rank} cannot be sent to the others.").format(
                rank=sent.index(None)
            ),
            hint=_(
                "Give every rank the list of all budgets, by rank. Only brim's own costs are sent: those of `Budget.tokens`, "
                "`Budget.sequences`, `brim.budget` and a probe."
            ),
        )
    return found


def _by_peak(said: Sequence[_Said]) -> list[float]:
    """Relative to rank 0's GPU, by the catalogue; equal where budgets know the devices already, or a GPU is not known."""
    equal = [1.0] * len(said)
    if len({each.seconds for each in said}) > 1 or len({each.gpu for each in said}) == 1:
        return equal
    common = [number for number in _NUMBERS if all(number in each.flops for each in said)]
    return [each.flops[common[0]] / said[0].flops[common[0]] for each in said] if common else equal
