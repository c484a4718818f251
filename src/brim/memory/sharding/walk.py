"""A trace read as a walk through the model, and written anew on the way: what all engines of data-parallel training share.

A step goes forward through stages and backward through them again: stage 0 is what comes before the repeated layers (the embedding), stages
1 to L are the layers, stage L + 1 is what follows them (last norm, head, loss). An engine is told when a stage, a micro-batch or a phase
begins and ends, and of every birth and death in between; it copies, shrinks, leaves out and adds. Sizes that it changes or adds are those
of parameters, gradients and optimizer state, which know neither batch nor length.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from brim.memory.stream import Birth, Place, Trace, read_parameter_operator

if TYPE_CHECKING:
    from collections.abc import Iterable

FORWARDS = frozenset({"forward", "evaluation"})
STEPPING = frozenset({"clip", "optimizer"})
_NOTHING = -1


class Parameter(NamedTuple):
    """A parameter as the trace knows it."""

    number: int
    """Its birth."""
    size: int
    item_bytes: int
    trains: bool
    stage: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return self.size // self.item_bytes


class Moment(NamedTuple):
    """Where the walk is."""

    phase: str
    round: int
    stage: int


@dataclass(frozen=True)
class Reading:
    """What an engine must know of a trace before it walks."""

    layers: int
    rounds: int
    """Micro-batches of one step."""
    parameters: tuple[Parameter, ...]
    gradients: dict[int, int]
    """Births of fresh gradients of parameters, each with the storage in which it ends: itself, or an earlier one to which it is added."""
    tied: int | None
    """The embedding that is also the head: its gradient is complete only where backward ends. None if there is none."""
    step_bytes: int
    """Temporaries of the optimizer's step at their peak; of one parameter alone where it steps one at a time."""
    steps_all_at_once: bool
    """Whether they are those of all parameters together (foreach), or of one parameter at a time."""
    states_follow_dtype: bool
    """Whether the optimizer's state has the dtype of the parameters (and not one of its own, as 8-bit states have)."""

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.layers + 1 if self.layers else 0

    @property
    def trainable(self) -> list[Parameter]:
        """Parameters that train, in the order of the model."""
        return [parameter for parameter in self.parameters if parameter.trains]

    def is_last_round(self, round_: int) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        return (round_ + 1) % self.rounds == 0


def read(trace: Trace) -> Reading:
    """Read a trace of two steps."""
    layers = max((place.layer + 1 for place in trace.places if place.layer is not None), default=0)
    rounds = (max(place.round for place in trace.places) + 1) // 2
    parameters = _parameters(trace, layers)
    trainable = [parameter.size for parameter in parameters if parameter.trains]
    step_bytes, steps_all_at_once = _optimizer_peak(trace, len(trainable))
    states = [birth.size for birth in trace.births if birth.kind == "optimizer"]
    return Reading(
        layers=layers,
        rounds=max(1, rounds),
        parameters=parameters,
        gradients=_gradients(trace, max(1, rounds)),
        tied=_tied(trace, parameters, layers),
        step_bytes=step_bytes,
        steps_all_at_once=steps_all_at_once,
        states_follow_dtype=max(states, default=0) >= max(trainable, default=0),
    )


def _parameters(trace: Trace, layers: int) -> tuple[Parameter, ...]:
    found = []
    is_behind = False
    for number, birth in enumerate(trace.births):
        if birth.kind != "parameters":
            continue
        layer = trace.places[birth.place].layer
        is_behind = is_behind or layer is not None
        stage = layer + 1 if layer is not None else layers + 1 if is_behind else 0
        trains, item_bytes = read_parameter_operator(birth.operator)
        found.append(Parameter(number, birth.size, item_bytes, trains, stage))
    return tuple(found)


def _tied(trace: Trace, parameters: tuple[Parameter, ...], layers: int) -> int | None:
    """A model that predicts a vocabulary and has no head of the embedding's size uses the embedding."""
    embedding = max((each for each in parameters if each.stage == 0), key=lambda each: each.elements, default=None)
    if embedding is None or not layers or not any(birth.kind == "logits" for birth in trace.births):
        return None
    heads = [each for each in parameters if each.stage > layers and each.elements == embedding.elements]
    return None if heads else embedding.number


def _gradients(trace: Trace, rounds: int) -> dict[int, int]:
    """Of later micro-batches it is the same operator's result of the same size, in the same layer, that is added and dies."""
    found: dict[int, int] = {}
    known: dict[tuple[object, ...], int] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for number, birth in enumerate(trace.births):
        place = trace.places[birth.place]
        if place.phase != "backward":
            continue
        here = (place.round, place.layer, birth.operator, birth.size)
        step, micro = divmod(place.round, rounds)
        key = (step, place.layer, birth.operator, birth.size, counts[here])
        counts[here] += 1
        if birth.kind == "gradients":
            found[number] = known[key] = number
        elif micro and key in known:
            found[number] = known[key]
    return found


