"""One trial, one child process: how it ended is a result, whatever it was.

The child is forked from a process that has imported everything and computed nothing, so a trial pays for building its model and no more. On
the CPU it runs under a hard limit; on an accelerator the allocator's own limit holds the margin back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

from brim.errors import UsageError
from brim.locale import _
from brim.machine.budget import ForkServer
from brim.machine.device import Device
from brim.prober.promise import Promise
from brim.prober.subjects import Subject
from brim.prober.trial import Exam, Notes, Point, TrialReport, examine, survey, warm_up
from brim.records import ShapePoint, Trial
from brim.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    Watch = Callable[[int, str | None, float], None]

PRELOAD: Final = ("torch", "torch._dynamo", "brim.prober.trial", "brim.prober.trainee")
_CLIFF: Final = 2.5
"""Times the seconds per token of a smaller size: memory that the driver quietly takes from the host, and computes with over the bus."""
_LEAST_SWAPPED: Final = 16 * MIB
_WATCH_SECONDS: Final = 0.25


@dataclass
class Runner:
    """Runs trials of one subject on one device."""

    subject: Subject
    device: str
    promise: Promise
    memory_bytes: int | None = None
    """The CPU's budget, margin off."""
    preload: tuple[str, ...] = ()
    trial_seconds: float = 600.0
    """A trial that takes longer counts as hanging."""
    watch: Watch | None = None
    """Called while a trial runs: size, phase, seconds so far."""
    is_here: bool = False
    """Run trials in this process, between two copies of every bit: the subject is a live object that no child can receive."""
    loaded_bytes: int = 0
    """What a live subject brings with it before the limit is set: it counts all the same."""
    recorded: Device | None = None
    """Stands for the device, in tests."""
    server: ForkServer = field(default_factory=ForkServer)
    _offset: int = 0
    """From the peak of what is touched to the peak of what is taken, as the last size that ran had it."""
    base_bytes: int | None = None
    """Here: what the process held before the first trial."""
    gradient_bytes: int | None = None
    """As the last trial had them."""
    is_exact: bool = True
    """Whether the bytes of all trials can be held against the limit."""
    _fastest: float | None = None
    """Seconds per token of the fastest size so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self.server.close()

    @property
    def modules(self) -> tuple[str, ...]:
        """What the server imports, once."""
        return (*PRELOAD, *(name for name in self.preload if _is_there(name)))

    def warm(self) -> None:
        """Let the server import while something else is done."""
        if self.is_here:
            return

        def start() -> None:
            with contextlib.suppress(Exception):  # reported by the first trial
                self.server.run(_nothing, preload=self.modules)

        threading.Thread(target=start, daemon=True).start()

    def run(self, exam: Exam) -> Trial:
        """One trial."""
        if self.is_here:
            from brim.prober.objects import try_here

            return try_here(self, exam)
        size = exam.longest.sequences
        with tempfile.TemporaryDirectory(prefix="brim-") as folder, self._watching(size, Path(folder) / "notes"):
            notes = str(Path(folder) / "notes")
            outcome = self.server.run(
                examine, self.subject, exam, self.device, notes, self.recorded,
                memory_bytes=self.room_bytes, timeout_seconds=self.trial_seconds, preload=self.modules,
                warm_up=partial(warm_up, self.subject),
            )  # fmt: skip
            phase, steps = Notes.read(notes)
        base: dict[str, Any] = {
            "micro_batch": size,
            "max_length": exam.longest.length,
            "accumulates": exam.accumulates,
            "elapsed_seconds": round(outcome.seconds, 3),
        }
        if outcome.verdict != "ok":
            return Trial(verdict=outcome.verdict, phase=phase, steps=steps, message=outcome.message, **base)
        if outcome.value is None:
            message = _("The model's own code ended the process.")
            return Trial(verdict="crash", phase=phase, steps=steps, message=message, **base)
        return self.judge(outcome.value, base)

    @property
    def room_bytes(self) -> int | None:
        """The CPU's budget without what was there before it began."""
        return None if self.memory_bytes is None else max(1, self.memory_bytes - self.loaded_bytes)

    def judge(self, report: TrialReport, base: dict[str, Any]) -> Trial:
        """The verdict on an exam whose process lived to tell."""
        if report.refusal is not None:
            message, hint = report.refusal
            raise UsageError(message, hint=hint or None)
        size, loaded = base["micro_batch"], self.loaded_bytes
        self.gradient_bytes = report.gradient_bytes or self.gradient_bytes
        facts: dict[str, Any] = {
            **base,
            "steps": report.steps,
            "peak_allocated_bytes": report.allocated_bytes + loaded,
            "peak_reserved_bytes": report.reserved_bytes + loaded,
            "peak_device_bytes": report.device_bytes + loaded,
            "one_sequence_bytes": report.one_sequence_bytes + loaded if report.one_sequence_bytes else None,
            "allocator_retries": report.retries,
        }
        if report.phase is not None:
            return Trial(verdict="out-of-memory", phase=report.phase, message=report.message, **facts)
        self.is_exact = self.is_exact and report.is_exact
        # The first of the full size still waits for pages and for kernels to be chosen.
        computing, updating = min(report.micro_batch_seconds[1:] or report.micro_batch_seconds), median(report.update_seconds)
        promise = self.promise
        facts |= {
            "micro_batch_seconds": computing,
            "update_seconds": updating,
            "step_seconds": promise.step_seconds(size, computing, updating),
            "wait_seconds": promise.step_seconds(size, report.wait_seconds, 0.0),
            "tokens_per_second": promise.tokens_per_second(size, computing, updating),
        }
        trouble = self._thrashing(report, size, computing)
        if trouble:
            return Trial(verdict="thrashing", message=trouble, **facts)
        self._offset = report.device_bytes - report.resident_bytes + loaded
        return Trial(verdict="ok", **facts)

    def _thrashing(self, report: TrialReport, size: int, computing: float) -> str:
        """Why a size that ran does not fit: memory was released and allocated again in every step. Empty if it fits."""
        if report.late_retries:
            return _("The allocator had to free cached memory {count} times.").format(count=report.retries)
        if report.swapped_bytes > _LEAST_SWAPPED:
            return _("The host swapped out {size:.0f} MiB of the process.").format(size=report.swapped_bytes / MIB)
        each = computing / (size * self.promise.tokens_per_sequence)
        if not self.device.startswith("cpu") and self._fastest is not None and each > _CLIFF * self._fastest:
            return _(
                "A token takes {factor:.1f} times as long as at a smaller size: host memory is used in place of device memory."
            ).format(factor=each / self._fastest)
        self._fastest = min(each, self._fastest or each)
        return ""

    def survey(self, exams: tuple[Exam, ...], largest: Exam, passed: Trial) -> tuple[list[ShapePoint], str]:
        """Smaller shapes in one further process: their points, and what went wrong, if anything did."""
        each = (passed.micro_batch_seconds or 0.0) / (passed.micro_batch * passed.max_length)
        outcome = self.server.run(
            survey, self.subject, exams, largest, self.device, each, self.recorded,
            memory_bytes=self.room_bytes, timeout_seconds=self.trial_seconds, preload=self.modules,
            warm_up=partial(warm_up, self.subject),
        )  # fmt: skip
        if outcome.verdict != "ok":
            return [], outcome.message
        return [self._point(point) for point in outcome.value], ""

    def _point(self, point: Point) -> ShapePoint:
        shape, size = point.exam.longest, point.exam.longest.sequences
        is_full = shape.length + shape.target_length == self.promise.tokens_per_sequence
        return ShapePoint(
            sequences=size,
            length=shape.length,
            target_length=shape.target_length,
            padded=shape.padded,
            accumulates=point.exam.accumulates,
            peak_bytes=max(1, point.peak_bytes + self._offset),
            seconds=point.seconds,
            tokens_per_second=self.promise.tokens_per_second(size, point.seconds, point.update_seconds) if is_full else None,
        )

    @contextlib.contextmanager
    def _watching(self, size: int, notes: Path) -> Any:
        if self.watch is None:
            yield
            return
        watch, over, began = self.watch, threading.Event(), time.monotonic()

        def look() -> None:
            while not over.wait(_WATCH_SECONDS):
                watch(size, Notes.read(notes)[0], time.monotonic() - began)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _nothing() -> None:
    """What the server is asked to do when it shall only import."""


def _is_there(module: str) -> bool:
    """Whether its package is installed: to look for the module itself would import the package."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None
