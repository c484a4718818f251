"""What a loader may cost and what it needs: how many workers hide it, how many the host allows, and the sentence for each.

Workers fill a queue of `workers x prefetch` batches and the step empties it. If both were regular, as many workers as a batch takes
steps would do; batches are not regular, so the wait is predicted as in a queue whose two sides are random (M/M/1/K): a cautious start,
from which measuring goes down.

Cores are counted by what a worker does with them. One that decodes keeps a core busy, and more of them than cores only take it from
each other and from the step. One that sleeps on a disk or a network leaves its core to others, so up to `WORKERS_PER_CORE` share one: as
many as their measured share of a core allows. torch warns at its construction of a loader with more workers than cores; it cannot know
what they do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from brim.locale import _
from brim.machine.loading import PINNED_FACTOR, PREFETCH, WORKER_BYTES, WORKERS_PER_CORE, reserve_bytes
from brim.sizes import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN: Final = 0.02
"""The share of its time that a step may wait for data before it is worth a worker: nobody sees 2 %."""

MORE_PREFETCH: Final = 4
VARIED: Final = 0.5
"""Standard deviation over mean of the batches' times, above which a longer queue is tried: regular ones never fill it."""

FORKED_BYTES: Final = 32 * MIB
"""What a forked worker takes at once (28 MiB measured): less than that free, and none is started, not even to be measured."""

Bound = Literal["cores", "memory", "shm", "asked", "shards", "failure"]
Weighed = Literal["proportional", "resident", "assumed"]
"""How a worker's memory is known: proportional set size (shared pages divided among those who share them), resident, or not at all."""


def predicted_wait(step_seconds: float, batch_seconds: float, workers: int, prefetch: int = PREFETCH) -> float:
    """The share of its time that the step waits, where one worker takes `batch_seconds` for a batch. M/M/1/K."""
    made_seconds = batch_seconds / workers
    ratio = step_seconds / made_seconds
    places = workers * prefetch + 1
    is_even = abs(ratio - 1) < 1e-9
    empty = 1 / places if is_even else (ratio - 1) / math.expm1(min(700.0, places * math.log(ratio)))
    wait_seconds = empty * made_seconds
    return wait_seconds / (wait_seconds + step_seconds)


def workers_needed(step_seconds: float, batch_seconds: float, most: int) -> int:
    """The fewest workers that are predicted to hide the loading; `most` where no number up to it does."""
    counts = range(1, most)
    return next((count for count in counts if predicted_wait(step_seconds, batch_seconds, count) < HIDDEN), most)


