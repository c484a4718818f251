"""One trial, in the child process: train one size and measure what it takes.

The order comes from sizes that failed in training after a search had called them good. First, optimizer steps of the full size with the
longest sequences: without a mask and with one (attention may use a different kernel), and next to the gradients of another micro-batch if
the step accumulates. Then mixed lengths, which fragment the allocator's memory, a batch of evaluation, and a save. Nothing is released in
between, as nothing would be in training.

On the CPU a step of one sequence comes first and creates the optimizer's state; where steps are short, more steps follow, because the heap
may grow for a while. On CUDA the first step already has the full size. The caching allocator keeps the segments of every step: a small
first step would leave segments that a run starting with a full batch does not have, and the largest size would differ. For the same reason
three steps of one kind come first, with or without a mask: the kind that is predicted to take more.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UnsupportedError, UsageError
from brim.machine import child
from brim.machine.device import CpuDevice, Device, Reading, TorchDevice
from brim.machine.sharing import others_on
from brim.prober.shapes import Shape
from brim.workload.words import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.prober.subjects import Subject
    from brim.prober.trainee import Trainee


@dataclass(frozen=True)
class Exam:
    """What one size must pass."""

    longest: Shape
    """The full micro-batch: the longest sequences."""
    masks: tuple[bool, ...] = (False, True)
    """Kinds of optimizer steps of the full size: without a mask, and with one that has zeros. On CUDA the kind that takes more is first."""
    mixed: tuple[Shape, ...] = ()
    """One further optimizer step of these micro-batches."""
    evaluation: Shape | None = None
    accumulates: bool = False
    first: int = 1
    """Sequences of a first, smaller step, which creates the optimizer's state; 0: none, the first step has the full size."""
    saves: bool = True
    soak_seconds: float = 1.0
    """Steps of the full size go on for so long: where they are short, some more of them cost nothing."""
    budget_bytes: int | None = None
    """CUDA: what the process may use of the device, context included; None: all of it."""
    others_bytes: int = 0
    """Accelerators: what other processes hold of the device, used if the driver does not report it; it does not count for the trial."""


@dataclass(frozen=True)
class TrialReport:
    """What the child process measured in an exam, passed or failed."""

    phase: Phase | None = None
    """Where memory ran out; None: it did not."""
    message: str = ""
    steps: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int = 0
    """Peaks, above what the process had before the model was built."""
    one_sequence_bytes: int = 0
    """The last of them after the first step, which has one sequence."""
    resident_bytes: int = 0
    """CPU: the peak of what was really touched; a survey, whose shapes follow each other in one process, can see no other."""
    micro_batch_seconds: tuple[float, ...] = ()
    update_seconds: tuple[float, ...] = ()
    wait_seconds: float = 0.0
    """To make one full micro-batch and bring it to the device."""
    is_exact: bool = True
    """False where the peak of the process lies before the exam: what was touched then stands for what was taken, and is more."""
    gradient_bytes: int = 0
    retries: int = 0
    late_retries: int = 0
    """Retries of the allocator that still occurred when steps of the full size were repeated."""
    swapped_bytes: int = 0
    refusal: tuple[str, str] | None = None
    """A mistake of the user's, in words, and what to do about it."""


