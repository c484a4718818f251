"""The bookkeeping of a run: each step as an entry of the ledger, checked against what was promised, written by the first rank."""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Literal, cast

from brim.locale import _, sentences
from brim.machine.pulse import PulseMeter
from brim.machine.screen import say
from brim.records import BudgetLimit, LedgerEntry, LedgerHeader, LedgerSummary, Pulse, Slice, Split, Totals
from brim.step.arguments import word
from brim.step.checker import Checker
from brim.step.ledger import LedgerWriter
from brim.step.ledger_repair import last_step_of, listed, repair_ledger
from brim.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from brim.machine.device import Device, Reading
    from brim.step.batch import BatchPlan
    from brim.step.engine import Total
    from brim.step.loading import StepItem
    from brim.step.oom import Guard
    from brim.step.ranks import Ranks
    from brim.workload.words import Phase

OnBroken = Literal["stop", "warn"]
PULSE_SECONDS = 1.0
"""The machine is looked at so often, and not at every step of a run whose steps are short."""
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
        warnings: tuple[str, ...] = (),
        is_quiet: bool = False,
    ) -> None:
        word("on_broken", on_broken, OnBroken)
        self._plan, self._guard, self._device, self._is_first_rank = plan, guard, device, ranks.rank == 0
        self.is_closed = False
        self._totals, self._started = Totals(resumed_from_step), time.monotonic()
        self._said_unsupervised = False
        self._checker = Checker(on_broken, last_step=resumed_from_step)
        self._began = self._wait_seconds = 0.0
        self._watch = _Watch()
        reading = device.read()
        self._last_recorded = 0
        """The last step that the ledger holds from before."""
        if path is not None and self._is_first_rank and resumed_from_step:
            if path.is_file() and not is_quiet:  # the command has done it, before all else
                repair_ledger(path, say)
            self._last_recorded = last_step_of(path)
        is_behind = path is not None and self._last_recorded < resumed_from_step
        header = LedgerHeader(
            started_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            resumed_from_step=resumed_from_step,
            unrecorded_steps=((self._last_recorded + 1, resumed_from_step),) if is_behind else (),
            seed=plan.seed,
            effective_batch=plan.effective_batch,
            sequences_in_data=plan.n,
            steps_per_epoch=plan.steps_per_epoch,
            drop_last=plan.drop_last,
            world_size=ranks.size,
            budget=BudgetLimit(unit=guard.budget.unit, limit=guard.budget.limit),
            device=device.name,
            # What is free now and what this process holds already: other processes on the device keep what they have.
            memory_limit_bytes=min(reading.total_bytes, reading.reserved_bytes + reading.free_bytes),
            data_fingerprint=plan.fingerprint(),
            configuration=dict(configuration or {}),
            versions=_versions(),
            notes=tuple(note for note in (guard.budget.because, *notes, *warnings) if note),
        )
        self._writer: LedgerWriter | None = None
        if path is not None and self._is_first_rank:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = LedgerWriter(path, header, on_trouble=say)
        self._is_quiet = is_quiet
        """Somebody else says what is in force, and what became of it."""
        if not is_quiet:
            self._say_what_is_in_force(path, resumed_from_step)
        for warning in warnings if self._is_first_rank else ():
            say(f"brim: {warning}")

    def begin(self, wait_seconds: float = 0.0) -> None:
        """The data is there, the work begins."""
        if self._writer is not None and not self.is_closed:
            self._writer.restore_if_deleted()
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
            pulse=self._watch.pulse(item, reading),
        )
        # Written before it is judged: a broken promise must be on record too.
        self._totals.add(entry)
        if self._writer is not None:
            self._writer.write(entry)
        self._say_if_unsupervised(entry)
        self._checker.check(entry, item.promised.tolist(), total.items)
        return entry

    @property
    def times_restored(self) -> int:
        """How often the ledger was deleted under the run, and written again."""
        return 0 if self._writer is None else self._writer.times_restored

    def settle(self) -> None:
        """See to it that the steps up to here are on the disk, before a checkpoint says that they were taken."""
        if self._writer is not None and not self.is_closed:
            self._writer.settle()

    def close(self, *, finished: bool, reason: str = "") -> None:
        """The run is over, for good or not: the sums of its steps, as the last line of the ledger and of the screen."""
        if self.is_closed:
            return
        self.is_closed = True
        summary = self._totals.summary(seconds=time.monotonic() - self._started, finished=finished, reason=reason)
        if self._is_first_rank and not self._is_quiet:
            say(_in_words(summary))
        if self._writer is not None:
            self._writer.close(finished=finished, reason=reason)

    def _say_what_is_in_force(self, path: Path | None, resumed_from_step: int) -> None:
        if not self._is_first_rank:
            return
        text = _("brim: effective batch {batch}, steps in an epoch: {steps}, micro-batches of up to {limit}, ledger: {ledger}.")
        words = text.format(
            batch=self._plan.effective_batch,
            steps=self._plan.steps_per_epoch,
            limit=self._guard.budget.format(self._guard.limit),
            ledger=_("none") if path is None else path,
        )
        say(sentences(words, self._resumes(resumed_from_step)))

    def _resumes(self, step: int) -> str:
        if not step:
            return ""
        if self._last_recorded <= step:
            return _("Resuming after step {step}.").format(step=step)
        text = _("Resuming after step {step}; these steps will be repeated: {steps}.")
        return text.format(step=step, steps=listed([(step + 1, self._last_recorded)]))

    def _say_if_unsupervised(self, entry: LedgerEntry) -> None:
        if entry.supervised_tokens or self._said_unsupervised or not self._is_first_rank:
            return
        self._said_unsupervised = True
        text = _("brim: step {step} has no supervised token, so it was skipped. Further ones are only counted.")
        say(text.format(step=entry.step))


