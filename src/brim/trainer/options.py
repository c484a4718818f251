"""What a Trainer with brim's step can be told besides its own arguments, checked when it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brim.step.arguments import budget_of, ledger_file, whole, word
from brim.step.book import OnBroken
from brim.step.budget import Budget


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `brim.attach`."""

    effective_batch: int | None = None
    budget: Budget | None = None
    lengths: Sequence[int] | None = None
    ledger: str | Path | bool = True
    on_broken: OnBroken = "stop"
    noise_scale: bool | None = None

    def __post_init__(self) -> None:
        if self.effective_batch is not None:
            whole("effective_batch", self.effective_batch)
        if self.budget is not None:
            budget_of(self.budget)
        ledger_file(self.ledger, "")
        word("on_broken", self.on_broken, OnBroken)
