"""The loader tuner: the fewest workers that keep the step from waiting for data, found by running them.

    settings = tune_loader(dataset, batch_size=16, step_seconds=0.21)
    DataLoader(dataset, batch_size=16, num_workers=settings.num_workers, ...)

Fixed rules (4 workers a GPU, half the cores) are wrong in both directions: token ids need no worker at all, and decoding may need more
than there are cores. So batches are made in this process first, with no worker. A step that waits less than 2 % of its time is left
alone. Else one worker is started and weighed; what it took decides how many may ever exist (cores, quota, memory, /dev/shm), and how
long it took says how many are needed. That number is run, then one fewer or more, until the smallest that hides the loading is known or
nothing more is allowed. A run takes about a second; a slow step or a slow batch makes it longer.

Reading items changes nothing of training but what the data set keeps about itself: order and random numbers are as before.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from brim.errors import UsageError
from brim.locale import _
from brim.machine.host import host as look_at_host
from brim.machine.loading import PREFETCH, WORKER_BYTES
from brim.prober.loader_rules import (
    FORKED_BYTES,
    HIDDEN,
    MORE_PREFETCH,
    VARIED,
    Limits,
    duration,
    percent,
    variation,
    workers_needed,
)
from brim.prober.loader_runs import Bench, Order, Run, WorkersFailed, is_stream, start_method
from brim.records.measurements import LoaderSettings
from brim.sizes import format_bytes, parse_size
from brim.step.randomness import Randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from brim.machine.records import Host

MOST_SECONDS: Final = 8.0
MOST_STEPS: Final = 30
"""After this long, or the time of so many steps where that is more, no further number of workers is tried."""
GAIN: Final = 0.02
"""What another worker must save of a step's time to be worth it where the loading cannot be hidden."""
_NEVER_PINNED: Final = ("cpu", "mps", "meta")


def tune_loader(
    dataset: Any,
    *,
    batch_size: int,
    step_seconds: float | None = None,
    step: Callable[[Any], object] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    device: str = "cpu",
    host_memory: int | str | None = None,
    most_workers: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    host: Host | None = None,
) -> LoaderSettings:
    """DataLoader settings for a data set and a step, measured here.

    Give either `step`, a call that trains on one batch and returns when that is done (synchronised), or `step_seconds`, what such a call
    is known to take; the step is then stood for by sleeping, as an accelerator computes while the CPU is free. `host_memory` is what is
    free for workers and a reserve, `most_workers` an upper limit of one's own, `say` is told a line for each run, and `host` stands for
    the host where it is not to be looked at.

    A stream (`IterableDataset`) is read from its start for each run, and gets no worker unless it says into how many shards it divides
    (`num_shards`): else every worker would give all of its items.
    """
    shards = _checked(dataset, batch_size, step_seconds, step, batch_sampler, most_workers)
    where = _device(device)
    order = None if is_stream(dataset) else Order(dataset, batch_size, seed, batch_sampler)
    pins = where.type not in _NEVER_PINNED
    bench = Bench(dataset, order, batch_size, collate_fn, step, step_seconds or 0.0, pins, seed)
    found = host or look_at_host()
    limits = Limits(
        cores=found.cores,
        quota_cores=found.quota_cores,
        free_bytes=found.available_bytes if host_memory is None else parse_size(host_memory),
        shm_bytes=found.shm_free_bytes,
        worker_bytes=FORKED_BYTES if start_method() == "fork" else WORKER_BYTES,
        pinned=pins,
        asked=most_workers,
        shards=shards,
    )
    with _untouched(where if step is not None else torch.device("cpu")):
        tuner = _Tuner(bench, limits, say or (lambda _line: None))
        settings = tuner.settings(tuner.chosen())
    if step is None and where.type == "cpu":
        note = _("The step was stood for by sleeping: on the CPU it takes cores from the workers, and that is not seen here.")
        settings = replace(settings, reasons=(*settings.reasons, note))
    return settings