def variation(seconds: Sequence[float]) -> float:
    """Standard deviation over mean."""
    mean = sum(seconds) / len(seconds)
    return math.sqrt(sum((one - mean) ** 2 for one in seconds) / len(seconds)) / mean if mean else 0.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What there is for workers, and what one of them takes."""

    cores: float
    quota_cores: float | None
    free_bytes: int
    """Memory that is free before any worker starts, the reserve included."""
    shm_bytes: int | None
    """Free in /dev/shm; None where there is none."""
    batch_bytes: int = 0
    """Tensors of the largest batch that was seen."""
    worker_bytes: int = FORKED_BYTES
    weighed: Weighed = "assumed"
    busy_share: float = 0.0
    """Of one core, while a worker is never short of work."""
    pinned: bool = False
    asked: int | None = None
    shards: int | None = None
    """Workers that a stream can be divided among; None for numbered items."""
    failed_at: int | None = None
    """With so many workers the loader broke."""

    def by_cores(self) -> int:
        """Workers that the cores can carry, by what one was seen to use; one is always tried."""
        return max(1, int(self.cores / max(self.busy_share, 1 / WORKERS_PER_CORE)))

    def by_memory(self, prefetch: int = PREFETCH) -> int:
        """Workers with their batches in flight, and one batch in the hands of the step, beside the reserve."""
        each_batch = self.batch_bytes * (1 + PINNED_FACTOR * self.pinned)
        left = self.free_bytes - reserve_bytes(self.free_bytes) - each_batch
        return max(0, left // (self.worker_bytes + prefetch * each_batch))

    def by_shm(self, prefetch: int = PREFETCH) -> int | None:
        """Workers whose batches, and the one in use, fit in /dev/shm; None: no limit."""
        if self.shm_bytes is None or not self.batch_bytes:
            return None
        return max(0, (self.shm_bytes // self.batch_bytes - 1) // prefetch)

    def most(self, prefetch: int = PREFETCH) -> tuple[int, Bound]:
        """As many workers as may ever exist, and what says so."""
        counts: list[tuple[int | None, Bound]] = [
            (self.asked, "asked"),
            (self.shards, "shards"),
            (None if self.failed_at is None else self.failed_at - 1, "failure"),
            (self.by_memory(prefetch), "memory"),
            (self.by_shm(prefetch), "shm"),
            (self.by_cores(), "cores"),
        ]
        known = [(count, bound) for count, bound in counts if count is not None]
        return min(known, key=lambda one: one[0])

    def weigh(self, worker_bytes: int | None, weighed: Weighed, busy_share: float) -> Limits:
        """With what a worker was seen to take; where it could not be seen, a fresh process is assumed."""
        if worker_bytes is None:
            return replace(self, worker_bytes=WORKER_BYTES, weighed="assumed", busy_share=max(self.busy_share, busy_share))
        heaviest = worker_bytes if self.weighed == "assumed" else max(self.worker_bytes, worker_bytes)
        return replace(self, worker_bytes=heaviest, weighed=weighed, busy_share=max(self.busy_share, busy_share))

    def why(self, bound: Bound, count: int, failure: str = "") -> str:
        """What holds the number of workers at `count`."""
        values = {
            "count": count,
            "batch": format_bytes(self.batch_bytes),
            "free": format_bytes(self.free_bytes),
            "reserve": format_bytes(reserve_bytes(self.free_bytes)),
            "worker": format_bytes(self.worker_bytes),
            "shm": format_bytes(self.shm_bytes or 0),
            "cores": f"{self.cores:g}",
            "busy": percent(self.busy_share),
            "more": self.failed_at,
            "message": failure,
        }
        return self._sentence(bound).format(**values)

    def _sentence(self, bound: Bound) -> str:
        if bound == "memory":
            return {
                "proportional": _(
                    "Memory holds num_workers at {count}: {free} is free, {reserve} of it stays free, and one worker takes {worker} (its "
                    "proportional share of what it maps, measured), batches in flight not counted."
                ),
                "resident": _(
                    "Memory holds num_workers at {count}: {free} is free, {reserve} of it stays free, and one worker takes {worker} "
                    "(resident, measured), batches in flight not counted."
                ),
                "assumed": _(
                    "Memory holds num_workers at {count}: {free} is free, {reserve} of it stays free, and one worker is assumed to take "
                    "{worker}, batches in flight not counted."
                ),
            }[self.weighed]
        if bound == "cores":
            if self.quota_cores is not None and self.quota_cores <= self.cores:
                return _(
                    "The quota of {cores} cores holds num_workers at {count}: one keeps a core busy for {busy} of its time, and at "
                    "most two share a core."
                )
            return _(
                "The {cores} cores hold num_workers at {count}: one keeps a core busy for {busy} of its time, and at most two share a core."
            )
        return {
            "shm": _(
                "/dev/shm holds num_workers at {count}: {shm} is free there, and a batch takes {batch}; in a container, --shm-size "
                "gives more."
            ),
            "asked": _("most_workers holds num_workers at {count}."),
            "shards": _(
                "num_shards of the data set, which is a stream, holds num_workers at {count}: more workers would repeat its items "
                "or have none."
            ),
            "failure": _("A failure holds num_workers at {count}; with {more} it was: {message}"),
        }[bound]


def percent(share: float) -> str:
    """A share for a person: `1.3 %`."""
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def duration(seconds: float) -> str:
    """Seconds for a person, three digits of the unit that fits: `51.2 ms`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 999 * factor else f"{seconds / factor:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"