class Notes:
    """Where the exam stands, in a file that outlives the process: a child that is killed tells nothing else."""

    def __init__(self, path: str | None) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT) if path is not None else None
        self.phase: Phase = "forward"
        self.steps = 0

    def enter(self, phase: Phase) -> None:
        """The next phase begins."""
        self.phase = phase
        if self._descriptor is not None:
            os.pwrite(self._descriptor, json.dumps({"phase": phase, "steps": self.steps}).ljust(64).encode(), 0)

    @staticmethod
    def read(path: str | Path) -> tuple[Phase | None, int]:
        """Phase and steps as last noted."""
        try:
            found = json.loads(Path(path).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None, 0
        return found["phase"], found["steps"]


class Meter:
    """Peaks above a baseline: of the device's allocator, or of the process where the device is the CPU."""

    def __init__(self, device: Device, others_bytes: int = 0, *, is_fresh: bool = True) -> None:
        self._device, self._others = device, others_bytes
        # Linux keeps the peak of what a process has mapped since its start: only a fresh one may go by it.
        self._is_fresh = is_fresh and _HAS_PROC
        self._is_cpu = isinstance(device, CpuDevice)
        self._data = child.data_bytes() if self._is_cpu and _HAS_PROC else 0
        self._resident = child.resident_bytes() if self._is_cpu else 0
        self._retries = device.read().allocator_retries
        self.forget()

    def forget(self) -> None:
        """Let peaks count from here, above the same baseline. The peak of what was mapped stays: only a higher one will tell."""
        self._old_peak = child.peak_data_bytes() if self._is_cpu and self._is_fresh else 0
        self._device.reset_peak()

    def _room(self) -> int:
        """What the limit leaves: nobody has taken more, whatever was touched (libraries' own pages count there)."""
        limit = child.data_limit() if self._is_fresh else None
        return max(0, limit - self._data) if limit is not None else sys.maxsize

    def read(self) -> dict[str, Any]:
        """As fields of `TrialReport`."""
        reading = self._device.read()
        common = {"retries": reading.allocator_retries - self._retries, "swapped_bytes": reading.swapped_bytes}
        if self._is_cpu:
            resident = max(0, (child.peak_resident_bytes() or 0) - self._resident)
            peak = child.peak_data_bytes() if self._is_fresh else 0
            is_exact = peak > self._old_peak
            data = peak - self._data if is_exact else min(resident, self._room())
            common["is_exact"] = is_exact
            return {**common, "allocated_bytes": data, "reserved_bytes": data, "device_bytes": data, "resident_bytes": resident}
        beyond, peak = beyond_allocator(self._device, reading, self._others), reading.peak_reserved_bytes
        return {
            **common,
            "allocated_bytes": reading.peak_allocated_bytes,
            "reserved_bytes": peak,
            "device_bytes": peak + beyond,
            "resident_bytes": peak + beyond,
        }


def beyond_allocator(device: Device, reading: Reading, others_bytes: int) -> int:
    """What this process holds on the device besides the allocator's segments: the context and workspaces of libraries."""
    others = others_on(device)
    held_by_others = others.used_bytes if others.is_exact else others_bytes
    return max(0, reading.total_bytes - reading.free_bytes - reading.reserved_bytes - held_by_others)


@contextlib.contextmanager
def limited(device: Device, name: str, exam: Exam) -> Iterator[None]:
    """Limit the process to the exam's budget. The allocator's own limit counts its segments only, so the context is subtracted."""
    if exam.budget_bytes is None:
        yield
        return
    import torch

    before = torch.cuda.get_per_process_memory_fraction(name)
    reading = device.read()
    room = exam.budget_bytes - beyond_allocator(device, reading, exam.others_bytes)
    torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, room / reading.total_bytes)), name)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, name)


_MORE_STEPS: Final = 3
"""Times the first two steps of the full size, at most, until `soak_seconds` are spent on them."""
_SETTLING_ROUNDS: Final = 2
_STEPS_OF_ONE_KIND: Final = 3
"""CUDA: steps of the full size before another kind of step."""
_HAS_PROC: Final = Path("/proc/self/status").exists()


def warm_up(subject: Any = None) -> None:
    """What torch does once in a process, at the first backward, the first optimizer's step and the first save: not a trial's to pay for."""
    import torch

    if hasattr(subject, "prepare"):
        subject.prepare()

    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = torch.optim.AdamW([weight])
    loss: Any = (torch.ones(64, 64) @ weight).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    optimizer.step()
    torch.save({"weight": weight, "optimizer": optimizer.state_dict()}, io.BytesIO())