class _Tuner:
    """The search: what was run, and what may still be."""

    def __init__(self, bench: Bench, limits: Limits, say: Callable[[str], None]) -> None:
        self.bench, self.limits, self.say = bench, limits, say
        self.runs: dict[int, Run] = {}
        """By number of workers, all with the usual prefetching."""
        self.failure = ""
        self.deeper: Run | None = None
        """With more prefetching, where that was tried."""
        self.hand_over_seconds = 0.0
        self._deadline = 0.0

    def chosen(self) -> Run:
        """Run what there is to run, and pick."""
        self.zero = self.bench.without_workers()
        self.runs[0] = self.zero
        self._tell(self.zero)
        self.limits = replace(self.limits, batch_bytes=self.bench.batch_bytes)
        if self.zero.is_hidden:
            return self.zero
        if not self._can_help():
            return self.zero
        self._deadline = time.monotonic() + max(MOST_SECONDS, MOST_STEPS * self.zero.seconds)
        workers = min(1, self.limits.most()[0])
        while workers:
            self._try(workers)
            workers = self._next()
        best = self._best()
        return self._deeper(best) if best.workers and self._varies else best

    def _can_help(self) -> bool:
        """Whether a worker may exist, and works, and hands a batch over sooner than it is made here."""
        if not self.limits.most()[0]:
            return False
        try:
            self.hand_over_seconds = self.bench.weigh_hand_over()
        except WorkersFailed as failed:
            self._fail(1, failed)
            return False
        return self.hand_over_seconds < self.zero.wait_seconds

    def _fail(self, workers: int, failed: WorkersFailed) -> None:
        self.failure = str(failed)
        self.limits = replace(self.limits, failed_at=workers)
        self.say(_("num_workers {count} fails: {message}").format(count=workers, message=self.failure))

    def _try(self, workers: int) -> None:
        try:
            run = self.bench.with_workers(workers, PREFETCH)
        except WorkersFailed as failed:
            self._fail(workers, failed)
            return
        self._tell(run)
        self.runs[workers] = run
        self.limits = self.limits.weigh(run.worker_bytes, run.weighed, run.busy_share)

    def _next(self) -> int:
        """The number of workers to run next; 0: enough is known."""
        short = max(count for count, run in self.runs.items() if not run.is_hidden)
        hidden = min((count for count, run in self.runs.items() if run.is_hidden), default=None)
        most = self.limits.most()[0]
        if time.monotonic() > self._deadline:
            return 0
        if hidden is not None:
            return hidden - 1 if short < hidden - 1 and self._could_hide(hidden - 1) else 0
        if short >= most or self._gained_nothing():
            return 0
        last = self.runs[short]
        return min(most, max(short + 1, workers_needed(last.step_seconds, last.seconds * short, most)))

    def _could_hide(self, workers: int) -> bool:
        """Whether so many would keep pace if every batch took the same time: fewer cannot."""
        one = self.runs[1]
        return one.seconds / workers * (1 - HIDDEN) <= (one.step_seconds + self.hand_over_seconds) * (1 + HIDDEN)

    def _gained_nothing(self) -> bool:
        """Whether the last workers that were added made it no faster: then a disk or something else is the limit, not their number."""
        *_fewer, before, last = [0, 0, *sorted(self.runs)]
        return before >= 1 and self.runs[last].seconds > self.runs[before].seconds * (1 - GAIN)

    def _best(self) -> Run:
        """The fewest workers that hide the loading; where none do, the fewest that are about as fast as the fastest."""
        allowed = self._allowed()
        hidden = [run for run in allowed if run.is_hidden and run.seconds < self.zero.seconds]
        fastest = min(run.seconds for run in allowed)
        good = hidden or [run for run in allowed if run.seconds <= fastest * (1 + GAIN)]
        return min(good, key=lambda run: run.workers)

    def _allowed(self) -> list[Run]:
        """What was run and may be: the one worker that was weighed may have been too heavy."""
        most = self.limits.most()[0]
        return [run for count, run in self.runs.items() if count <= most]

    @property
    def _varies(self) -> bool:
        return variation(self.zero.waits) > VARIED

    def _deeper(self, best: Run) -> Run:
        """Batches that take very different times fill a longer queue: it may hide what is not hidden, or spare a worker."""
        workers = best.workers - 1 if best.is_hidden else best.workers
        if not workers or self.limits.most(MORE_PREFETCH)[0] < workers:
            return best
        try:
            self.deeper = run = self.bench.with_workers(workers, MORE_PREFETCH)
        except WorkersFailed:
            return best
        self._tell(run)
        is_better = run.is_hidden if best.is_hidden else run.is_hidden or run.seconds < best.seconds * (1 - GAIN)
        return run if is_better else best

    def _tell(self, run: Run) -> None:
        text = _("num_workers {count}: a step takes {step} and waits {wait} more, {share} of its time.")
        self.say(
            text.format(
                count=run.workers,
                step=duration(run.step_seconds),
                wait=duration(run.wait_seconds),
                share=percent(run.wait_fraction),
            )
        )

    def settings(self, run: Run) -> LoaderSettings:
        """The record, with a reason for each number."""
        pins = bool(run.workers) and self.limits.pinned
        reasons = [self._why_workers(run), *self._why_no_more(run)]
        if run.workers:
            reasons += [*self._why_above_cores(run), self._why_prefetch(run), self._why_pinning(pins)]
        return LoaderSettings(
            num_workers=run.workers,
            prefetch_factor=run.prefetch,
            pin_memory=pins,
            wait_fraction=run.wait_fraction,
            reasons=(*reasons, self._headspace(run)),
        )

    def _why_workers(self, run: Run) -> str:
        values = {
            "count": run.workers,
            "batch": duration(self.zero.wait_seconds),
            "step": duration(run.step_seconds),
            "wait": percent(run.wait_fraction),
            "hidden": percent(HIDDEN),
            "hand_over": duration(self.hand_over_seconds),
        }
        if not run.workers:
            return self._why_none(values)
        fewer = self.runs[max(count for count in self.runs if count < run.workers)]
        values |= {"fewer": fewer.workers, "fewer_wait": percent(fewer.wait_fraction)}
        if run.is_hidden and run.wait_fraction >= HIDDEN:
            return _(
                "num_workers is {count}, the fewest that hide the loading: a batch takes {batch}, a step {step}; it waits {wait} of its "
                "time, {hand_over} each for taking over a batch, which more workers do not shorten, and {fewer_wait} with {fewer}."
            ).format(**values)
        if run.is_hidden:
            return _(
                "num_workers is {count}, the fewest that hide the loading: a batch takes {batch}, a step {step}; it waits {wait} of its "
                "time, and {fewer_wait} with {fewer}."
            ).format(**values)
        return _(
            "num_workers is {count}, which does not hide the loading: a batch takes {batch}, a step {step}; it waits {wait} of its time, "
            "and {fewer_wait} with {fewer}."
        ).format(**values)

    def _why_none(self, values: dict[str, Any]) -> str:
        if self.zero.is_hidden:
            return _(
                "num_workers is 0, because a batch takes {batch} and a step {step}: it waits {wait} of its time, less than {hidden}."
            ).format(**values)
        if self.hand_over_seconds >= self.zero.wait_seconds:
            return _(
                "num_workers is 0, because taking a batch from a worker takes {hand_over} and making it here {batch}; a step takes {step} "
                "and waits {wait} of its time."
            ).format(**values)
        tried = [run for run in self._allowed() if run.workers]
        if tried:
            best = min(tried, key=lambda run: run.seconds)
            values |= {"with_": duration(best.seconds), "without": duration(self.zero.seconds), "tried": best.workers}
            return _(
                "num_workers is 0, because workers do not make it faster: a step with its wait takes {without} without them, and {with_} "
                "with {tried}."
            ).format(**values)
        return _(
            "num_workers is 0, though a batch takes {batch} and a step {step}, so that it waits {wait} of its time: no worker can be had."
        ).format(**values)

    def _why_no_more(self, run: Run) -> list[str]:
        """What holds the number where it is, unless the loading is hidden."""
        most, bound = self.limits.most()
        if run.is_hidden:
            return [self.limits.why("failure", most, self.failure)] if bound == "failure" else []
        if len(self.runs) == 1 and most:  # none was run, because none could help
            return []
        if max(self.runs) >= most or bound == "failure":
            return [self.limits.why(bound, most, self.failure)]
        if self._gained_nothing():
            return [_("More workers made it no faster: something that they share, such as the disk, is the limit.")]
        return [_("The search ended after {seconds}; more workers may help.").format(seconds=duration(MOST_SECONDS))]

    def _why_above_cores(self, run: Run) -> list[str]:
        if run.workers <= self.limits.cores:
            return []
        text = _("torch warns of more workers than cores; these compute for {busy} of their time and wait for the rest.")
        return [text.format(busy=percent(run.busy_share))]

    def _why_prefetch(self, run: Run) -> str:
        values = {
            "prefetch": run.prefetch,
            "varied": percent(variation(self.zero.waits)),
            "shared": format_bytes((run.prefetch or 0) * run.workers * self.limits.batch_bytes),
        }
        if self.deeper is None:
            return _(
                "prefetch_factor is {prefetch}, because the times of batches differ by {varied} (standard deviation), and a longer queue "
                "helps where they differ more; the batches in flight take {shared}."
            ).format(**values)
        values |= {"wait": percent(self.deeper.wait_fraction), "count": self.deeper.workers, "more": MORE_PREFETCH}
        if run is self.deeper:
            return _(
                "prefetch_factor is {prefetch}, because the times of batches differ by {varied} (standard deviation) and the longer queue "
                "leaves a wait of {wait} with {count} workers; the batches in flight take {shared}."
            ).format(**values)
        return _(
            "prefetch_factor is {prefetch}: the times of batches differ by {varied} (standard deviation), but {more} left a wait of {wait} "
            "with {count} workers; the batches in flight take {shared}."
        ).format(**values)

    def _why_pinning(self, pins: bool) -> str:
        if pins:
            return _(
                "pin_memory is on, because a thread then makes the pinned copies and the device fetches them beside the computation."
            )
        return _("pin_memory is off, because the device does not fetch batches from pinned memory.")

    def _headspace(self, run: Run) -> str:
        text = _("With no loading at all a step would take {best}; now it takes {now}.")
        return text.format(best=duration(self.bench.replay()), now=duration(run.seconds))


