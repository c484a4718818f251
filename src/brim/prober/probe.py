"""`brim.probe`: what this machine really does with a model, found in a handful of runs.

The way: predict where the limit is (while the trials' server imports), try that size, draw a line, try again or stop; then run smaller
shapes for the curve of the throughput and for the slicer's cost model; then look at the loader. What was run is told trial by trial, and an
interruption leaves what there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from brim.errors import BrimError, OutOfMemoryError, RunError
from brim.locale import _, sentences
from brim.machine import nvml
from brim.machine.budget import ForkServer
from brim.prober import results
from brim.prober.prediction import Prediction
from brim.prober.request import TRIAL_SECONDS, ProbeRequest, read_request
from brim.prober.search import Aim, affine, bracket, next_size
from brim.records import LoaderSettings, Measurement, Objective, Proven, ShapePoint, Trial, Versus
from brim.sizes import format_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import nn

    from brim.prober.runner import Runner
    from brim.workload.reading import Given
    from brim.workload.resolve import Model

MOST_TRIALS: Final = 12
_SURELY_TOO_MUCH: Final = 1.3
"""Times what may be taken: a prediction so far above it is not put to the test."""


def probe(
    model: str | os.PathLike[str] | Model | nn.Module,
    *,
    data: Given | None = None,
    tokenizer: str | None = None,
    columns: Mapping[str, str] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    memory: int | str | None = None,
    gpu_index: int | None = None,
    effective_batch: int | None = None,
    objective: Objective = "fastest",
    margin: str | float | None = None,
    max_trials: int | None = None,
    time_limit: float | None = None,
    step: Callable[[nn.Module, int, int], Any] | None = None,
    trust_remote_code: bool = False,
    cache: bool = True,
    output: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> Measurement:
    """Find the largest micro-batch that trains here, and the fastest, by running them.

    `settings` are those of `brim.estimate`; only the batch is varied. With `data`, the lengths are the data's own. `memory` is a hard
    limit: on the CPU for what the step takes beyond the process. A module of one's own needs `step(model, micro_batch, seq_len)`, which
    computes the loss of one micro-batch, or is called as transformers' models are. The result is a record that can be written and read;
    `output` names a file for it, which an interruption leaves behind too. `say` gets one line a trial.
    """
    request = read_request(
        model, data=data, tokenizer=tokenizer, columns=columns, device=device, memory=memory, gpu_index=gpu_index,
        effective_batch=effective_batch,
        objective=objective, margin=margin, max_trials=max_trials, time_limit=time_limit, step=step,
        trust_remote_code=trust_remote_code, cache=cache, settings=settings,
    )  # fmt: skip
    prober = Prober(request, say=say)
    try:
        found = prober.run()
    except KeyboardInterrupt:
        if output is not None and prober.trials:
            prober.measurement(complete=False).write(Path(output))
        raise
    if output is not None:
        found.write(Path(output))
    return found


@dataclass
class Prober:
    """One probe under way: what it has found is there at any moment."""

    request: ProbeRequest
    say: Callable[[str], None] | None = None
    watch: Callable[[int, str | None, float], None] | None = None
    is_fresh: bool = False
    """Measure, even if the same was measured before."""
    was_known: bool = False
    trials: list[Trial] = field(default_factory=list)
    points: list[ShapePoint] = field(default_factory=list)
    loader: LoaderSettings | None = None
    warnings: list[str] = field(default_factory=list)
    prediction: Prediction | None = None
    gradient_bytes: int | None = None
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> Measurement:
        """From the cache, or by running."""
        request = self.request
        known = results.find(request) if request.cache and not self.is_fresh else None
        if known is not None:
            self.was_known = True
            return known
        from brim.prober.runner import Runner

        is_here, device = request.must_run_here(), request.device
        alone = nvml.alone(int(device.partition(":")[2] or 0)) if device.startswith("cuda") and not is_here else {}
        # Some libraries compute on the first visible GPU, whatever the device of their tensors.
        server: dict[str, Any] = {"server": ForkServer(environment=alone)} if alone else {}
        with Runner(
            subject=request.subject(),
            device="cuda:0" if alone else device,
            promise=request.promise,
            memory_bytes=request.budget_bytes if request.is_cpu else None,
            preload=request.modules(),
            watch=self.watch,
            is_here=is_here,
            loaded_bytes=request.loaded_bytes(),
            **server,
        ) as runner:
            self._check_weights(runner.loaded_bytes)
            runner.warm()
            self._predict()
            ended = self._search(runner)
            self._check_anything_ran(ended)
            if ended and request.wants_more:
                ended = self._curve(runner)
        if ended and request.wants_more and request.lengths is not None:
            self._tune_loader()
        if self.prediction is not None:
            self.prediction.keep()
        made = self.measurement(complete=ended)
        if request.cache and ended:
            results.keep(request, made)
        return made

    def _check_weights(self, loaded_bytes: int) -> None:
        if loaded_bytes >= self.request.budget_bytes:
            raise OutOfMemoryError(
                _("{model} takes {weights} by itself, and {budget} may be taken.").format(
                    model=self.request.name, weights=format_bytes(loaded_bytes), budget=format_bytes(self.request.budget_bytes)
                ),
                hint=_("Give a larger --memory."),
            )

    def _predict(self) -> None:
        """Where to look. A module of somebody's own is not traced: nothing of its code shall run in this process."""
        request = self.request
        if request.question.config is None:
            return
        self._tell(_("Predicting where the limit is ..."))
        found = Prediction.of(request.question, request.accumulates)
        if not isinstance(found, Prediction):
            self._tell(_("There is no prediction, so the search begins small. {why}").format(why=found))
            return
        self.prediction = found
        needed, budget = found.bytes_of(1), request.budget_bytes
        if needed > _SURELY_TOO_MUCH * budget:
            text = _("{model} needs about {needed} for one sequence of {length} tokens, as predicted; {budget} may be taken.")
            message = text.format(
                model=request.name, needed=format_bytes(needed), length=request.longest.length, budget=format_bytes(budget)
            )
            raise OutOfMemoryError(
                sentences(message, request.others()),
                hint=_("`brim plan` says what would fit: shorter sequences, checkpointing, LoRA, another optimizer."),
            )

    def _search(self, runner: Runner) -> bool:
        """Whether it came to its own end."""
        aim = self.request.aim(self.prediction)
        most = self.request.max_trials or MOST_TRIALS
        while (size := self._next(aim) or self._whole_batch()) is not None:
            if len(self.trials) >= most or self._is_late():
                return False
            runner.trial_seconds = min(TRIAL_SECONDS, self._left_seconds())
            trial = runner.run(self.request.exam(size, self.prediction))
            self.gradient_bytes = runner.gradient_bytes
            if not runner.is_exact:
                # What a process with a past takes cannot be held against a limit: only failures tell.
                aim = replace(aim, limit_bytes=None)
            self.trials.append(trial)
            self._tell(line_of(trial, len(self.trials), self.request.budget_bytes))
        # The last one may have hung, or time may only have ended: that is for the reader of the record to judge.
        return not (self._is_late() and any(trial.verdict == "timeout" for trial in self.trials[-1:]))

    def _whole_batch(self) -> int | None:
        """The effective batch in one piece has no gradients of others beside it: it may run where smaller pieces do not."""
        whole = self.request.effective_batch
        if whole is None or whole > self.request.most or any(trial.micro_batch == whole for trial in self.trials):
            return None
        fits = self.prediction is not None and self.prediction.bytes_of(whole) <= self.request.budget_bytes
        return whole if fits else None

    def _next(self, aim: Aim) -> int | None:
        """A size; after a crash the smallest, because what fails at one sequence too has nothing to do with memory."""
        crashed = any(trial.verdict == "crash" for trial in self.trials)
        if crashed and not any(trial.verdict == "ok" for trial in self.trials):
            return None if any(trial.micro_batch == 1 for trial in self.trials) else 1
        return next_size(aim, self.trials)

    def _check_anything_ran(self, ended: bool) -> None:
        """Nothing ran: an error that says what happened, unless time or trials ran out first."""
        if not self.trials:
            text = _("The time ended before the first trial: preparing took {seconds:.0f} s.")
            raise RunError(text.format(seconds=time.monotonic() - self._began), hint=_("Give a longer --time-limit."))
        if not ended or any(trial.verdict == "ok" for trial in self.trials):
            return
        last = min(self.trials, key=lambda trial: trial.micro_batch)
        if last.verdict == "out-of-memory":
            text = _(
                "{model} does not train here with even one sequence of {length} tokens: out of memory in {phase} ({message})."
            )
            message = text.format(
                model=self.request.name, length=last.max_length, phase=last.phase or "?", message=last.message.rstrip(".")
            )
            raise OutOfMemoryError(
                sentences(message, self.request.others()),
                hint=_("`brim plan` says what would fit: shorter sequences, checkpointing, LoRA, another optimizer."),
            )
        raise RunError(
            _("{model} cannot be trained here ({verdict}): {message}").format(
                model=self.request.name, verdict=last.verdict, message=last.message
            )
        )

    def _curve(self, runner: Runner) -> bool:
        """Smaller shapes: the throughput at smaller sizes, and what other lengths take."""
        largest = max((trial for trial in self.trials if trial.verdict == "ok"), key=lambda trial: trial.micro_batch)
        exams = self.request.smaller_exams(largest.micro_batch)
        if not exams or self._is_late():
            return not exams
        if runner.is_here:
            self.warnings.append(_("Smaller shapes are not timed, because this model can only be run in this process."))
            return True
        self._tell(_("Timing {count} smaller shapes ...").format(count=len(exams)))
        runner.trial_seconds = min(TRIAL_SECONDS, self._left_seconds())
        self.points, trouble = runner.survey(exams, self.request.exam(largest.micro_batch, self.prediction), largest)
        if trouble:
            self.warnings.append(_("The smaller shapes could not be timed: {why}").format(why=trouble))
        return True

    def _tune_loader(self) -> None:
        from brim.prober.loader import tune_loader

        proven = self.fastest()
        trial = self._trial_of(proven.micro_batch) if proven is not None else None
        seconds = trial.micro_batch_seconds if trial is not None else self._point_seconds(proven)
        if proven is None or not seconds:
            return
        self._tell(_("Measuring the loader ..."))
        dataset = self.request.rows()
        try:
            self.loader = tune_loader(
                dataset,
                batch_size=proven.micro_batch,
                step_seconds=seconds,
                collate_fn=dataset.collate,
                device=self.request.device,
            )
        except BrimError as error:
            self.warnings.append(_("The loader could not be measured: {why}").format(why=error.message))

    def _point_seconds(self, proven: Proven | None) -> float | None:
        found = [point.seconds for point in self._full_length_points() if proven and point.sequences == proven.micro_batch]
        return min(found, default=None)

    def _trial_of(self, size: int) -> Trial | None:
        return next((trial for trial in self.trials if trial.micro_batch == size and trial.verdict == "ok"), None)

    def _full_length_points(self) -> list[ShapePoint]:
        longest = self.request.longest
        return [point for point in self.points if (point.length, point.padded) == (longest.length, longest.padded)]

    def largest(self) -> Proven | None:
        """The largest size that ran."""
        low, _high = bracket(self.trials, self.request.most)
        trial = self._trial_of(low) if low else None
        return _proven(trial) if trial is not None else None

    def fastest(self) -> Proven | None:
        """The size with the most useful tokens in a second."""
        ran = [_proven(trial) for trial in self.trials if trial.verdict == "ok"]
        ran += [
            Proven(micro_batch=point.sequences, tokens_per_second=point.tokens_per_second, peak_bytes=point.peak_bytes)
            for point in self._full_length_points()
            if point.tokens_per_second is not None
        ]
        return max(ran, key=lambda proven: proven.tokens_per_second, default=None)

    def measurement(self, *, complete: bool) -> Measurement:
        """Everything that is known by now."""
        request, largest = self.request, self.largest()
        predicted = versus = None
        if self.prediction is not None and largest is not None:
            predicted = self.prediction.whole(largest.micro_batch)
            predicted_bytes = self.prediction.bytes_within(largest.micro_batch, request.budget_bytes)
            versus = Versus(
                micro_batch=largest.micro_batch,
                predicted_bytes=predicted_bytes,
                measured_bytes=largest.peak_bytes,
                error=predicted_bytes / largest.peak_bytes - 1 if largest.peak_bytes else 0.0,
                predicted_largest=self.prediction.largest(request.budget_bytes, request.most),
            )
        return results.record(
            request,
            gradient_bytes=self.gradient_bytes,
            trials=tuple(self.trials),
            points=tuple(self.points),
            largest=largest,
            fastest=self.fastest(),
            fit=affine(self.trials),
            predicted=predicted,
            versus=versus,
            loader=self.loader,
            complete=complete,
            warnings=tuple(self.warnings),
            elapsed_seconds=round(time.monotonic() - self._began, 3),
        )

    def _left_seconds(self) -> float:
        limit = self.request.time_limit
        return TRIAL_SECONDS if limit is None else max(1.0, limit - (time.monotonic() - self._began))

    def _is_late(self) -> bool:
        limit = self.request.time_limit
        return limit is not None and time.monotonic() - self._began >= limit

    def _tell(self, text: str) -> None:
        if self.say is not None:
            self.say(text)


def _proven(trial: Trial) -> Proven:
    return Proven(
        micro_batch=trial.micro_batch,
        tokens_per_second=trial.tokens_per_second or 0.0,
        peak_bytes=trial.peak_device_bytes or 0,
    )


def line_of(trial: Trial, number: int, budget_bytes: int) -> str:
    """One trial in one line."""
    opening = _("Trial {number}: {size} x {length}").format(number=number, size=trial.micro_batch, length=trial.max_length)
    if trial.verdict == "ok":
        return _("{opening}: ok, {peak} of {budget}, {speed:,.0f} tokens/s ({seconds:.1f} s)").format(
            opening=opening,
            peak=format_bytes(trial.peak_device_bytes or 0),
            budget=format_bytes(budget_bytes),
            speed=trial.tokens_per_second or 0.0,
            seconds=trial.elapsed_seconds,
        )
    where = _("in {phase}").format(phase=trial.phase) if trial.phase is not None else ""
    return _("{opening}: {verdict} ({seconds:.1f} s). {message}").format(
        opening=opening,
        verdict=f"{trial.verdict} {where}".strip(),
        seconds=trial.elapsed_seconds,
        message=trial.message,
    )
