"""A shallow trace made deep: the events of one layer, repeated.

A model of 32 identical layers need not be traced whole. Four layers show all there is: the first, the last, and two in the middle that
must do exactly the same, which is checked. `deepen` then inserts as many copies of a middle layer as are wanted: its parameters in the
build, its run through forward (in order), through backward (in reverse), through clipping and the optimizer. The result is the very
stream of births and deaths that the deep model would have given, so that reserved memory, which is not affine in depth, can be replayed.

A storage is known by where it was born: the phase, the round, the layer, and its number among the births there. The copies of a middle
layer's storage have the same address but for the layer, and a reference from one layer to another is kept as a distance: what layer 5
frees of layer 4's, layer 6 frees of layer 5's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from brim.memory.stream import Birth, Place, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

# Clipping puts the norm of every gradient into one tensor: the only storage whose size knows how many layers there are.
_STACK, _NORM = "aten::stack", "aten::linalg_vector_norm"
_RUNNING = frozenset({"forward", "backward", "evaluation"})


class NotRepeatedError(Exception):
    """The layers do not do the same: the model must be traced whole."""


class Address(NamedTuple):
    """Where a storage was born."""

    phase: str
    round: int
    layer: int | None
    number: int


@dataclass(frozen=True)
class Unit:
    """Consecutive events that belong to one place; in forward, what follows a layer belongs to it until the next begins."""

    place: Place
    events: tuple[int, ...]


def deepen(trace: Trace, template: int, extra: int) -> Trace:
    """Insert `extra` copies of layer `template` behind it. Both its neighbours must have been traced, and the next must equal it."""
    return deepen_with_sources(trace, template, extra)[0]


def deepen_with_sources(trace: Trace, template: int, extra: int) -> tuple[Trace, list[int]]:
    """The same, and for every storage of the deep trace the storage of the shallow one that it is, or is a copy of."""
    assert extra >= 0
    addresses = _addresses(trace)
    units = list(_units(trace))
    _check_repeated(trace, units, addresses, template)
    return _Deepener(trace, addresses, template, extra).run(units)


def _addresses(trace: Trace) -> list[Address]:
    counts: Counter[Place] = Counter()
    found = []
    for birth in trace.births:
        place = trace.places[birth.place]
        found.append(Address(place.phase, place.round, place.layer, counts[place]))
        counts[place] += 1
    return found


def _units(trace: Trace) -> Iterator[Unit]:
    last = max((place.layer for place in trace.places if place.layer is not None), default=None)
    waiting: Unit | None = None
    pairs = ((trace.places[number], event) for number, event in zip(trace.event_places, trace.events, strict=True))
    for place, group in groupby(pairs, key=lambda pair: pair[0]):
        unit = Unit(place, tuple(event for _place, event in group))
        follows = waiting is not None and unit.place == Place(waiting.place.phase, waiting.place.round, None)
        if (
            waiting is not None
            and follows
            and waiting.place.phase in {"forward", "evaluation"}
            and waiting.place.layer not in {None, last}
        ):
            waiting = replace(waiting, events=waiting.events + unit.events)
            continue
        if waiting is not None:
            yield waiting
        waiting = unit
    if waiting is not None:
        yield waiting


def _check_repeated(trace: Trace, units: list[Unit], addresses: list[Address], template: int) -> None:
    """The template and its successor must have the same events, seen from themselves."""

    def seen_from(layer: int) -> dict[tuple[str, int], list[list[tuple[object, ...]]]]:
        found: dict[tuple[str, int], list[list[tuple[object, ...]]]] = defaultdict(list)
        for unit in units:
            if unit.place.layer == layer:
                found[unit.place.phase, unit.place.round].append(
                    [_relative(trace, addresses, event, layer) for event in unit.events]
                )
        return found

    if seen_from(template) != seen_from(template + 1):
        raise NotRepeatedError


def _relative(trace: Trace, addresses: list[Address], event: int, layer: int) -> tuple[object, ...]:
    if event >= 0:
        birth = trace.births[event]
        return "born", birth.size, birth.operator
    address = addresses[~event]
    distance = None if address.layer is None else address.layer - layer
    return "died", address.phase, address.round, distance, address.number


class _Deepener:
    def __init__(self, trace: Trace, addresses: list[Address], template: int, extra: int) -> None:
        self._old = trace
        self._addresses = addresses
        self._template = template
        self._extra = extra
        self._number_of = {address: number for number, address in enumerate(addresses)}
        self._new = Trace()
        self._place_of: dict[Place, int] = {}
        self._clones: dict[tuple[int, int], int] = {}
        """(old storage, how many layers further) -> new storage; 0 further is the storage itself."""
        self._open: set[tuple[int, int]] = set()
        self._sources: list[int] = []

    def run(self, units: list[Unit]) -> tuple[Trace, list[int]]:
        for unit in units:
            if unit.place.layer == self._template:
                self._repeat(unit)
            else:
                self._emit(unit, 0)
        return self._new, self._sources

    def _repeat(self, unit: Unit) -> None:
        """Copies stand behind the template, in the order in which the phase goes through the layers."""
        order = range(self._extra, -1, -1) if unit.place.phase == "backward" else range(self._extra + 1)
        for further in order:
            self._emit(unit, further)

    def _emit(self, unit: Unit, further: int) -> None:
        place = self._moved(unit.place, further)
        before: int | None = None
        for together, group in groupby(unit.events, key=lambda event: self._dies_with_its_copies(event, unit.place)):
            events = list(group)
            if together:
                self._die_together(events, before, place)
                continue
            before = ~events[-1] if events[-1] < 0 else None
            for event in events:
                if event >= 0:
                    self._bear(event, further, place)
                else:
                    self._let_die(~event, unit.place, further, place)

    def _die_together(self, events: list[int], before: int | None, place: Place) -> None:
        """Layer by layer, as whoever drops them goes through the parameters.

        A list drops its items from the end: what died just before tells the direction.
        """
        last = self._addresses[before].layer if before is not None else None
        backwards = last is not None and last > self._template
        for each in range(self._extra, -1, -1) if backwards else range(self._extra + 1):
            for event in events:
                self._die(~event, each, place)

    def _moved(self, place: Place, further: int) -> Place:
        if place.layer is None or place.layer < self._template:
            return place
        return place._replace(layer=place.layer + (further if place.layer == self._template else self._extra))

    def _dies_with_its_copies(self, event: int, where: Place) -> bool:
        """Whether a storage of the template dies outside of the layers: gradients, a list of temporaries."""
        layer = self._addresses[~event].layer if event < 0 else None
        return layer == self._template and not _is_inside(layer, where)

    def _let_die(self, number: int, where: Place, further: int, place: Place) -> None:
        """Find which storage dies in this copy where the template has this death."""
        address, template, extra = self._addresses[number], self._template, self._extra
        if address.layer is None or not _is_inside(address.layer, where):
            if further == 0:
                self._die(number, 0, place)
            return
        assert where.layer is not None
        here = where.layer + (further if where.layer == template else extra if where.layer > template else 0)
        self._die(*self._locate(address, here + address.layer - where.layer), place)

    def _locate(self, address: Address, layer: int) -> tuple[int, int]:
        """The storage of this address in a layer of the deep model."""
        template, extra = self._template, self._extra
        if layer < template:
            old, further = layer, 0
        elif layer <= template + extra:
            old, further = template, layer - template
        else:
            old, further = layer - extra, 0
        number = self._number_of.get(address._replace(layer=old))
        if number is None:
            raise NotRepeatedError
        return number, further

    def _bear(self, number: int, further: int, place: Place) -> None:
        old = self._old.births[number]
        size = old.size
        if old.operator == _STACK and place.phase == "clip":
            size = sum(
                self._new.births[self._clones[key]].size for key in self._open if self._old.births[key[0]].operator == _NORM
            )
        self._new.births.append(Birth(size, old.operator, self._index(place), old.kind))
        self._clones[number, further] = len(self._new.births) - 1
        self._sources.append(number)
        self._new.events.append(len(self._new.births) - 1)
        self._new.event_places.append(self._index(place))
        self._open.add((number, further))

    def _die(self, number: int, further: int, place: Place) -> None:
        if (number, further) not in self._open:
            raise NotRepeatedError
        self._open.remove((number, further))
        self._new.events.append(~self._clones[number, further])
        self._new.event_places.append(self._index(place))

    def _index(self, place: Place) -> int:
        if place not in self._place_of:
            self._place_of[place] = len(self._new.places)
            self._new.places.append(place)
        return self._place_of[place]


def _is_inside(layer: int, where: Place) -> bool:
    """Whether a death belongs to the run of a layer, and so is repeated with it. An optimizer's loop goes on from one layer to the next."""
    return where.layer is not None and (where.phase in _RUNNING or abs(where.layer - layer) <= 1)
