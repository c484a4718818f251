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

import numpy as np

from brim.memory.columns import Columns, Ints
from brim.memory.stream import Place, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    events: list[int]


def deepen(trace: Trace, template: int, extra: int) -> Trace:
    """Insert `extra` copies of layer `template` behind it. Both its neighbours must have been traced, and the next must equal it."""
    return deepen_columns(Columns.of(trace), template, extra)[0].trace()


def deepen_columns(shallow: Columns, template: int, extra: int, *, reach: int | None = None) -> tuple[Columns, Ints]:
    """The same, and for every storage of the deep trace the storage of the shallow one that it is, or is a copy of.

    `reach`: a layer that frees a storage of one further away than this does not free that of a neighbour, but always the same one.
    """
    assert extra >= 0
    addresses, units = addresses_of(shallow), _units(shallow)
    _check_repeated(shallow, units, addresses, template)
    return _Deepener(shallow, addresses, template, extra, reach).run(units)


def check_repeated(shallow: Columns, template: int) -> None:
    """NotRepeatedError, if the layer behind the template does not do the same."""
    _check_repeated(shallow, _units(shallow), addresses_of(shallow), template)


def addresses_of(columns: Columns) -> list[Address]:
    """Where each storage was born."""
    counts: Counter[tuple[str, int, int | None]] = Counter()
    found = []
    for number in columns.birth_places.tolist():
        phase, round_, layer, _chunk = columns.places[number]
        found.append(Address(phase, round_, layer, counts[phase, round_, layer]))
        counts[phase, round_, layer] += 1
    return found


def repeat_chunks(trace: Trace, template: int, extra: int) -> Trace:
    """Insert `extra` copies of a chunk of the loss behind it, as `deepen` does with layers; what a chunk computes is repeated too."""
    columns = Columns.of(trace)
    turned = replace(columns, places=tuple(place._replace(layer=place.chunk, chunk=place.layer) for place in columns.places))
    deep = deepen_columns(turned, template, extra, reach=1)[0]
    repeated = replace(deep, places=tuple(place._replace(layer=place.chunk, chunk=None) for place in deep.places)).trace()
    for call in trace.calls:
        place = trace.places[call.place]
        moved = call._replace(place=len(repeated.places))
        repeated.places.append(place._replace(chunk=None))
        repeated.calls += [moved] * (1 + extra if place.chunk == template else 1)
    return repeated


def _units(columns: Columns) -> list[Unit]:
    places = columns.places
    last = max((place.layer for place in places if place.layer is not None), default=None)
    same: dict[Place, int] = {}
    first = [same.setdefault(place, index) for index, place in enumerate(places)]
    numbers = [first[number] for number in columns.event_places.tolist()]
    units: list[Unit] = []
    for number, group in groupby(zip(numbers, columns.events.tolist(), strict=True), key=lambda pair: pair[0]):
        place = places[number]
        events = [event for _number, event in group]
        if units and _follows(place, units[-1].place) and units[-1].place.layer != last:
            units[-1].events.extend(events)
        else:
            units.append(Unit(place, events))
    return units


def _follows(place: Place, before: Place) -> bool:
    """Whether a forward leaves a layer here."""
    return before.phase in {"forward", "evaluation"} and before.layer is not None and place == before._replace(layer=None)


def _check_repeated(columns: Columns, units: list[Unit], addresses: list[Address], template: int) -> None:
    """The template and its successor must have the same events, seen from themselves."""
    born = list(zip(columns.sizes.tolist(), columns.operators.tolist(), strict=True))

    def seen_from(layer: int) -> dict[tuple[str, int], list[list[tuple[object, ...]]]]:
        found: dict[tuple[str, int], list[list[tuple[object, ...]]]] = defaultdict(list)
        for unit in units:
            if unit.place.layer == layer:
                seen = [born[event] if event >= 0 else _relative(addresses[~event], layer) for event in unit.events]
                found[unit.place.phase, unit.place.round].append(seen)
        return found

    if seen_from(template) != seen_from(template + 1):
        raise NotRepeatedError


def _relative(address: Address, layer: int) -> tuple[object, ...]:
    distance = None if address.layer is None else address.layer - layer
    return address.phase, address.round, distance, address.number


