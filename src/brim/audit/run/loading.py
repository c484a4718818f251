"""Whether a run waits for its data, and which knob would end that.

That it waits is told by the step: seconds of waiting against seconds of computing. Why, by the machine's pulse: workers that are busy all
the time are too few; workers that a disk blocks need a faster disk; without workers the training process loads between steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from brim.audit.run.reading import FEWEST_STEPS, median_of
from brim.locale import _, sentences
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.run.reading import Columns, Run
    from brim.records.findings import Confidence

WAITS: Final = 0.1
"""Share of a step's time. Below it, the cure costs more attention than it saves."""
_BUSY_DEVICE: Final = 0.9
_BUSY_WORKER: Final = 0.8
_IDLE_WORKER: Final = 0.6
_BLOCKED: Final = 0.25
_AT_EPOCHS: Final = 0.7
_MOST_TIMES: Final = 8
_NEARLY: Final = 0.1
"""A tenth of a worker is no worker."""


def wait_share(columns: Columns) -> float | None:
    """Waiting for data, as a share of all time in steps; None where no time passed."""
    total = float(columns.seconds.sum())
    return float(columns.wait_seconds.sum()) / total if total > 0 else None


def device_is_busy(run: Run) -> bool:
    """Whether the device computed nearly all the time: then a wait is only where its queue is felt."""
    busy = median_of(run.settled_pulses, "device_utilisation")
    return busy is not None and busy >= _BUSY_DEVICE


def check(run: Run) -> Iterator[Found]:
    """At most one finding: the disk, or the loader."""
    share = wait_share(run.settled)
    if len(run.now) < FEWEST_STEPS or share is None or share < WAITS or device_is_busy(run):
        return
    begin = _("Steps wait for data in {share:.0%} of their time.").format(share=share)
    disk = _disk(run)
    rule, why = ("run-disk-bound", disk) if disk else ("run-data-bound", _knob(run))
    confidence: Confidence = "high" if run.settled_pulses else "medium"
    yield run.found(rule, sentences(begin, why), place=run.start, until=-1, confidence=confidence)


def _disk(run: Run) -> str | None:
    """What the disk does, if it is what is waited for."""
    known = [pulse for pulse in run.settled_pulses if pulse.blocked_seconds is not None]
    passed = sum(pulse.seconds for pulse in known)
    blocked = sum(pulse.blocked_seconds or 0.0 for pulse in known)
    read = sum(pulse.read_bytes or 0 for pulse in known)
    if not known or blocked < _BLOCKED * passed or not read:
        return None
    busy = median_of(known, "worker_cpu" if median_of(known, "workers") else "main_cpu")
    if busy is not None and busy > _IDLE_WORKER:
        return None
    text = _(
        "The disk is what is waited for: processes were blocked by it for {blocked:.0f} of {passed:.0f} seconds, and it gave "
        "{rate} a second. Copy the data to a local disk or into memory, or store it in fewer, larger, compressed files."
    )
    return text.format(blocked=blocked, passed=passed, rate=format_bytes(int(read / passed)))


def _knob(run: Run) -> str:
    columns = run.settled
    if _waits_at_epochs(columns):
        return _(
            "Nearly all of it falls on the first step of each epoch, when the loader starts anew: set persistent_workers=True."
        )
    workers = median_of(run.settled_pulses, "workers")
    if workers is None:
        return _("Give the loader more workers, or prepare (tokenize) the data beforehand.")
    times = float(columns.seconds.sum()) / max(float(columns.compute_seconds.sum()), 1e-9)
    if not workers:
        return _without_workers(max(2, min(math.ceil(times - _NEARLY), _MOST_TIMES)), _cores(run))
    return _with_workers(run, int(workers), times)


def _cores(run: Run) -> int | None:
    """Processor cores for each rank, where the header tells how many the run had."""
    header = run.headers[-1] if run.headers else None
    cores = None if header is None else header.configuration.get("cores")
    return None if header is None or not isinstance(cores, int) or cores < 1 else max(1, cores // header.world_size)


def _without_workers(wanted: int, cores: int | None) -> str:
    if cores is None:
        text = _(
            "The training process loads by itself, between steps: give the loader num_workers={wanted}, if there are cores for them."
        )
        return text.format(wanted=wanted)
    text = _("The training process loads by itself, between steps: give the loader num_workers={wanted}.")
    return sentences(text.format(wanted=min(wanted, cores)), _no_more(cores) if wanted > cores else "")


def _no_more(cores: int) -> str:
    text = _("More workers would share the same cores (for each rank: {cores}): prepare (tokenize) the data beforehand.")
    return text.format(cores=cores)


def _too_few(workers: int, busy: float, wanted: int, cores: int | None) -> str:
    if cores is not None and workers >= cores:
        text = _("The loader's workers ({workers}) are busy {busy:.0%} of the time.")
        return sentences(text.format(workers=workers, busy=busy), _no_more(cores))
    text = _(
        "The loader's workers ({workers}) are busy {busy:.0%} of the time, so they are too few: about {wanted} would keep "
        "up, if there are cores for them. Or prepare (tokenize) the data beforehand."
    )
    if cores is not None:
        text = _(
            "The loader's workers ({workers}) are busy {busy:.0%} of the time, so they are too few: try {wanted}. "
            "Or prepare (tokenize) the data beforehand."
        )
        wanted = min(wanted, cores)
    return text.format(workers=workers, busy=busy, wanted=wanted)


def _with_workers(run: Run, workers: int, times: float) -> str:
    busy, main = median_of(run.settled_pulses, "worker_cpu"), median_of(run.settled_pulses, "main_cpu")
    cores = _cores(run)
    if busy is not None and busy >= _BUSY_WORKER:
        return _too_few(workers, min(busy, 1.0), math.ceil(workers * min(times, _MOST_TIMES) - _NEARLY), cores)
    if busy is not None and busy <= _IDLE_WORKER and main is not None and main >= _BUSY_WORKER:
        text = _(
            "The loader's workers ({workers}) are idle (busy {busy:.0%}) and the training process is not ({main:.0%}): it does "
            "their work. Move tokenizing and collating out of the loop, into the data set or the collate_fn."
        )
        return text.format(workers=workers, busy=busy, main=main)
    if busy is not None and busy <= _IDLE_WORKER:
        text = _(
            "The loader's workers ({workers}) are idle (busy {busy:.0%}) and no disk of this machine blocks them: look at "
            "storage over the network, at locks in the data set, and at a larger prefetch_factor."
        )
        return text.format(workers=workers, busy=busy)
    if cores is not None and workers >= cores:
        return sentences(_("Workers of the loader: {workers}.").format(workers=workers), _no_more(cores))
    return _("The loader has {workers} workers: try twice as many.").format(workers=workers)


def _waits_at_epochs(columns: Columns) -> bool:
    """Whether the first steps of epochs hold most of the waiting."""
    # The last step of an epoch has a whole number of epochs behind it, so its own epoch is the one before.
    epochs = np.ceil(columns.epoch - 1e-6)
    first = np.concatenate([[False], np.diff(epochs) > 0])
    total = float(columns.wait_seconds.sum())
    return 0 < int(first.sum()) <= len(columns) // 4 and float(columns.wait_seconds[first].sum()) >= _AT_EPOCHS * total