def device_of(name: str) -> Device:
    """As torch names it: `cpu`, `cuda:0`."""
    kind, _colon, index = name.partition(":")
    return CpuDevice() if kind == "cpu" else TorchDevice(kind, int(index or 0))


def examine(
    subject: Subject,
    exam: Exam,
    name: str,
    notes_path: str | None = None,
    device: Device | None = None,
    *,
    is_fresh: bool = True,
) -> TrialReport:
    """Build, and let the size pass its exam or run out of memory. Every other error is the caller's to judge.

    `is_fresh`: this process was made for the exam, and has no past that its peaks could tell of.
    """
    device = device or device_of(name)
    examiner = _Examiner(exam, Notes(notes_path), device, is_fresh=is_fresh)
    try:
        with limited(device, name, exam):
            examiner.run(subject, name)
    except Exception as error:
        from brim.step.oom import failure_of, release

        failure = failure_of(error, examiner.notes.phase)
        if failure is None:
            if isinstance(error, UsageError | UnsupportedError):
                return TrialReport(refusal=(error.message, error.hint or ""))
            raise
        words = " ".join(str(error).split()) or type(error).__name__
        release(error, device)
        return examiner.report(phase=failure.phase, message=words[:400])
    return examiner.report()


class _Examiner:
    def __init__(self, exam: Exam, notes: Notes, device: Device, *, is_fresh: bool = True) -> None:
        self.notes = notes
        self._exam, self._device = exam, device
        self._meter = Meter(device, exam.others_bytes, is_fresh=is_fresh)
        self._computing: list[float] = []
        self._updating: list[float] = []
        self._waited = 0.0
        self._one_sequence_bytes = 0
        self._gradient_bytes = 0
        self._late_retries = 0

    def report(self, **more: Any) -> TrialReport:
        return TrialReport(
            steps=self.notes.steps,
            micro_batch_seconds=tuple(self._computing),
            update_seconds=tuple(self._updating),
            wait_seconds=self._waited,
            one_sequence_bytes=self._one_sequence_bytes,
            gradient_bytes=self._gradient_bytes,
            late_retries=self._late_retries,
            **self._meter.read(),
            **more,
        )

    def run(self, subject: Subject, name: str) -> None:
        exam, notes = self._exam, self.notes
        notes.enter("forward")
        trainee = subject.build(name)
        self._meter.forget()
        if exam.first:
            one = replace(exam.longest, sequences=exam.first)
            self._step(trainee, [one, one] if exam.accumulates else [one])
            if exam.first == 1:
                self._one_sequence_bytes = self._meter.read()["device_bytes"]
        # Without a smaller step the first full one has no optimizer state yet: it is repeated. A step of another kind in between may
        # change which segments are there, and with them the largest size.
        needed = exam.masks if exam.first else (*_STEPS_OF_ONE_KIND * exam.masks[:1], *exam.masks[1:], *exam.masks[:1])
        for padded in needed:
            self._full_step(trainee, padded=padded)
        if not exam.first:
            self._settle(trainee)
        for padded in _MORE_STEPS * exam.masks:
            if sum(self._computing) >= exam.soak_seconds:
                break
            self._full_step(trainee, padded=padded)
        if exam.first:
            self._settle(trainee)
        if exam.mixed:
            self._step(trainee, exam.mixed)
        if exam.evaluation is not None:
            notes.enter("evaluation")
            trainee.evaluate(trainee.make_batch(exam.evaluation))
        if exam.saves:
            notes.enter("saving")
            trainee.save()

    def _full_step(self, trainee: Trainee, *, padded: bool) -> None:
        """An optimizer step of the full size, timed."""
        computing, updating = self._step(trainee, self._full_shapes(padded=padded))
        self._computing.append(computing)
        self._updating.append(updating)
        self.notes.steps += 1

    def _full_shapes(self, *, padded: bool) -> list[Shape]:
        exam = self._exam
        full = replace(exam.longest, padded=padded)
        return [replace(exam.longest, sequences=exam.first or full.sequences), full] if exam.accumulates else [full]

    def _settle(self, trainee: Trainee) -> None:
        """Segments of earlier steps may be released once. Only retries that still occur when steps are repeated are thrashing."""
        retries = self._late_retries = self._meter.read()["retries"]
        for _round in range(_SETTLING_ROUNDS):
            if not self._late_retries:
                return
            for padded in self._exam.masks:
                self._step(trainee, self._full_shapes(padded=padded))
            before, retries = retries, self._meter.read()["retries"]
            self._late_retries = retries - before

    def time(self, trainee: Trainee, exam: Exam, repeats: int) -> Point | None:
        """Some steps of one shape, after one of a single sequence of its kind; None: out of memory."""
        shape, one = exam.longest, replace(exam.longest, sequences=1)
        try:
            self._step(trainee, [one])
            gc.collect()
            self._device.give_back()
            self._meter.forget()
            shapes = [one, shape] if exam.accumulates else [shape]
            times = [self._step(trainee, shapes) for _repeat in range(repeats)]
        except Exception as error:
            from brim.step.oom import failure_of, release

            if failure_of(error, self.notes.phase) is None or self.notes.phase == "optimizer":
                raise
            release(error, self._device)
            trainee.forget_gradients()
            return None
        seconds, update_seconds = (min(column) for column in zip(*times, strict=True))
        return Point(exam, self._meter.read()["resident_bytes"], seconds, update_seconds)

    def _step(self, trainee: Trainee, shapes: Any) -> tuple[float, float]:
        """One optimizer step; the seconds of its last micro-batch, and of its update."""
        began = 0.0
        for shape in shapes:
            self.notes.enter("forward")
            asked = time.perf_counter()
            batch = trainee.make_batch(shape)
            self._device.synchronize()
            began = time.perf_counter()
            self._waited = began - asked
            loss = trainee.forward(batch)
            self.notes.enter("backward")
            trainee.backward(loss)
            del loss, batch
        self._device.synchronize()
        done = time.perf_counter()
        self._gradient_bytes = self._gradient_bytes or trainee.gradient_bytes()
        self.notes.enter("optimizer")
        trainee.update()
        self._device.synchronize()
        return done - began, time.perf_counter() - done


