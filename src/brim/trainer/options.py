"""What a Trainer with brim's step can be told besides its own arguments, checked when it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brim.step.arguments import budgets_of, ledger_file, speeds_of, whole, word
from brim.step.book import OnBroken
from brim.step.budget import Budget


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `brim.attach`."""

    effective_batch: int | None = None
    budget: Budget | Sequence[Budget] | None = None
    speeds: Sequence[float] | None = None
    lengths: Sequence[int] | None = None
    ledger: str | Path | bool = True
    on_broken: OnBroken = "stop"
    noise_scale: bool | None = None

    def own_budget(self, rank: int) -> Budget | None:
        """That of this rank, if one was given. Whether a list has the right length is said when all ranks can hear it."""
        if self.budget is None or isinstance(self.budget, Budget):
            return self.budget
        return self.budget[min(rank, len(self.budget) - 1)]

    def __post_init__(self) -> None:
        if self.effective_batch is not None:
            whole("effective_batch", self.effective_batch)
        if self.budget is not None:
            budgets_of(self.budget)
        speeds_of(self.speeds)
        ledger_file(self.ledger, "")
        word("on_broken", self.on_broken, OnBroken)