def _checked(
    dataset: Any, batch_size: int, step_seconds: float | None, step: object, batch_sampler: object, most_workers: int | None
) -> int | None:
    """Refuse what cannot be meant. Returns among how many workers a stream divides; None for numbered items."""
    if (step is None) == (step_seconds is None):
        raise UsageError(
            _("Give either step or step_seconds to tune a loader for."),
            hint=_("step=train_on_one_batch is run and timed; step_seconds=0.2 is stood for by sleeping."),
        )
    if step_seconds is not None and not (math.isfinite(step_seconds) and step_seconds > 0):
        raise UsageError(_("step_seconds is {value!r}, and must be more than zero.").format(value=step_seconds))
    if batch_size < 1:
        raise UsageError(_("batch_size is {value!r}, and must be at least 1.").format(value=batch_size))
    if most_workers is not None and most_workers < 0:
        raise UsageError(_("most_workers is {value!r}, and must not be below zero.").format(value=most_workers))
    if is_stream(dataset):
        if batch_sampler is not None:
            raise UsageError(_("A data set that can only be iterated takes no batch_sampler."))
        shards = getattr(dataset, "num_shards", None)
        return shards if isinstance(shards, int) else 0
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            _("The data set has no length or no numbered items, and is no IterableDataset."),
            hint=_("Give it __len__ and __getitem__, or make it a torch.utils.data.IterableDataset."),
        )
    if not len(dataset):
        raise UsageError(_("The data set is empty."))
    return None


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            _("{name!r} is no device that torch knows.").format(name=name), hint=_("Write cpu, cuda or cuda:0.")
        ) from error


@contextmanager
def _untouched(device: torch.device) -> Iterator[None]:
    """The random numbers of this process as they were, whatever the items and the step draw."""
    before = Randomness.of(device)
    try:
        yield
    finally:
        before.restore(device)
