"""Torch's own memory history beside the predicted requests: which allocation is the first that differs.

Both sides are streams of requests and returns. They are walked together; where they differ, the shortest way to go on together is looked
for, and what was skipped on either side is a difference. Sizes are compared as the allocator rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.estimate import Question

_ROUND = 512
_AGREE = 6
"""Events that must be alike for the two streams to count as together again."""
_WINDOW = 400
_NEIGHBOURS = 4
_MOST = 400


@dataclass(frozen=True)
class Event:
    """A request, or the return of one."""

    sign: str
    size: int
    """Bytes, as the allocator rounds them."""
    phase: str
    """`forward 1 0`: the phase, the step, the micro-batch."""
    note: str
    """Predicted: operator, kind and layer. Real: the frames."""
    frames: tuple[str, ...] = field(default=(), repr=False)

    @property
    def key(self) -> tuple[str, int]:
        return self.sign, self.size


def predicted_events(question: Question) -> list[Event]:
    """What brim says that the allocator is asked for."""
    trace = question.walk(question.obtain()).trace
    micro_batches = (max(place.round for place in trace.places) + 1) // 2
    events = []
    step, before = -1, "build"
    for event, number in zip(trace.events, trace.event_places, strict=True):
        place = trace.places[number]
        birth = trace.births[max(event, ~event)]
        step += place.phase == "forward" and before not in {"forward", "backward"}  # the stream holds the second step twice
        before = place.phase
        phase = f"{place.phase} {step} {place.round % micro_batches}" if place.phase != "build" else "build"
        note = f"{birth.operator} ({birth.kind}, layer {place.layer})"
        events.append(Event("+" if event >= 0 else "-", rounded(birth.size), phase, note))
    return events


def real_events(history: list[list[Any]]) -> list[Event]:
    """What torch recorded of the steps, and of making the model ready for them."""
    events = []
    sizes: dict[int, int] = {}
    phase = "build"
    for sign, address, size, named, frames in history:
        phase = named or phase  # the thread of backward has no name for it
        if sign == "s":
            continue
        if sign == "+":
            sizes[address] = rounded(size)
        place = phase if phase.count(" ") == 2 or phase == "build" else f"{phase} 0"
        events.append(Event(sign, sizes.get(address, rounded(size)), place, first_own(frames), tuple(frames)))
    return events


def rounded(size: int) -> int:
    return max(_ROUND, -(-size // _ROUND) * _ROUND)


def first_own(frames: list[str]) -> str:
    """The innermost frame that is not torch's."""
    plain = [frame for frame in frames if "/torch/" not in frame and ".py" in frame] or frames
    return plain[0].rpartition("site-packages/")[2] if plain else ""


@dataclass(frozen=True)
class Difference:
    """Runs of events that the other side has not."""

    real_at: int
    predicted_at: int
    real: list[Event]
    predicted: list[Event]


def align(real: list[Event], predicted: list[Event]) -> Iterator[Difference]:
    """Walk both streams together."""
    left = right = 0
    while left < len(real) and right < len(predicted):
        if real[left].key == predicted[right].key:
            left, right = left + 1, right + 1
            continue
        skip = _resume(real, left, predicted, right)
        if skip is None:
            yield Difference(left, right, real[left:], predicted[right:])
            return
        yield Difference(left, right, real[left : left + skip[0]], predicted[right : right + skip[1]])
        left, right = left + skip[0], right + skip[1]
    if left < len(real) or right < len(predicted):
        yield Difference(left, right, real[left:], predicted[right:])


def _resume(real: list[Event], left: int, predicted: list[Event], right: int) -> tuple[int, int] | None:
    """The fewest events to skip, on both sides together, until the streams agree again."""
    for total in range(1, 2 * _WINDOW):
        for skipped in range(total + 1):
            start, other = left + skipped, right + total - skipped
            ours, theirs = real[start : start + _AGREE], predicted[other : other + _AGREE]
            if ours and len(ours) == len(theirs) and all(a.key == b.key for a, b in zip(ours, theirs, strict=True)):
                return skipped, total - skipped
    return None


def by_phase(events: list[Event]) -> dict[str, list[Event]]:
    """The events of each phase, in order."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.phase, []).append(event)
    return found


def show(question: Question, row: dict[str, Any], *, everything: bool) -> None:
    """Print the first difference with its neighbours, or all of them in order. Phases are aligned one by one."""
    real, predicted = real_events(row["history"]), predicted_events(question)
    walk = question.walk(question.obtain())
    for name, figure in (("allocated", walk.peak_bytes()), ("reserved", int(walk.reserved.max()))):
        error = f"{figure - row[name]:+,}, {100 * (figure / row[name] - 1):+.3f} %"
        print(f"{name}: real {row[name]:,}, predicted {figure:,} ({error})")
    print(f"{len(real)} real events, {len(predicted)} predicted")
    ours, theirs = by_phase(real), by_phase(predicted)
    count = 0
    for phase in dict.fromkeys([*ours, *theirs]):
        here = ours.get(phase, [])
        for difference in align(here, theirs.get(phase, [])):
            count += 1
            print(f"difference {count}: {phase}, at real event {difference.real_at}, predicted event {difference.predicted_at}")
            if not everything:
                _print_side("both", here[max(0, difference.real_at - _NEIGHBOURS) : difference.real_at], frames=False)
            _print_side("real", difference.real, frames=not everything)
            _print_side("predicted", difference.predicted, frames=False)
            if not everything:
                _print_side("both", here[difference.real_at + len(difference.real) :][:_NEIGHBOURS], frames=False)
                return
    print(f"{count} differences" if count else "The streams are the same.")


def _print_side(name: str, events: list[Event], *, frames: bool) -> None:
    for (sign, size, note), group in groupby(events[:_MOST], key=lambda event: (event.sign, event.size, event.note)):
        some = list(group)
        times = f" x {len(some)}" if len(some) > 1 else ""
        print(f"  {name:10} {sign}{size:>13,}{times}  {note}")
        for frame in some[0].frames[:30] if frames else ():
            print(f"               {frame}")
    if len(events) > _MOST:
        print(f"  {name:10} ... and {len(events) - _MOST} more")
