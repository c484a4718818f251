"""A ledger as columns of numbers: read line by line, so that the longest run needs a few hundred bytes a step.

The columns are read without numpy, which the base installation lacks, and become arrays of numpy where figures are made of them.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from brim.audit.found import Found
from brim.records import Ledger, Pulse
from brim.step.checker import in_force

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from brim.records import LedgerEntry, LedgerHeader
    from brim.records.findings import Confidence, InForce, Severity

FEWEST_STEPS: Final = 20
"""Fewer say nothing about speed, memory or loss."""

if TYPE_CHECKING:
    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """One number a step, in the order of the steps in force. NaN: not known."""

    step: Floats
    epoch: Floats
    promised: Floats
    sequences: Floats
    work: Floats
    """What the device computed: padded tokens, or sequences where tokens were not counted."""
    tokens: Floats
    supervised: Floats
    compute_seconds: Floats
    wait_seconds: Floats
    peak_bytes: Floats
    """Reserved by the allocator where that is known, else allocated."""
    micro_batches: Floats
    """Of the rank that ran most."""
    largest_micro: Floats
    """Padded tokens of the largest micro-batch."""
    splits: Floats
    limit: Floats
    skipped: Floats
    loss: Floats
    has_loss: Floats
    """1 where a loss was written down: one that is not a number may be what happened."""
    learning_rate: Floats
    noise: Floats
    signal: Floats

    def __len__(self) -> int:
        return len(self.step)

    @property
    def seconds(self) -> Floats:
        """Of the whole step."""
        return self.compute_seconds + self.wait_seconds

    def since(self, place: int) -> Columns:
        """The steps from this one on."""
        return Columns(*(getattr(self, name)[place:] for name in _NAMES))


_NAMES: Final = tuple(Columns.__dataclass_fields__)


@dataclass(frozen=True)
class Run:
    """What the checks look at."""

    ledger: Ledger
    shown: str
    numbers: Mapping[str, array[float]]
    """The columns by their names in `Columns`."""
    pulses: tuple[tuple[int, Pulse], ...]
    """With the place of their step."""

    def __len__(self) -> int:
        return len(self.numbers["step"])

    @cached_property
    def columns(self) -> Columns:
        """The columns for arithmetic. Needs numpy."""
        import numpy as np

        return Columns(*(np.asarray(self.numbers[name]) for name in _NAMES))  # views: no number is held twice

    @cached_property
    def headers(self) -> list[LedgerHeader]:
        """Those under which steps stand."""
        return in_force(self.ledger.headers)

    @cached_property
    def start(self) -> int:
        """The first step since the run last moved to another machine: before it, speed and memory were another's."""
        moved = 0
        for before, after in zip(self.headers, self.headers[1:], strict=False):
            if (before.device, before.world_size) != (after.device, after.world_size):
                moved = after.resumed_from_step
        return bisect_right(self.numbers["step"], moved)

    @cached_property
    def now(self) -> Columns:
        """The steps since then."""
        return self.columns.since(self.start)

    @cached_property
    def settled(self) -> Columns:
        """Those without the first few, in which libraries warm up and loaders fill."""
        return self.now.since(warm_up(len(self.now)))

    @cached_property
    def settled_pulses(self) -> list[Pulse]:
        """The pulses of those."""
        return [pulse for place, pulse in self.pulses if place >= self.start + warm_up(len(self.now))]

    def line(self, place: int) -> int:
        """The line of the file that holds this step; -1 is the last step."""
        return self.ledger.lines[place] if self.ledger.lines else 1

    def found(
        self,
        rule: str,
        message: str,
        *,
        place: int = -1,
        until: int | None = None,
        confidence: Confidence = "high",
        severity: Severity | None = None,
        in_force: tuple[InForce, ...] = (),
    ) -> Found:
        """A finding about a step, or about the steps from `place` until another one."""
        line = self.line(place)
        return Found(
            rule=rule,
            file=self.shown,
            line=line,
            end_line=line if until is None else max(line, self.line(until)),
            message=message,
            confidence=confidence,
            severity=severity,
            in_force=in_force,
        )


def read_run(ledger: Ledger, shown: str, noise_of: Callable[[LedgerEntry], tuple[float, float] | None] | None = None) -> Run:
    """Go through the steps once. `noise_of` gives the noise and the signal of a step's gradient; without it they are not known."""
    numbers = {name: array("d") for name in _NAMES}
    pulses = []
    for place, entry in enumerate(ledger.steps):
        told = noise_of(entry) if noise_of is not None else None
        for name, value in _row(entry, *(told or (None, None))).items():
            numbers[name].append(math.nan if value is None else value)
        if entry.pulse is not None:
            pulses.append((place, entry.pulse))
    return Run(ledger, shown, numbers, tuple(pulses))


def warm_up(steps: int) -> int:
    """How many steps at the start do not show how the run goes."""
    return min(max(3, steps // 20), 100)


def median_of(pulses: list[Pulse], name: str) -> float | None:
    """The middle of what is known of one field."""
    known = [value for pulse in pulses if (value := getattr(pulse, name)) is not None]
    return float(median(known)) if known else None


def _row(entry: LedgerEntry, noise: float | None, signal: float | None) -> dict[str, Any]:
    shapes = [one.sequences * (one.length + one.target_length) for one in entry.slices if one.length is not None]
    ranks = [one.rank for one in entry.slices]
    return {
        "step": entry.step,
        "epoch": entry.epoch,
        "promised": entry.promised_sequences,
        "sequences": entry.sequences,
        "work": entry.padded_tokens or entry.tokens or entry.sequences,
        "tokens": entry.tokens,
        "supervised": entry.supervised_tokens,
        "compute_seconds": entry.compute_seconds,
        "wait_seconds": entry.wait_seconds,
        "peak_bytes": entry.peak_reserved_bytes or entry.peak_allocated_bytes,
        "micro_batches": max((ranks.count(rank) for rank in set(ranks)), default=None),
        "largest_micro": max(shapes, default=None),
        "splits": len(entry.splits),
        "limit": entry.limit,
        "skipped": entry.skipped,
        "loss": entry.loss,
        "has_loss": entry.loss is not None,
        "learning_rate": entry.learning_rate,
        "noise": noise,
        "signal": signal,
    }
