"""Which bytes are born and die in a training step, found by running the step on tensors that have shapes and no memory.

The model lives on torch's meta device: every operator runs, autograd records and replays as it would, and nothing is computed. `Tracer`
stands below autograd and sees each operator's results; a storage that was not there before is a birth. A weak reference tells its
death, at the very place in the stream of operators where the real tensor would die, because references are dropped by the same code.
Only weak references are kept: one strong reference more, and gradient accumulation would copy where it really steals.

What the trace cannot see (memory that a kernel takes and gives back inside one operator) is added by `brim.memory.kernels` as a birth
and a death around the operator.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn


# Derivatives fill a fresh tensor in place, unless they see that somebody is watching (torch/csrc/autograd/FunctionsManual.cpp asks
# `areAnyTensorSubclassLike`): then they make a copy that the real run does not have.
_IN_PLACE_IN_BACKWARD = frozenset(
    {torch.ops.aten.scatter_add.default, torch.ops.aten.index_add.default, torch.ops.aten.index_put.default}
)


class Place(NamedTuple):
    """Where in the step an event happens. Layers are numbered from 0; None outside of them."""

    phase: str
    """`build`, `forward`, `backward`, `clip`, `optimizer`, `evaluation`."""
    round: int
    """Counts micro-batches, over all steps that were traced."""
    layer: int | None


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

    def alive_at_peak(self, phases: Iterable[str], last_round: int | None = None) -> Counter[str]:
        """Bytes by kind at the moment of the highest peak within these phases."""
        wanted = set(phases)
        live = best = 0
        position = -1
        for index, (event, place) in enumerate(zip(self.events, self.event_places, strict=True)):
            live += self.births[event].size if event >= 0 else -self.births[~event].size
            where = self.places[place]
            if live > best and where.phase in wanted and (last_round is None or where.round == last_round):
                best, position = live, index
        alive: Counter[str] = Counter()
        for event in self.events[: position + 1]:
            birth = self.births[event if event >= 0 else ~event]
            alive[birth.kind] += birth.size if event >= 0 else -birth.size
        return alive


class DataDependentError(Exception):
    """The module asked for the value of a tensor, and a trace has none."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records births and deaths while it is active."""

    def __init__(self, *, scalar: bool | float | None = None, scratch: Callable[[Any, Any], int] | None = None) -> None:
        """Trace with these answers.

        `scalar` is the answer to `.item()`: the one truth value that the traced code may ask for; None forbids the question. `scratch` says
        how many bytes an operator takes and gives back on the target (`brim.memory.kernels.scratch_bytes`).
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._scalar = scalar
        self._scratch = scratch or (lambda _operator, _arguments: 0)
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._place = -1
        self._boundaries: list[int] = []
        self.go("build", 0, None)

    def go(self, phase: str, round_: int, layer: int | None) -> None:
        """From here on, events belong to this place."""
        place = Place(phase, round_, layer)
        if self._place < 0 or self.trace.places[self._place] != place:
            self.trace.places.append(place)
            self._place = len(self.trace.places) - 1

    def adopt(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count tensors that exist already, or name the kind of those that are counted."""
        for tensor in tensors:
            number = self._number(tensor)
            if number is None:
                number = self._born(tensor, "build")
            if number is not None:
                self.trace.births[number].kind = kind

    def transient(self, size: int, operator: str) -> None:
        """Memory that a kernel takes and gives back inside one operator."""
        if size <= 0:
            return
        number = self._record(size, operator)
        self._died(number)

    @contextlib.contextmanager
    def layers(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Hook the repeated blocks of the model, so that events know their layer."""
        handles = []
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._enter(index), prepend=True))
            handles.append(block.register_forward_hook(self._leave(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if self._scalar is None:
                raise DataDependentError
            return self._scalar
        if self.trace.places[self._place].phase == "backward":
            self._follow_backward()
            if func in _IN_PLACE_IN_BACKWARD:
                self.transient(self._scratch(func, args), func._schema.name)
                return args[0]
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            # How many elements count depends on values; in a batch without faults all do (labels, the experts' tokens).
            result = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.long)
            self._born(result, func)
            return result
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._born(result, func)
        elif isinstance(result, tuple | list):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._born(item, func)
        return result

    def _enter(self, index: int) -> Any:
        def hook(_module: nn.Module, inputs: Any) -> None:
            place = self.trace.places[self._place]
            if place.phase in {"forward", "evaluation"}:
                if index == 0:
                    self._boundaries = [_sequence_number(inputs)]
                self.go(place.phase, place.round, index)

        return hook

    def _leave(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            place = self.trace.places[self._place]
            if place.phase in {"forward", "evaluation"}:
                del self._boundaries[index + 1 :]
                self._boundaries.append(_sequence_number(output))
                self.go(place.phase, place.round, None)

        return hook

    def _follow_backward(self) -> None:
        """Backward visits nodes in the order opposite to that of their creation: the node's number tells its layer.

        Numbers above the last layer's are the head's, before any layer is entered; later they are nodes of a recomputation, or of gradient
        accumulation, and belong to the layer that is under way.
        """
        node = torch._C._current_autograd_node()
        if node is None or len(self._boundaries) < 2:
            return
        number = node._sequence_nr()
        if number > self._boundaries[-1]:
            return
        place = self.trace.places[self._place]
        layer = bisect_left(self._boundaries, number) - 1
        self.go("backward", place.round, layer if layer >= 0 else None)

    def _number(self, tensor: torch.Tensor) -> int | None:
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found[0] if found is not None else None

    def _born(self, tensor: torch.Tensor, operator: Any) -> int | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return None
        size = storage.nbytes()
        if size == 0 or not tensor.is_meta:
            return None
        number = self._record(size, operator if isinstance(operator, str) else operator._schema.name)

        def gone(_reference: Any, key: int = key, number: int = number) -> None:
            del self._alive[key]
            self._died(number)

        self._alive[key] = (number, weakref.ref(storage, gone))
        return number

    def _record(self, size: int, operator: str) -> int:
        trace = self.trace
        trace.births.append(Birth(size, operator, self._place))
        number = len(trace.births) - 1
        trace.events.append(number)
        trace.event_places.append(self._place)
        return number

    def _died(self, number: int) -> None:
        self.trace.events.append(~number)
        self.trace.event_places.append(self._place)


def _sequence_number(value: Any) -> int:
    """The number of the autograd node that made a module's (first) input or output; -1 where there is none."""
    first = value[0] if isinstance(value, tuple) and value else value
    node = first.grad_fn if isinstance(first, torch.Tensor) else None
    return node._sequence_nr() if node is not None else -1
