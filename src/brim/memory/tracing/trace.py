"""Which bytes are born and die in a training step, found by running the step on tensors that have shapes and no memory.

The model lives on torch's meta device: every operator runs, autograd records and replays as it would, and nothing is computed. `Tracer`
stands below autograd and sees each operator's results; a storage that was not there before is a birth. A weak reference tells its
death, at the very place in the stream of operators where the real tensor would die, because references are dropped by the same code.
Only weak references are kept: one strong reference more, and gradient accumulation would copy where it really steals.

What the trace cannot see (memory that a kernel takes and gives back inside one operator) is added by `kernels.py` as a birth
and a death around the operator.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from bisect import bisect_left
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brim.memory.stream import Birth, Place, Trace, parameter_operator
from brim.memory.tracing import counting
from brim.memory.tracing.results import call
from brim.memory.tracing.values import QUESTIONS, Values
from brim.memory.work import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from brim.memory.tracing.kernel_scratch import Scratch


# Derivatives fill a fresh tensor in place, unless they see that somebody is watching (torch/csrc/autograd/FunctionsManual.cpp asks
# `areAnyTensorSubclassLike`): then they make a copy that the real run does not have.
_IN_PLACE_IN_BACKWARD = frozenset(
    {torch.ops.aten.scatter_add.default, torch.ops.aten.index_add.default, torch.ops.aten.index_put.default}
)
_ADD = torch.ops.aten.add.Tensor
_AFTER_BACKWARD = frozenset({"clip", "optimizer"})
_OF_A_MICRO_BATCH = frozenset({"forward", "backward"})


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records births and deaths while it is active."""

    def __init__(
        self,
        *,
        scalar: bool | float | None = None,
        scratch: Callable[[Any, Any, Any], Scratch] | None = None,
        in_order: Callable[[Any, Any], Any] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Trace with these answers.

        `scalar` is the answer to `.item()`: the one truth value that the traced code may ask for; None forbids the question. `scratch` says
        what an operator takes and gives back on the target (`scratch_of`), `in_order` in which order its results are allocated.
        Tensors whose last dimension is the `vocabulary` are logits.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.values = Values(self._number, scalar)
        self._vocabulary = vocabulary
        self._in_place: frozenset[Any] = frozenset()
        self._alone = _references_when_alone()
        self._scratch = scratch
        self._in_order = in_order or (lambda _operator, results: results)
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._place = -1
        self._phase = ""
        self._boundaries: list[int] = []
        self._is_watching = False
        self._collects = False
        self._counts = False
        self.go("build", 0, None)

    def go(self, phase: str, round_: int, layer: int | None, chunk: int | None = None) -> None:
        """From here on, events belong to this place."""
        place = Place(phase, round_, layer, chunk)
        if self._place < 0 or self.trace.places[self._place] != place:
            self.trace.places.append(place)
            self._place = len(self.trace.places) - 1
            self._phase = phase
            self._counts = phase in _AFTER_BACKWARD or (phase in _OF_A_MICRO_BATCH and round_ == 0)

    def enter_chunk(self, chunk: int) -> None:
        """From here on, events belong to this chunk of the loss."""
        place = self.trace.places[self._place]
        self.go(place.phase, place.round, place.layer, chunk)

    def adopt(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count tensors that exist already, or name the kind of those that are counted."""
        for tensor in tensors:
            number = self._number(tensor)
            if number is None:
                number = self._born(tensor, "build")
            if number is not None:
                self.trace.births[number].kind = kind

    def adopt_model(self, model: nn.Module, blocks: Sequence[nn.Module], load: Callable[..., None] | None = None) -> None:
        """Record parameters and buffers of a model, each in its layer; `load` records them in the order in which a card loads them."""
        layers = {id(tensor): index for index, block in enumerate(blocks) for tensor in (*block.parameters(), *block.buffers())}

        def go(tensor: torch.Tensor) -> None:
            self.go("build", 0, layers.get(id(tensor)))

        def adopt(tensor: torch.Tensor) -> None:
            self.adopt([tensor], "parameters")
            if (number := self._number(tensor)) is not None:
                self.trace.births[number].operator = parameter_operator(tensor.requires_grad, tensor.itemsize)

        if load is not None:
            load(self, model, go, adopt)
        for tensor in model.parameters():
            go(tensor)
            adopt(tensor)
        for buffer in model.buffers():
            go(buffer)
            self.adopt([buffer], "buffers")
        self.go("build", 0, None)

    def transient(self, sizes: Iterable[int], operator: str) -> None:
        """Memory that a kernel takes and gives back inside one operator."""
        self.give(self.take(sizes, operator))

    def take(self, sizes: Iterable[int], operator: str) -> list[int]:
        """Record memory that a kernel allocates, until `give` frees it."""
        return self._take(((operator, tuple(sizes)),))

    def give(self, taken: Iterable[int]) -> None:
        """Free what `take` allocated."""
        for number in taken:
            self._died(number)

    def _take(self, wanted: Iterable[tuple[str, tuple[int, ...]]]) -> list[int]:
        return [self._record(size, operator) for operator, sizes in wanted for size in sizes if size]

    @contextlib.contextmanager
    def in_place(self, *operators: Any) -> Iterator[None]:
        """Let these operators write into their first argument, as they do where nobody is watching."""
        before, self._in_place = self._in_place, frozenset(operators)
        try:
            yield
        finally:
            self._in_place = before

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

    def __enter__(self) -> Self:
        """Watch. The garbage collector rests: nobody knows where in a real step it would come."""
        self._collects = gc.isenabled()
        gc.disable()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._is_watching = True
        counting.listen(self._note)
        return self

    def __exit__(self, *problem: object) -> None:
        """The end of the step. What dies later dies with the model, which is no part of it."""
        self._is_watching = False
        counting.listen(None)
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        if self._collects:
            gc.enable()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's guard against it takes a tenth of a trace."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `Kernels` has had its say above autograd; here it would be asked about every attribute that is read.
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        phase = self._phase
        if phase == "backward":
            self._follow_backward()
            if func in _IN_PLACE_IN_BACKWARD or (func is _ADD and self._is_sum_in_place(*args[:2])):
                self._pass_through(func, args, kwargs)
                self._count(func, args, args[0])
                return args[0]
        if func in self._in_place:
            self._pass_through(func, args, kwargs)
            self._count(func, args, args[0])
            return args[0].detach()
        result = self.values.answer(func, args) if func in QUESTIONS else NotImplemented
        if result is NotImplemented:
            result = call(func, args, kwargs)
        # Clipping computes all norms in one kernel, whose scratch is recorded separately.
        scratch = self._scratch(func, args, kwargs) if self._scratch and phase != "clip" else None
        held = self._take(scratch.held) if scratch else []
        if phase in _AFTER_BACKWARD:
            self._bear_by_parameter(result, func, args)
        elif isinstance(result, torch.Tensor):
            self._born(result, func)
            self.values.follow(func, result, args)
        elif isinstance(result, tuple | list):
            for item in self._in_order(func, result):
                if isinstance(item, torch.Tensor):
                    self._born(item, func)
        if scratch:
            for number in reversed([*held, *self._take(scratch.after)]):
                self._died(number)
        self._count(func, args, result)
        return result

    def _pass_through(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record the temporary memory of an operator that creates no storage."""
        scratch = self._scratch(func, args, kwargs) if self._scratch else None
        if scratch:
            for number in reversed(self._take((*scratch.held, *scratch.after))):
                self._died(number)

    def _count(self, func: Any, args: Any, result: Any) -> None:
        """Note what a call computes."""
        if self._counts and (found := counting.count(func, args, result)) is not None:
            self._note(*found)

    def _note(self, operator: str, number_format: int, flops: int, operands: tuple[int, ...]) -> None:
        if self._counts:
            self.trace.calls.append(Call(operator, self._place, number_format, flops, operands))

    def _bear_by_parameter(self, result: Any, func: Any, args: Any) -> None:
        """After backward, operators work on one parameter, or on a list of them: what they make belongs to the parameter's layer."""
        first: Any = args[0] if args else None
        many = isinstance(result, tuple | list)
        items = result if many else [result]
        pairs_up = many and isinstance(first, tuple | list) and len(first) == len(result)
        for item, source in zip(items, first if pairs_up else [first] * len(items), strict=True):
            if isinstance(item, torch.Tensor):
                place = self.trace.places[self._place]
                number = self._number(source) if isinstance(source, torch.Tensor) else None
                layer = self.trace.places[self.trace.births[number].place].layer if number is not None else None
                self.go(place.phase, place.round, layer)
                self._born(item, func)

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

    def _is_sum_in_place(self, into: torch.Tensor, other: Any) -> bool:
        """Whether autograd, where two gradients of one tensor meet, would add to the first one, since nobody else holds it.

        torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`) does so unless somebody is watching.
        """
        if torch.is_grad_enabled() or not isinstance(other, torch.Tensor) or into.shape != other.shape:
            return False
        references: Any = into
        shared = torch._C._storage_Use_Count(into.untyped_storage()._cdata)
        return (references._use_count(), shared) == self._alone

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
        if tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary and tensor.is_floating_point():
            self.trace.births[number].kind = "logits"

        def gone(_reference: Any, key: int = key, number: int = number) -> None:
            del self._alive[key]
            if self._is_watching:
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


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    counts = (0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.counts = args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


@cache
def _references_when_alone() -> tuple[int, int]:
    """References to a gradient and to its storage, seen from a dispatch mode, when autograd holds the only one: tried out."""
    watcher: Any = _Watcher()  # type: ignore[no-untyped-call]
    with torch.device("meta"), watcher:
        leaf = torch.zeros(1, requires_grad=True)
        torch.stack((leaf.sin(), leaf.cos())).sum().backward()  # type: ignore[no-untyped-call]
    counts: tuple[int, int] = watcher.counts
    return counts


def _sequence_number(value: Any) -> int:
    """The number of the autograd node that made a module's (first) input or output; -1 where there is none."""
    first = value[0] if isinstance(value, tuple) and value else value
    node = first.grad_fn if isinstance(first, torch.Tensor) else None
    return node._sequence_nr() if node is not None else -1