@dataclass(frozen=True)
class Point:
    """One shape of a survey, and what it took."""

    exam: Exam
    peak_bytes: int
    seconds: float
    update_seconds: float


_SLOWER: Final = 1.05
"""Times the seconds per token of the fastest size so far: the curve has left its plateau."""


def survey(
    subject: Subject, exams: tuple[Exam, ...], passed: Exam, name: str, seconds_per_token: float, device: Device | None = None
) -> list[Point]:
    """Steps of one shape after the other, in one process: shapes that are smaller than the exam that was passed.

    Sizes of the full length come first, from large to small, until they get slower than the fastest. A shape that runs out of memory
    all the same (it accumulates, and what passed did not) is left out.
    """
    device = device or device_of(name)
    examiner = _Examiner(passed, Notes(None), device)
    trainee = subject.build(name)
    found: list[Point] = []
    best, is_falling, longest = seconds_per_token, False, passed.longest
    for exam in exams:
        shape = exam.longest
        is_on_curve = (shape.length, shape.padded) == (longest.length, longest.padded) and shape.sequences > 1
        if is_on_curve and is_falling:
            continue
        point = examiner.time(trainee, exam, repeats=2 if is_on_curve else 1)
        if point is None:
            continue
        found.append(point)
        each = point.seconds / (shape.sequences * shape.length)
        is_falling = is_falling or (is_on_curve and each > _SLOWER * best)
        best = min(best, each) if is_on_curve else best
    return found
