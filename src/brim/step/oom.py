"""Out of memory inside a step: what is left behind, what is learned, and what is said when nothing smaller is left to try.

The phase decides. In *forward* nothing has been written yet, so the failed micro-batch is split and the step goes on. In *backward*
autograd has already added part of the failure to `.grad`, so the gradients are cleared and the global batch is run again in smaller
slices. In the *optimizer* weights and state are half changed: never tried again, never saved.
"""

from __future__ import annotations

import gc
import re
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from brim.errors import OutOfMemoryError, RunError, out_of_memory_family
from brim.locale import _, sentences
from brim.machine.sharing import Others, others_on
from brim.sizes import format_bytes
from brim.workload.words import Phase

if TYPE_CHECKING:
    from brim.machine.device import Device
    from brim.step.budget import Budget
    from brim.step.micro import MicroBatch

BACK_OFF: Final = 0.9
"""What is left of a cost that failed, as the next limit: far enough below for an allocator's fragments, near enough to lose little."""
CLIMB_AFTER: Final = 20
"""Clean steps after which the limit is raised again; twice as many each time that raising it failed."""
CLIMB: Final = 1.1

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB|KB|MB|GB)")
_UNITS: Final = {
    "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 1000, "MB": 10**6, "GB": 10**9,
}  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """One out-of-memory, without the error itself: its traceback would hold what must be freed."""

    phase: Phase
    family: str
    requested_bytes: int | None


def failure_of(error: BaseException, phase: Phase) -> Failure | None:
    """What kind of out-of-memory this is; None for any other error."""
    family = out_of_memory_family(error)
    if family is None:
        return None
    return Failure(phase, family, requested_bytes(str(error)))


def requested_bytes(message: str) -> int | None:
    """How much the allocator was asked for when it failed, where its message tells."""
    found = _REQUESTED.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def release(error: BaseException, device: Device) -> None:
    """Free what a failure holds: the frames that it passed through, the graph that they hold, the allocator's cache."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        waiting += [current.__cause__, current.__context__]
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
    gc.collect()
    device.give_back()


class Guard:
    """The limit in force. It starts at the budget's, falls below what failed, and climbs back when the outlier has passed.

    It lives in shared memory, because the workers of a loader slice by it.
    """

    def __init__(self, budget: Budget, *, climb_after: int = CLIMB_AFTER) -> None:
        self.budget = budget
        self.budgets: tuple[Budget, ...] | None = None
        """Of all ranks, where they differ: what global batches are shared out by."""
        self._limit = torch.tensor([float(budget.limit)], dtype=torch.float64)
        self._limit.share_memory_()  # type: ignore[no-untyped-call]
        self._climb_after = climb_after
        self._clean = 0
        self._is_climbing = False

    @property
    def limit(self) -> float:
        """What a micro-batch may cost now."""
        return float(self._limit[0])

    @property
    def in_force(self) -> Budget:
        """The budget with the limit of now."""
        return self.budget.with_limit(self.limit)

    def cost_of(self, micro: MicroBatch) -> float:
        """The predicted cost of a micro-batch."""
        return self.budget.cost_of(len(micro), *micro.padded)

    def allows(self, micro: MicroBatch) -> bool:
        """Whether it is within the limit, or cannot be made smaller."""
        return len(micro) <= 1 or self.cost_of(micro) <= self.limit

    def learn(self, micro: MicroBatch) -> None:
        """This micro-batch ran out of memory. One sequence alone teaches nothing that a limit could mend, and a pinned limit stays."""
        self._clean = 0
        if len(micro) == 1 or self.budget.is_pinned:
            return
        if self._is_climbing:
            self._climb_after *= 2
            self._is_climbing = False
        self._limit[0] = min(self.limit, BACK_OFF * self.cost_of(micro))

    def step_was_clean(self) -> None:
        """A whole step went through without a split."""
        self._clean += 1
        if self._clean >= self._climb_after:
            self._clean = 0
            # The last climb has held; what fails from here on is not its fault.
            self._is_climbing = self.limit < self.budget.limit
            self._limit[0] = min(self.budget.limit, CLIMB * self.limit)

    def state(self) -> dict[str, float]:
        """What it has learned, for a checkpoint."""
        return {"limit": self.limit, "clean": self._clean, "climb_after": self._climb_after}

    def restore(self, state: dict[str, float]) -> None:
        """Take over what an earlier run has learned, if its budget was the same; another device learns for itself."""
        self._limit[0] = min(self.budget.limit, state["limit"])
        self._clean, self._climb_after = int(state["clean"]), int(state["climb_after"])


def does_not_fit_alone(micro: MicroBatch, failure: Failure, device: Device, longest_tokens: int) -> OutOfMemoryError:
    """One sequence, alone, is too much: because it is long, or because another process holds the memory."""
    reading, others = device.read(), others_on(device)
    text = _(
        "Sequence {index} ({tokens} tokens) does not fit even alone: out of memory in {phase}, {used} of {total} in use{more}."
    )
    asked = failure.requested_bytes
    told = text.format(
        index=int(micro.ids[0]),
        tokens=" + ".join(f"{length:,}" for length in micro.padded),
        phase=failure.phase,
        used=format_bytes(reading.total_bytes - reading.free_bytes),
        total=format_bytes(reading.total_bytes),
        more="" if asked is None else _(", {bytes} more asked for").format(bytes=format_bytes(asked)),
    )
    return OutOfMemoryError(
        sentences(told, str(others)),
        family=failure.family,
        hint=_hint(micro.padded[0], longest_tokens, others, asked),
    )


def _hint(tokens: int, longest_tokens: int, others: Others, asked_bytes: int | None) -> str:
    ways = _("Or save memory: gradient checkpointing, LoRA, an 8-bit optimizer, a smaller model.")
    free_it = (
        _("Free the memory that other processes hold, then resume.") if others.used_bytes >= max(1, asked_bytes or 0) else ""
    )
    has_fitted = 0 < tokens <= longest_tokens
    if has_fitted and free_it:
        return sentences(_("Sequences of this length have fitted in this run."), free_it)
    if has_fitted:
        return sentences(_("Sequences of this length have fitted in this run: memory in use has grown since."), ways)
    if not longest_tokens:
        return sentences(free_it, _("Nothing has fitted yet. Shorten the sequences."), ways)
    text = _("Sequences of up to {tokens:,} tokens have fitted in this run: shorten the longer ones to that.")
    return sentences(free_it, text.format(tokens=longest_tokens), ways)


def clipping_does_not_fit(failure: Failure, device: Device) -> OutOfMemoryError:
    """Memory ran out twice between the last backward and the optimizer's step."""
    reading, others = device.read(), others_on(device)
    text = _(
        "Out of memory while the gradient was clipped ({used} of {total} in use). This step was not taken; the weights are as they were."
    )
    told = text.format(used=format_bytes(reading.total_bytes - reading.free_bytes), total=format_bytes(reading.total_bytes))
    return OutOfMemoryError(sentences(told, str(others)), family=failure.family, hint=_optimizer_hint(failure, others))