class _Watch:
    """The machine's pulse, felt when a step is over and a second has passed."""

    def __init__(self) -> None:
        self._workers: deque[int] = deque(maxlen=0)
        self._reading: Reading | None = None
        self._meter = PulseMeter(
            workers=lambda: set(self._workers),
            utilisation=lambda: self._reading and self._reading.busy,
            retries=lambda: self._reading and self._reading.allocator_retries,
        )
        self._felt = time.monotonic()

    def pulse(self, item: StepItem, reading: Reading) -> Pulse | None:
        """What happened since the last one; None if that is not a second ago."""
        if item.worker is not None:
            pid, count = item.worker
            if self._workers.maxlen != count:
                self._workers = deque(self._workers, maxlen=count)
            self._workers.append(pid)
        now = time.monotonic()
        if now - self._felt < PULSE_SECONDS:
            return None
        self._felt, self._reading = now, reading
        return Pulse(**self._meter.read())


def reason_of(error: BaseException) -> str:
    """Why a run ended, for the ledger."""
    return str(error).partition("\n")[0] or type(error).__name__


def _in_words(summary: LedgerSummary) -> str:
    if summary.finished:
        begin = _("brim: the promise was kept.")
    else:
        begin = _("brim: ended early after step {step}: {reason}").format(step=summary.last_step, reason=summary.reason)
    if not summary.steps:
        return begin
    text = _(
        "Steps: {steps}, sequences: {sequences}, padding: {padding:.1%}, splits after out of memory: {splits}, skipped: {skipped}."
    )
    padding = 1 - (summary.tokens or 0) / max(1, summary.padded_tokens or 0)
    counted = text.format(
        steps=summary.steps, sequences=summary.sequences, padding=padding, splits=summary.splits, skipped=summary.skipped
    )
    return sentences(begin, counted)


def _slices(total: Total) -> tuple[Slice, ...]:
    return tuple(
        Slice(
            rank=rank, sequences=sequences, length=lengths[0], target_length=sum(lengths[1:]), items=items, gradient_square=square
        )
        for rank, tally in enumerate(total.tallies)
        for (sequences, *lengths), items, square in zip(tally.slices, tally.slice_items, tally.slice_squares, strict=True)
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