def _optimizer_peak(trace: Trace, parameters: int) -> tuple[int, bool]:
    """Bytes of the temporaries of the optimizer's step where they are most, and whether they are those of all parameters.

    A loop over parameters still holds the last one's result when it computes the next one's (`denom` in torch/optim/adamw.py), which an
    optimizer of a single flat tensor does not: so every temporary is counted only beside those of its own parameter.
    """
    steps: dict[int, list[int]] = defaultdict(list)
    for number, birth in enumerate(trace.births):
        place = trace.places[birth.place]
        if birth.kind == "temporary" and place.phase == "optimizer":
            steps[place.round].append(number)
    owners = {
        number: (round_, index * parameters // len(births))
        for round_, births in steps.items()
        if parameters and len(births) % parameters == 0
        for index, number in enumerate(births)
    }
    live: Counter[tuple[int, int]] = Counter()
    total = count = most = alone = 0
    most_count = 0
    temporaries = {number for births in steps.values() for number in births}
    for event in trace.events:
        number = event if event >= 0 else ~event
        if number in temporaries:
            sign = 1 if event >= 0 else -1
            size = sign * trace.births[number].size
            total, count = total + size, count + sign
            most, most_count = max((most, most_count), (total, count))
            if number in owners:
                live[owners[number]] += size
                alone = max(alone, live[owners[number]])
    if parameters and most_count >= parameters:
        return most, True
    return (alone if owners else most), False


class Writer:
    """The new trace, as it grows."""

    def __init__(self, old: Trace) -> None:
        self.old = old
        self.new = Trace(places=list(old.places))
        self.sources: list[int] = []
        self.place = 0
        self._copies: dict[int, int] = {}
        self._alive: set[int] = set()

    def copy(self, number: int, size: int | None = None) -> None:
        """Let an old storage live in the new trace too, perhaps with another size."""
        old = self.old.births[number]
        self._copies[number] = self._born(old.size if size is None else size, old.operator, old.kind, number)

    def drop(self, number: int) -> None:
        """Let an old storage die, if it lives."""
        self.die(self._copies.get(number, _NOTHING))

    def bear(self, size: int, operator: str, kind: str = "communication") -> int:
        """A storage that the old trace does not have."""
        return self._born(size, operator, kind, -1) if size > 0 else _NOTHING

    def die(self, number: int) -> None:
        """The death of a new storage, if it lives."""
        if number in self._alive:
            self._alive.remove(number)
            self.new.events.append(~number)
            self.new.event_places.append(self.place)

    def transient(self, size: int, operator: str, kind: str = "communication") -> None:
        """A storage that is given back at once."""
        self.die(self.bear(size, operator, kind))

    def _born(self, size: int, operator: str, kind: str, source: int) -> int:
        number = len(self.new.births)
        self.new.births.append(Birth(size, operator, self.place, kind))
        self.sources.append(source)
        self.new.events.append(number)
        self.new.event_places.append(self.place)
        self._alive.add(number)
        return number


class Engine:
    """Walks through a trace; what it does at each turn is left to those who inherit. By itself it copies."""

    def __init__(self, trace: Trace) -> None:
        self.reading = read(trace)
        self.writer = Writer(trace)
        self.now = Moment("build", 0, 0)

    def run(self) -> tuple[Trace, list[int]]:
        """The new trace, and where each of its storages comes from."""
        trace = self.writer.old
        births, last = trace.births, -1
        for event, place in zip(trace.events, trace.event_places, strict=True):
            if place != last:  # most events lie where the one before them does, and are of its moment
                self._turn(self._moment(trace.places[place]), place)
                self.writer.place = last = place
            if event >= 0:
                self.birth(event, births[event])
            else:
                self.death(~event)
        self._end()
        return self.writer.new, self.writer.sources

    def start(self, phase: str, round_: int) -> None:
        """A phase of a micro-batch begins."""

    def enter(self, moment: Moment) -> None:
        """A stage of forward or backward begins."""

    def leave(self, moment: Moment) -> None:
        """A stage of forward or backward has ended."""

    def finish(self, phase: str, round_: int) -> None:
        """A phase of a micro-batch has ended."""

    def birth(self, number: int, birth: Birth) -> None:  # noqa: ARG002
        """A storage of the old trace is born."""
        self.writer.copy(number)

    def death(self, number: int) -> None:
        """A storage of the old trace dies."""
        self.writer.drop(number)

    def _turn(self, moment: Moment, place: int) -> None:
        if moment == self.now:
            return
        same_phase = moment[:2] == self.now[:2]
        if same_phase:
            self.leave(self.now)
        else:
            self._end()
        self.writer.place = place
        self.now = moment
        if not same_phase:
            self.start(moment.phase, moment.round)
        self.enter(moment)

    def _end(self) -> None:
        self.leave(self.now)
        self.finish(self.now.phase, self.now.round)

    def _moment(self, place: Place) -> Moment:
        """Forward only climbs, backward only descends; what lies between two layers belongs to the one before."""
        if place.phase not in FORWARDS and place.phase != "backward":
            return Moment(place.phase, place.round, 0)
        is_new = self.now[:2] != place[:2]
        if place.phase == "backward":
            stage = self.reading.last if is_new else self.now.stage
            below = place.layer + 1 if place.layer is not None else 0 if stage == 1 else stage
            return Moment(place.phase, place.round, min(stage, below))
        stage = 0 if is_new else self.now.stage
        above = place.layer + 1 if place.layer is not None else stage + (0 < stage == self.reading.layers)
        return Moment(place.phase, place.round, max(stage, above))


def by_stage(parameters: Iterable[Parameter]) -> dict[int, list[Parameter]]:
    """Parameters, each with those of its stage."""
    found: dict[int, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        found[parameter.stage].append(parameter)
    return found
