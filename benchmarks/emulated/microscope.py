"""Compares torch's memory history with the predicted requests and finds the first allocation that differs.

Both are streams of allocations and frees. They are aligned like two texts in a diff: at a mismatch, as few events as possible are skipped
until both streams agree again, and the skipped events are the difference. Sizes are compared as the allocator rounds them.
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
"""Consecutive events that must be equal before the streams count as aligned again."""
_WINDOW = 400
"""At most twice as many events are skipped at a mismatch."""
_NEIGHBOURS = 4
"""Equal events that are printed before and after the first difference."""
_MAX_PRINTED = 400


@dataclass(frozen=True)
class Event:
    """An allocation (`+`) or a free (`-`)."""

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
    """The requests that brim predicts."""
    trace = question.walk(question.obtain()).trace
    micro_batches = (max(place.round for place in trace.places) + 1) // 2
    events = []
    step, before = -1, "build"
    for event, number in zip(trace.events, trace.event_places, strict=True):
        place = trace.places[number]
        birth = trace.births[max(event, ~event)]
        step += place.phase == "forward" and before not in {"forward", "backward"}  # the stream contains the second step twice
        before = place.phase
        phase = f"{place.phase} {step} {place.round % micro_batches}" if place.phase != "build" else "build"
        note = f"{birth.operator} ({birth.kind}, layer {place.layer})"
        events.append(Event("+" if event >= 0 else "-", rounded(birth.size), phase, note))
    return events


def real_events(history: list[list[Any]]) -> list[Event]:
    """The requests that torch recorded, while the model was built and in the steps."""
    events = []
    sizes: dict[int, int] = {}
    phase = "build"
    for sign, address, size, label, frames in history:
        phase = label or phase  # the backward thread does not set a label
        if sign == "s":
            continue
        if sign == "+":
            sizes[address] = rounded(size)
        place = phase if phase.count(" ") == 2 or phase == "build" else f"{phase} 0"
        events.append(Event(sign, sizes.get(address, rounded(size)), place, innermost_frame(frames), tuple(frames)))
    return events


def rounded(size: int) -> int:
    return max(_ROUND, -(-size // _ROUND) * _ROUND)


def innermost_frame(frames: list[str]) -> str:
    """The innermost frame outside of torch."""
    shown = [frame for frame in frames if "/torch/" not in frame and ".py" in frame] or frames
    return shown[0].rpartition("site-packages/")[2] if shown else ""


@dataclass(frozen=True)
class Difference:
    """Events of each stream that the other stream does not have."""

    real_at: int
    predicted_at: int
    real: list[Event]
    predicted: list[Event]


def align(real: list[Event], predicted: list[Event]) -> Iterator[Difference]:
    left = right = 0
    while left < len(real) and right < len(predicted):
        if real[left].key == predicted[right].key:
            left, right = left + 1, right + 1
            continue
        skip = _realign(real, left, predicted, right)
        if skip is None:
            yield Difference(left, right, real[left:], predicted[right:])
            return
        yield Difference(left, right, real[left : left + skip[0]], predicted[right : right + skip[1]])
        left, right = left + skip[0], right + skip[1]
    if left < len(real) or right < len(predicted):
        yield Difference(left, right, real[left:], predicted[right:])


def _realign(real: list[Event], left: int, predicted: list[Event], right: int) -> tuple[int, int] | None:
    """The smallest numbers of events to skip in the two streams until they agree again."""
    for total in range(1, 2 * _WINDOW):
        for skipped in range(total + 1):
            start, other = left + skipped, right + total - skipped
            left_part, right_part = real[start : start + _AGREE], predicted[other : other + _AGREE]
            if left_part and [event.key for event in left_part] == [event.key for event in right_part]:
                return skipped, total - skipped
    return None


def by_phase(events: list[Event]) -> dict[str, list[Event]]:
    phases: dict[str, list[Event]] = {}
    for event in events:
        phases.setdefault(event.phase, []).append(event)
    return phases


def show(question: Question, row: dict[str, Any], *, everything: bool) -> None:
    """Print the first difference with the events around it, or all differences. Phases are aligned one by one."""
    real, predicted = real_events(row["history"]), predicted_events(question)
    walk = question.walk(question.obtain())
    for name, figure in (("allocated", walk.peak_bytes()), ("reserved", int(walk.reserved.max()))):
        error = f"{figure - row[name]:+,}, {100 * (figure / row[name] - 1):+.3f} %"
        print(f"{name}: real {row[name]:,}, predicted {figure:,} ({error})")
    print(f"{len(real)} real events, {len(predicted)} predicted")
    real_phases, predicted_phases = by_phase(real), by_phase(predicted)
    count = 0
    for phase in dict.fromkeys([*real_phases, *predicted_phases]):
        events = real_phases.get(phase, [])
        for difference in align(events, predicted_phases.get(phase, [])):
            count += 1
            print(f"difference {count}: {phase}, at real event {difference.real_at}, predicted event {difference.predicted_at}")
            if not everything:
                _print_side("both", events[max(0, difference.real_at - _NEIGHBOURS) : difference.real_at], frames=False)
            _print_side("real", difference.real, frames=not everything)
            _print_side("predicted", difference.predicted, frames=False)
            if not everything:
                _print_side("both", events[difference.real_at + len(difference.real) :][:_NEIGHBOURS], frames=False)
                return
    print(f"{count} differences" if count else "The streams are the same.")


def _print_side(name: str, events: list[Event], *, frames: bool) -> None:
    for (sign, size, note), group in groupby(events[:_MAX_PRINTED], key=lambda event: (event.sign, event.size, event.note)):
        repeated = list(group)
        times = f" x {len(repeated)}" if len(repeated) > 1 else ""
        print(f"  {name:10} {sign}{size:>13,}{times}  {note}")
        for frame in repeated[0].frames[:30] if frames else ():
            print(f"               {frame}")
    if len(events) > _MAX_PRINTED:
        print(f"  {name:10} ... and {len(events) - _MAX_PRINTED} more")
