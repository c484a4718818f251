"""The bookkeeping of a run: each step as an entry of the ledger, checked against what was promised, written by the first rank."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Literal, cast

from brim.records import BudgetLimit, LedgerEntry, LedgerHeader, LedgerSummary, Slice, Split
from brim.step.checker import Checker
from brim.step.ledger import LedgerWriter
from brim.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from brim.machine.device import Device
    from brim.step.batch import BatchPlan
    from brim.step.engine import Total
    from brim.step.loading import StepItem
    from brim.step.oom import Guard
    from brim.step.ranks import Ranks
    from brim.workload.words import Phase

OnBroken = Literal["stop", "warn"]
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "numpy")


class Book:
    """Measures a step between `begin` and `end`, and keeps its entry."""

    def __init__(
        self,
        plan: BatchPlan,
        guard: Guard,
        ranks: Ranks,
        device: Device,
        *,
        path: Path | None,
        resumed_from_step: int = 0,
        on_broken: OnBroken = "stop",
        configuration: Mapping[str, str | int | float | bool | None] | None = None,
        notes: tuple[str, ...] = (),
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self._plan, self._guard, self._device = plan, guard, device
        self._checker = Checker(on_broken, last_step=resumed_from_step)
        self._began = self._wait_seconds = 0.0
        header = LedgerHeader(
            started_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            resumed_from_step=resumed_from_step,
            seed=plan.seed,
            effective_batch=plan.effective_batch,
            sequences_in_data=plan.n,
            steps_per_epoch=plan.steps_per_epoch,
            drop_last=plan.drop_last,
            world_size=ranks.size,
            budget=BudgetLimit(unit=guard.budget.unit, limit=guard.budget.limit),
            device=device.name,
            data_fingerprint=plan.fingerprint(),
            configuration=dict(configuration or {}),
            versions=_versions(),
            notes=tuple(note for note in (guard.budget.because, *notes) if note),
        )
        self._writer = LedgerWriter(path, header, on_trouble=on_trouble) if path is not None and ranks.rank == 0 else None

    def begin(self, wait_seconds: float = 0.0) -> None:
        """The data is there, the work begins."""
        self._device.reset_peak()
        self._wait_seconds = wait_seconds
        self._began = time.perf_counter()

    def end(
        self, item: StepItem, total: Total, *, grad_norm: float | None, learning_rate: float | None, skipped: bool = False
    ) -> LedgerEntry:
        """The optimizer has stepped. Promise and fact are compared; then the line is written."""
        self._device.synchronize()
        seconds = time.perf_counter() - self._began
        reading = self._device.read()
        epoch, place = self._plan.epoch_of(item.step)
        ids = tuple(place for tally in total.tallies for place in tally.ids)
        entry = LedgerEntry(
            step=item.step + 1,
            epoch=round(epoch + (place + 1) / self._plan.steps_per_epoch, 6),
            promised_sequences=len(item.promised),
            sequence_ids=ids,
            sequences=len(ids),
            tokens=sum(tally.tokens for tally in total.tallies),
            padded_tokens=sum(tally.padded_tokens for tally in total.tallies),
            supervised_tokens=total.items,
            slices=_slices(total),
            splits=_splits(total),
            limit=self._guard.limit,
            skipped=skipped,
            # The largest of all ranks; of the optimizer's own step only this rank knows.
            peak_allocated_bytes=max(reading.peak_allocated_bytes, *(tally.peak_allocated_bytes for tally in total.tallies)),
            peak_reserved_bytes=max(reading.peak_reserved_bytes, *(tally.peak_reserved_bytes for tally in total.tallies)),
            compute_seconds=seconds,
            wait_seconds=self._wait_seconds,
            loss=total.loss if total.items else None,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
        )
        # Written before it is judged: a broken promise must be on record too.
        if self._writer is not None:
            self._writer.write(entry)
        self._checker.check(entry, item.promised.tolist(), total.items)
        return entry

    def close(self, *, finished: bool, reason: str = "") -> LedgerSummary | None:
        """The run is over, for good or not. The sums of its steps, on the rank that writes them, the first time."""
        if self._writer is None or self._writer.summary is not None:
            return None
        return self._writer.close(finished=finished, reason=reason)


def _slices(total: Total) -> tuple[Slice, ...]:
    return tuple(
        Slice(rank=rank, sequences=sequences, length=lengths[0], target_length=sum(lengths[1:]))
        for rank, tally in enumerate(total.tallies)
        for sequences, *lengths in tally.slices
    )


def _splits(total: Total) -> tuple[Split, ...]:
    return tuple(
        Split(rank=rank, phase=cast("Phase", phase), sequences=sequences, length=length, into=into, requested_bytes=requested)
        for rank, tally in enumerate(total.tallies)
        for phase, sequences, length, into, requested in tally.splits
    )


def _versions() -> dict[str, str]:
    found = {"brim": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
