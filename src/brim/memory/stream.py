"""A step as a stream of births and deaths of storages. No torch here: a stream that was traced once is read back without it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from brim.memory.work import Call

if TYPE_CHECKING:
    from collections.abc import Iterable


_TRAINS, _FROZEN = "build:trains", "build:frozen"


LOADED_COPY, LOADED_WEIGHT = "load:copy", "load:weight"
"""Operators of temporary tensors while a quantised base is loaded: tensors that are not quantised, and weights before quantisation."""


def parameter_operator(trains: bool, item_bytes: int) -> str:
    """The operator of a parameter's birth: whether it trains, and the bytes of an element, which sharding must know."""
    return f"{_TRAINS if trains else _FROZEN}:{item_bytes}"


def read_parameter_operator(operator: str) -> tuple[bool, int]:
    """Whether a parameter trains, and the bytes of an element."""
    word, _colon, item_bytes = operator.rpartition(":")
    assert word in {_TRAINS, _FROZEN}, operator
    return word == _TRAINS, int(item_bytes)


class Place(NamedTuple):
    """Where in the step an event happens. Layers are numbered from 0; None outside of them."""

    phase: str
    """`build`, `forward`, `backward`, `clip`, `optimizer`, `evaluation`."""
    round: int
    """Counts micro-batches, over all steps that were traced."""
    layer: int | None
    chunk: int | None = None
    """Of a chunked loss, while a step is traced: which of its chunks is under way."""


@dataclass(slots=True)
class Birth:
    """One storage."""

    size: int
    """Bytes that were asked for."""
    operator: str
    place: int
    """Index into `Trace.places`."""
    kind: str = "temporary"


@dataclass
class Trace:
    """A stream of births and deaths."""

    births: list[Birth] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    """`k` for the birth of storage `k`, `~k` for its death."""
    event_places: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """What was computed: forward and backward of the first micro-batch, and every optimizer step."""

    def peaks(self) -> dict[Place, int]:
        """Most bytes alive at once, per place."""
        live = 0
        peaks: dict[Place, int] = {}
        for event, place in zip(self.events, self.event_places, strict=True):
            live += self.births[event].size if event >= 0 else -self.births[~event].size
            key = self.places[place]
            if live > peaks.get(key, -1):
                peaks[key] = live
        return peaks

    def label_activations(self) -> None:
        """Name what forward leaves for backward: born in forward, alive when it ends, and not logits."""
        alive: set[int] = set()
        phase = ""
        for event, place in zip(self.events, self.event_places, strict=True):
            before, phase = phase, self.places[place].phase
            if before == "forward" and phase != "forward":
                for number in alive:
                    if self.births[number].kind == "temporary":
                        self.births[number].kind = "activations"
                alive.clear()
            if phase == "forward":
                alive.add(event) if event >= 0 else alive.discard(~event)

    def alive_at_peak(self, phases: Iterable[str], first_round: int = 0) -> Counter[str]:
        """Bytes by kind at the moment of the highest peak within these phases, from this round on."""
        wanted = set(phases)
        live = best = 0
        position = -1
        for index, (event, place) in enumerate(zip(self.events, self.event_places, strict=True)):
            live += self.births[event].size if event >= 0 else -self.births[~event].size
            where = self.places[place]
            if live > best and where.phase in wanted and where.round >= first_round:
                best, position = live, index
        alive: Counter[str] = Counter()
        for event in self.events[: position + 1]:
            birth = self.births[event if event >= 0 else ~event]
            alive[birth.kind] += birth.size if event >= 0 else -birth.size
        return alive
