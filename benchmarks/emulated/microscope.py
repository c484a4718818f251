"""Torch's own memory history beside the predicted requests: which allocation is the first that differs.

Both sides are streams of requests and returns. They are walked together; where they differ, the shortest way to go on together is looked
for, and what was skipped on either side is a difference. Sizes are compared as the allocator rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.estimate import Question

_ROUND = 512
_AGREE = 6
"""Events that must be alike for the two streams to count as together again."""
_WINDOW = 400
_NEIGHBOURS = 4


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
    """What brim says that the allocator is asked for, from the first forward on."""
    trace = question.walk(question.obtain()).trace
    micro_batches = (max(place.round for place in trace.places) + 1) // 2
    events = []
    for event, number in zip(trace.events, trace.event_places, strict=True):
        place = trace.places[number]
        if place.phase == "build":
            continue
        birth = trace.births[max(event, ~event)]
        phase = f"{place.phase} {place.round // micro_batches} {place.round % micro_batches}"
        note = f"{birth.operator} ({birth.kind}, layer {place.layer})"
        events.append(Event("+" if event >= 0 else "-", rounded(birth.size), phase, note))
    return events


def real_events(history: list[list[Any]]) -> list[Event]:
    """What torch recorded of the first two steps, from the first forward on."""
    events = []
    sizes: dict[int, int] = {}
    for sign, address, size, phase, frames in history:
        if sign == "s":
            continue
        if sign == "+":
            sizes[address] = rounded(size)
        if phase == "build" or phase.split(" ")[1] == "2":
            continue
        place = phase if phase.count(" ") == 2 else f"{phase} 0"
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


def show(question: Question, row: dict[str, Any], *, everything: bool) -> None:
    """Print the first difference with its neighbours, or all of them in order."""
    real, predicted = real_events(row["history"]), predicted_events(question)
    walk = question.walk(question.obtain())
    for name, figure in (("allocated", walk.peak_bytes()), ("reserved", int(walk.reserved.max()))):
        error = f"{figure - row[name]:+,}, {100 * (figure / row[name] - 1):+.3f} %"
        print(f"{name}: real {row[name]:,}, predicted {figure:,} ({error})")
    print(f"{len(real)} real events, {len(predicted)} predicted")
    count = 0
    for difference in align(real, predicted):
        count += 1
        if not everything:
            for event in real[max(0, difference.real_at - _NEIGHBOURS) : difference.real_at]:
                print(f"  both       {event.sign}{event.size:>13,}  {event.phase:14} {event.note}")
        else:
            print(f"difference {count}, at real event {difference.real_at}, predicted event {difference.predicted_at}")
        _print_side("real", difference.real, frames=not everything)
        _print_side("predicted", difference.predicted, frames=False)
        if not everything:
            for event in real[difference.real_at + len(difference.real) :][:_NEIGHBOURS]:
                print(f"  both       {event.sign}{event.size:>13,}  {event.phase:14} {event.note}")
            return
    print(f"{count} differences" if count else "The streams are the same.")


def _print_side(name: str, events: list[Event], *, frames: bool) -> None:
    for event in events[:40]:
        print(f"  {name:10} {event.sign}{event.size:>13,}  {event.phase:14} {event.note}")
        for frame in event.frames[:30] if frames else ():
            print(f"               {frame}")
    if len(events) > 40:
        print(f"  {name:10} ... and {len(events) - 40} more")