def evaluation_does_not_fit(size: int, hint: str) -> OutOfMemoryError:
    """Memory ran out in an evaluation, and its batch cannot be made smaller."""
    text = _("Evaluation ran out of memory with a batch of {size}. Training is unaffected.")
    return OutOfMemoryError(text.format(size=size), hint=hint)


def saving_does_not_fit(step: int, hint: str) -> OutOfMemoryError:
    """Memory ran out while a checkpoint was saved, and again when all that can be freed was freed."""
    text = _("Saving the checkpoint of step {step} ran out of memory. In-memory weights are unaffected.")
    return OutOfMemoryError(text.format(step=step), hint=hint)


def _optimizer_hint(failure: Failure, others: Others) -> str:
    if others.used_bytes >= max(1, failure.requested_bytes or 0):
        return _("Free the memory that other processes hold.")
    return _("A smaller micro-batch does not help: use an 8-bit optimizer or Adafactor, or LoRA.")


def nothing_to_save() -> RunError:
    """After a failure in the middle of the optimizer's step there is nothing to go on with, and nothing to save."""
    return RunError(
        _(
            "The weights are half changed: memory ran out in the optimizer's step. They are not saved, and nothing goes on from them."
        ),
        hint=_("Load the last checkpoint."),
    )


def half_changed(failure: Failure, device: Device, again: str) -> OutOfMemoryError:
    """Memory ran out inside the optimizer: some weights have moved and others have not, so there is nothing to go on with or to save.

    `again` says what there is to go on from.
    """
    reading, others = device.read(), others_on(device)
    text = _(
        "Out of memory in the optimizer's step ({used} of {total} in use). The weights are half changed, so this run ends here and does "
        "not save them."
    )
    told = text.format(used=format_bytes(reading.total_bytes - reading.free_bytes), total=format_bytes(reading.total_bytes))
    return OutOfMemoryError(
        sentences(told, str(others)), family=failure.family, hint=sentences(again, _optimizer_hint(failure, others))
    )
