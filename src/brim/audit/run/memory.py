"""How a run lives with its memory: room that it leaves, and the three signs of having too little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from brim.audit.run.reading import FEWEST_STEPS
from brim.locale import _, sentences
from brim.sizes import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.run.reading import Run

ROOMY: Final = 0.7
"""A peak below this share of the memory leaves room for larger micro-batches."""
_FULL: Final = 0.9
"""How far a forecast goes: some room is left for what a run has not met yet."""
_MOST_TIMES: Final = 16.0
_OFTEN: Final = 0.1
_SPLITS_OFTEN: Final = 0.05
_FEWEST_SPLITS: Final = 5
_MUCH_SWAP: Final = 256 * MIB
_LEAST_SPREAD: Final = 0.15


def peak_bytes(run: Run) -> int | None:
    """The largest that a step has held since the run moved here."""
    known = run.now.peak_bytes[~np.isnan(run.now.peak_bytes)]
    return int(known.max()) if len(known) else None


def check(run: Run) -> Iterator[Found]:
    """Room, retries, swap, splits."""
    if len(run.now) < FEWEST_STEPS:
        return
    yield from _headroom(run)
    yield from _retries(run)
    yield from _swap(run)
    yield from _splits(run)


def _headroom(run: Run) -> Iterator[Found]:
    header, peak = run.headers[-1] if run.headers else None, peak_bytes(run)
    if header is None or not header.memory_limit_bytes or peak is None or header.device.startswith("cpu"):
        return  # on a processor, larger micro-batches gain nothing that they would not have already
    limit, micro = header.memory_limit_bytes, float(np.nanmedian(run.now.micro_batches)) if _knows_slices(run) else 1.0
    # A step that is one micro-batch has nothing that could be larger at the same effective batch.
    if peak >= ROOMY * limit or micro < 2 or run.now.splits.any():
        return
    text = _(
        "At its peak the run held {peak} of {limit} ({share:.0%}), and a step takes {micro:.0f} micro-batches on each device. "
        "They could be about {times:.1f} times as large at the same effective batch."
    )
    message = text.format(
        peak=format_bytes(peak),
        limit=format_bytes(limit),
        share=peak / limit,
        micro=micro,
        times=min(_room(run, peak, limit), micro),
    )
    place = run.start + int(np.nanargmax(run.now.peak_bytes))
    yield run.found("run-headroom", message, place=place, confidence="medium")


def _knows_slices(run: Run) -> bool:
    return not bool(np.isnan(run.now.micro_batches).all())


def _room(run: Run, peak: int, limit: int) -> float:
    """How many times larger a micro-batch could be: by the line through what was seen, or as if nothing were fixed (which is less)."""
    size, held = run.now.largest_micro, run.now.peak_bytes
    known = ~(np.isnan(size) | np.isnan(held))
    plain = _FULL * limit / peak
    if known.sum() < FEWEST_STEPS or np.ptp(size[known]) < _LEAST_SPREAD * size[known].max():
        return plain
    slope, fixed = np.polyfit(size[known], held[known], 1)
    if slope <= 0 or fixed < 0:
        return plain
    return float(min(max((_FULL * limit - fixed) / (slope * size[known].max()), plain), _MOST_TIMES))


def _retries(run: Run) -> Iterator[Found]:
    known = [pulse.retries for pulse in run.settled_pulses if pulse.retries is not None]
    total = sum(known)
    if len(known) < _FEWEST_SPLITS or total < _FEWEST_SPLITS or np.mean(np.array(known) > 0) < _OFTEN:
        return
    text = _(
        "The allocator gave its cache back {count} times in {seconds:.0f} seconds, because memory was full: each time the "
        "device stops. Make micro-batches a tenth smaller, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )
    seconds = sum(pulse.seconds for pulse in run.settled_pulses if pulse.retries is not None)
    yield run.found("run-thrashing", text.format(count=total, seconds=seconds), place=run.start, until=-1)


def _swap(run: Run) -> Iterator[Found]:
    known = [pulse.swapped_bytes for pulse in run.settled_pulses if pulse.swapped_bytes is not None]
    total = sum(known)
    if len(known) < _FEWEST_SPLITS or total < _MUCH_SWAP or np.mean(np.array(known) > 0) < _OFTEN:
        return
    text = _(
        "The host wrote {size} to swap while the run was going on, and part of the run lies there: it waits for the disk to "
        "get its own memory back. Use fewer loader workers, or keep the data in memory-mapped (Arrow) files."
    )
    yield run.found("run-thrashing", text.format(size=format_bytes(total)), place=run.start, until=-1)


def _splits(run: Run) -> Iterator[Found]:
    splits = run.settled.splits
    steps = int((splits > 0).sum())
    if steps < _FEWEST_SPLITS or steps < _SPLITS_OFTEN * len(splits):
        return
    begin = _("{steps} of {all} steps ran out of memory and were split: nothing is lost but time.").format(
        steps=steps, all=len(splits)
    )
    held = run.settled.limit[splits == 0]
    held = held[~np.isnan(held)]
    header = run.headers[-1] if run.headers else None
    cure = _("Give a smaller budget.")
    if len(held) and header is not None and header.budget is not None:
        text = _("A budget of {limit:.4g} {unit} held in half of the others; it was given as {given:.4g}.")
        cure = text.format(limit=float(np.median(held)), unit=header.budget.unit, given=header.budget.limit)
    place = run.start + len(run.now) - len(splits) + int(np.argmax(splits > 0))
    yield run.found("run-splits", sentences(begin, cure), place=place, until=-1)