class _Deepener:
    """Writes the deep stream as codes: a storage of the shallow trace and how many layers further, in one number."""

    def __init__(self, columns: Columns, addresses: list[Address], template: int, extra: int, reach: int | None) -> None:
        self._reach = reach
        self._old = columns
        self._addresses = addresses
        self._template = template
        self._extra = extra
        self._number_of = {address: number for number, address in enumerate(addresses)}
        self._places: dict[Place, int] = {}
        self._codes: list[Ints] = []
        self._are_births: list[NDArray[np.bool_]] = []
        self._event_places: list[Ints] = []

    def run(self, units: list[Unit]) -> tuple[Columns, Ints]:
        for unit in units:
            if unit.place.layer == self._template:
                self._repeat(unit)
            else:
                self._emit(unit)
        return self._assemble()

    def _repeat(self, unit: Unit) -> None:
        """Copies stand behind the template, in the order in which the phase goes through the layers."""
        further = np.arange(self._extra + 1)
        if unit.place.phase == "backward":
            further = further[::-1]
        copies = np.stack([self._in_copies(event, unit.place, further) for event in unit.events], axis=1)
        births = np.broadcast_to(np.array(unit.events) >= 0, copies.shape)
        places = np.array([self._index(self._moved(unit.place, each)) for each in further.tolist()])
        there = copies >= 0
        self._codes.append(copies[there])
        self._are_births.append(births[there])
        self._event_places.append(np.broadcast_to(places[:, None], copies.shape)[there])

    def _in_copies(self, event: int, where: Place, further: Ints) -> Ints:
        """What the template's event is in each copy: a code, or -1 where it is not repeated."""
        if event >= 0:
            return self._code(event, further)
        address = self._addresses[~event]
        if address.layer is None or not _is_inside(address.layer, where):
            return np.where(further == 0, self._code(~event, 0), -1)
        if address.layer == self._template:
            return self._code(~event, further)
        return np.array([self._locate(address, address.layer + each) for each in further.tolist()])

    def _emit(self, unit: Unit) -> None:
        """Events outside of the template: what dies of its storages there, dies with its copies."""
        codes: list[int] = []
        births: list[bool] = []
        before: int | None = None
        for together, group in groupby(unit.events, key=lambda event: self._dies_with_its_copies(event, unit.place)):
            events = list(group)
            if together:
                found = self._die_together(events, before)
            else:
                before = ~events[-1] if events[-1] < 0 else None
                found = [event * (self._extra + 1) if event >= 0 else self._dying(~event, unit.place) for event in events]
            codes.extend(found)
            births.extend([event >= 0 for event in events] if not together else [False] * len(found))
        self._codes.append(np.array(codes, dtype=np.int64))
        self._are_births.append(np.array(births, dtype=bool))
        self._event_places.append(np.full(len(codes), self._index(self._moved(unit.place, 0))))

    def _die_together(self, events: list[int], before: int | None) -> list[int]:
        """Layer by layer, as whoever drops them goes through the parameters.

        A list drops its items from the end: what died just before tells the direction.
        """
        last = self._addresses[before].layer if before is not None else None
        backwards = last is not None and last > self._template
        order = range(self._extra, -1, -1) if backwards else range(self._extra + 1)
        return [int(self._code(~event, each)) for each in order for event in events]

    def _dies_with_its_copies(self, event: int, where: Place) -> bool:
        """Whether a storage of the template dies outside of the layers: gradients, a list of temporaries."""
        layer = self._addresses[~event].layer if event < 0 else None
        return layer == self._template and not _is_inside(layer, where)

    def _dying(self, number: int, where: Place) -> int:
        """Which storage dies where the shallow trace has this death."""
        address = self._addresses[number]
        if address.layer is None or where.layer is None or not _is_inside(address.layer, where):
            return number * (self._extra + 1)
        if self._reach is not None and abs(address.layer - where.layer) > self._reach:
            return number * (self._extra + 1)
        here = where.layer + (self._extra if where.layer > self._template else 0)
        return self._locate(address, here + address.layer - where.layer)

    def _locate(self, address: Address, layer: int) -> int:
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
        return number * (extra + 1) + further

    def _assemble(self) -> tuple[Columns, Ints]:
        """Number the storages as they are born, and let each die once."""
        old, copies = self._old, self._extra + 1
        codes, is_birth = np.concatenate(self._codes), np.concatenate(self._are_births)
        places = np.concatenate(self._event_places)
        born = codes[is_birth]
        number_of = np.full(len(old.sizes) * copies, -1, dtype=np.int64)
        number_of[born] = np.arange(len(born))
        numbers = number_of[codes]
        born_at = np.flatnonzero(is_birth)
        dead, died_at = numbers[~is_birth], np.flatnonzero(~is_birth)
        if (dead < 0).any() or len(np.unique(dead)) < len(dead) or (born_at[dead] > died_at).any():
            raise NotRepeatedError
        sources: Ints = born // copies
        deep = Columns(
            sizes=old.sizes[sources],
            operators=old.operators[sources],
            kinds=old.kinds[sources],
            birth_places=places[is_birth],
            events=np.where(is_birth, numbers, ~numbers),
            event_places=places,
            names=old.names,
            places=tuple(self._places),
        )
        ends = np.full(len(born), len(codes))
        ends[dead] = died_at
        _size_stacks(deep, born_at, ends)
        return deep, sources

    def _code(self, number: int, further: Ints | int) -> Ints:
        return np.asarray(number * (self._extra + 1) + further)

    def _moved(self, place: Place, further: int) -> Place:
        if place.layer is None or place.layer < self._template:
            return place
        return place._replace(layer=place.layer + (further if place.layer == self._template else self._extra))

    def _index(self, place: Place) -> int:
        return self._places.setdefault(place, len(self._places))


def _size_stacks(columns: Columns, born_at: Ints, died_at: Ints) -> None:
    """A stack of norms is as large as the norms that are alive when it is made."""
    if _STACK not in columns.names or _NORM not in columns.names:
        return
    are_norms = columns.operators == columns.names.index(_NORM)
    for stack in np.flatnonzero(columns.operators == columns.names.index(_STACK)).tolist():
        if columns.places[columns.birth_places[stack]].phase == "clip":
            alive = are_norms & (born_at < born_at[stack]) & (died_at > born_at[stack])
            columns.sizes[stack] = columns.sizes[alive].sum()


def _is_inside(layer: int, where: Place) -> bool:
    """Whether a death belongs to the run of a layer, and so is repeated with it. An optimizer's loop goes on from one layer to the next."""
    return where.layer is not None and (where.phase in _RUNNING or abs(where.layer - layer) <= 1)
