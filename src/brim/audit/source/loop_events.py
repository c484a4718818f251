"""What happens in a function, in order: backward, step, clear, clip, and under which conditions and in which loops.

`read` looks at one function. `Flat` puts the events of the functions that it calls in the place of the calls, so that a loop whose body
is spread over methods reads like one whose body is not.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

from brim.audit.source.loop_reach import BACKWARD
from brim.audit.source.module import Function, Loop, last_name
from brim.audit.source.names import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.source.loop_losses import Losses, Traced
    from brim.audit.source.names import Names

Kind = Literal["backward", "step", "zero", "clip", "unscale", "update", "schedule", "empty", "read", "assign", "return", "call"]

_OPTIMIZER: Final = re.compile(r"opt|adam|sgd|lion|lbfgs|adafactor", re.IGNORECASE)
_SCHEDULER: Final = re.compile(r"sched|warm_?up|lr_?(step|decay|policy|lambda)|_lr$|^lr$", re.IGNORECASE)
_SCALER: Final = re.compile(r"scaler", re.IGNORECASE)
_FRAMEWORK: Final = re.compile(r"accel|fabric|engine|^self$|strategy|trainer|optim", re.IGNORECASE)
_CLIPS: Final = frozenset(
    {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grad_value", "clip_gradients", "clip_grads_with_norm_"}
)
_DEPTH: Final = 4
_INLINED: Final = 300
"""Calls that are followed from one root, so that the cost stays linear in what is looked at."""


@dataclass(frozen=True, eq=False)
class Guard:
    """A condition that holds where something happens."""

    test: ast.expr
    holds: bool
    scope: Scope

    def same(self, other: Guard) -> bool:
        """The same `if`, the same branch."""
        return self.test is other.test and self.holds == other.holds


@dataclass(frozen=True, eq=False)
class Place:
    """Where something happens."""

    scope: Scope
    loops: tuple[ast.AST, ...] = ()
    """Outermost first."""
    guards: tuple[Guard, ...] = ()
    withs: tuple[ast.expr, ...] = ()
    in_handler: bool = False
    depth: int = 0
    """Calls between the root and here."""

    def inside(self, outer: Place) -> Place:
        """This place, seen from a caller."""
        return Place(
            scope=self.scope,
            loops=outer.loops + self.loops,
            guards=outer.guards + self.guards,
            withs=outer.withs + self.withs,
            in_handler=outer.in_handler or self.in_handler,
            depth=outer.depth + 1 + self.depth,
        )

    def beyond(self, other: Place) -> list[Guard]:
        """The conditions that hold here and not there."""
        return [each for each in self.guards if not any(each.same(its) for its in other.guards)]

    def excludes(self, other: Place) -> bool:
        """Whether the two are different branches of one `if`."""
        return any(mine.test is its.test and mine.holds != its.holds for mine in self.guards for its in other.guards)


@dataclass(frozen=True, eq=False)
class Site:
    """A call that was followed, and where it stands."""

    call: ast.Call
    scope: Scope


@dataclass(frozen=True, eq=False)
class Event:
    """One thing that happens."""

    kind: Kind
    node: ast.Call | ast.stmt
    place: Place
    receiver: str = ""
    """Whose step, whose gradients: `self.optimizer`. Of a backward: the framework that runs it (`accelerator`), or empty."""
    loss: ast.expr | None = None
    """Of a backward: what it starts from."""
    scaler: str = ""
    """The gradient scaler that it goes through."""
    order: int = 0
    call: ast.Call | None = None
    """Of a call: itself, typed."""
    path: tuple[Site, ...] = field(default=())
    """The calls through which the root gets here."""


def read(scope: Scope) -> list[Event]:
    """The events of one function, without those of the functions that it calls."""
    reader = _Reader(scope)
    virtual = (scope.node,) if _is_called_per_batch(scope) else ()
    reader.block(scope.node.body, Place(scope, loops=virtual))
    return [replace(each, order=order) for order, each in enumerate(reader.events)]


def _is_called_per_batch(scope: Scope) -> bool:
    """Lightning calls `training_step` once for each batch: its body is the body of a loop."""
    return scope.name == "training_step" and scope.owner is not None and "manual_backward" in scope.called


class _Reader:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.events: list[Event] = []

    def block(self, body: Sequence[ast.stmt], place: Place) -> None:
        for statement in body:
            self.statement(statement, place)
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                place = replace(place, guards=(*place.guards, Guard(statement.test, False, self.scope)))

    def statement(self, node: ast.stmt, place: Place) -> None:
        if isinstance(node, Function | ast.ClassDef):
            return
        if isinstance(node, ast.If):
            self.expressions(node.test, place)
            self.block(node.body, replace(place, guards=(*place.guards, Guard(node.test, True, self.scope))))
            self.block(node.orelse, replace(place, guards=(*place.guards, Guard(node.test, False, self.scope))))
        elif isinstance(node, Loop):
            self.expressions(node.test if isinstance(node, ast.While) else node.iter, place)
            self.block(node.body, replace(place, loops=(*place.loops, node)))
            self.block(node.orelse, place)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.expressions(item.context_expr, place)
            if any(item.optional_vars is not None for item in node.items):
                self.events.append(Event("assign", node, place))
            self.block(node.body, replace(place, withs=(*place.withs, *(item.context_expr for item in node.items))))
        elif isinstance(node, ast.Try | ast.TryStar):
            self.block(node.body, place)
            for handler in node.handlers:
                self.block(handler.body, replace(place, in_handler=True))
            self.block(node.orelse, place)
            self.block(node.finalbody, place)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                self.block(case.body, place)
        else:
            self.simple(node, place)

    def simple(self, node: ast.stmt, place: Place) -> None:
        self.expressions(node, place)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            is_clear = isinstance(node, ast.Assign) and _clears_gradient(node)
            self.events.append(Event("zero" if is_clear else "assign", node, place, receiver="parameters" if is_clear else ""))
        elif isinstance(node, ast.Return) and node.value is not None:
            self.events.append(Event("return", node, place))

    def expressions(self, node: ast.AST, place: Place) -> None:
        """Arguments before the call that they go into."""
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.Lambda):
                self.expressions(child, place)
        if isinstance(node, ast.Call):
            self.events.append(_event(node, place))


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Continue | ast.Break | ast.Return | ast.Raise)


def _clears_gradient(node: ast.Assign) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in node.targets) and (
        isinstance(node.value, ast.Constant) and node.value.value is None
    )


def _event(call: ast.Call, place: Place) -> Event:
    name = last_name(call.func)
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    if name in BACKWARD and receiver is not None:
        return _backward(call, receiver, place)
    if name in _CLIPS:
        return Event("clip", call, place, receiver=_text(receiver), call=call)
    if receiver is None:
        return Event("call", call, place, call=call)
    kind: Kind = "call"
    whose = _whose(receiver)
    if name in {"step", "optimizer_step"}:
        return _step(call, receiver, place, name)
    if name in {"zero_grad", "optimizer_zero_grad"} or (name == "zero_" and ".grad" in _text(receiver)):
        kind = "zero"
    elif name == "unscale_" or name == "unscale_gradients":
        kind = "unscale"
    elif name == "update" and _SCALER.search(whose):
        kind = "update"
    elif name == "empty_cache":
        kind = "empty"
    elif name in {"item", "cpu", "tolist"} and not call.args:
        kind = "read"
    return Event(kind, call, place, receiver=_text(receiver), call=call)


def _backward(call: ast.Call, receiver: ast.expr, place: Place) -> Event:
    dotted = place.scope.module.dotted(call.func) or ""
    is_handed = bool(call.args) and (_FRAMEWORK.search(_whose(receiver)) or "loss" in ast.unparse(call.args[0]).lower())
    if call.args and (dotted == "torch.autograd.backward" or is_handed):
        framework = "" if dotted == "torch.autograd.backward" else _text(receiver)
        return Event("backward", call, place, receiver=framework, loss=call.args[0], call=call)
    if isinstance(receiver, ast.Call) and last_name(receiver.func) == "scale" and receiver.args:
        scaler = _text(receiver.func.value) if isinstance(receiver.func, ast.Attribute) else ""
        return Event("backward", call, place, loss=receiver.args[0], scaler=scaler, call=call)
    return Event("backward", call, place, loss=receiver, call=call)


def _step(call: ast.Call, receiver: ast.expr, place: Place, name: str) -> Event:
    whose = _whose(receiver)
    if _SCALER.search(whose) and call.args:
        return Event("step", call, place, receiver=_text(call.args[0]), scaler=_text(receiver), call=call)
    if _SCHEDULER.search(whose):
        return Event("schedule", call, place, receiver=_text(receiver), call=call)
    if _OPTIMIZER.search(whose) or name == "optimizer_step" or "engine" in whose:
        return Event("step", call, place, receiver=_text(receiver), call=call)
    return Event("call", call, place, receiver=_text(receiver), call=call)


def _whose(node: ast.expr) -> str:
    """The name that says what an object is: `self.optimizers()[0]` -> `optimizers`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return last_name(node)


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


class Flat:
    """The events of a function and of all that it calls, in order."""

    def __init__(self, root: Scope, names: Names, active: frozenset[Scope], cache: dict[int, list[Event]]) -> None:
        self.events: list[Event] = []
        self.scopes: dict[int, Scope] = {}
        """Everything that takes part, also the functions in which nothing happens that a loop is judged by."""
        self._names, self._active = names, active
        self._cache = cache
        self._left = _INLINED
        self._add(root, Place(root, depth=-1), (), ())

    def _add(self, scope: Scope, outer: Place, path: tuple[Site, ...], above: tuple[Scope, ...]) -> None:
        self.scopes[id(scope)] = scope
        if id(scope) not in self._cache:
            self._cache[id(scope)] = read(scope)
        for event in self._cache[id(scope)]:
            place = event.place.inside(outer)
            inner = self._inner(event, scope, above)
            # A call that is followed stays, in front of what it does: assignments from it are followed by name.
            kind = event.kind if inner is None else "call"
            self.events.append(
                Event(kind, event.node, place, event.receiver, event.loss, event.scaler, len(self.events), event.call, path)
            )
            if inner is not None and event.call is not None:
                self._left -= 1
                self._add(inner, place, (*path, Site(event.call, scope)), (*above, scope))

    def _inner(self, event: Event, scope: Scope, above: tuple[Scope, ...]) -> Scope | None:
        """The function behind a call, if it is worth following."""
        if event.call is None or len(above) >= _DEPTH or self._left <= 0 or _is_known(event):
            return None
        inner = self._names.resolve(event.call, scope)
        if inner is None or inner is scope or inner in above:
            return None
        self.scopes[id(inner)] = inner
        return inner if inner in self._active else None


def _is_known(event: Event) -> bool:
    """Whether the call already says what it does, so that there is nothing to look up."""
    return event.kind in {"unscale", "update", "schedule", "empty", "read"} or (event.kind == "backward" and not event.receiver)


class Timeline:
    """All that happens in a function and in what it calls, in order; shared by the loops in it."""

    def __init__(self, events: list[Event], losses: Losses) -> None:
        self.events = events
        self._losses = losses
        self._traced: dict[int, Traced] = {}

    @cached_property
    def by_kind(self) -> dict[str, list[Event]]:
        """The events of each kind."""
        found: dict[str, list[Event]] = {}
        for each in self.events:
            found.setdefault(each.kind, []).append(each)
        return found

    @cached_property
    def by_loop(self) -> dict[int, list[Event]]:
        """The events in each loop, by its id."""
        found: dict[int, list[Event]] = {}
        for each in self.events:
            for loop in each.place.loops:
                found.setdefault(id(loop), []).append(each)
        return found

    @cached_property
    def by_target(self) -> dict[str, list[Event]]:
        """The assignments to each name, whoever makes them."""
        found: dict[str, list[Event]] = {}
        for each in self.by_kind.get("assign", []):
            for name in targets_of(each.node):
                found.setdefault(name, []).append(each)
        return found

    @cached_property
    def by_callee(self) -> dict[str, list[Event]]:
        """The calls of each name."""
        found: dict[str, list[Event]] = {}
        for each in self.by_kind.get("call", []):
            if each.call is not None:
                found.setdefault(last_name(each.call.func), []).append(each)
        return found

    @cached_property
    def contexts(self) -> list[tuple[ast.expr, Scope]]:
        """What stands behind `with`, each once."""
        return list({id(each): (each, event.place.scope) for event in self.events for each in event.place.withs}.values())

    def traced(self, backward: Event) -> Traced:
        """What is known of the loss of a backward."""
        assert backward.loss is not None
        if id(backward) not in self._traced:
            traced = self._losses.trace(backward.loss, backward.place.scope, backward.path)
            traced.divisors = [each for each in traced.divisors if each.place is None or not each.place.excludes(backward.place)]
            self._traced[id(backward)] = traced
        return self._traced[id(backward)]

    @cached_property
    def to_backward(self) -> frozenset[str]:
        """The names that some backward starts from, and those in the expressions where its way back ends."""
        found: set[str] = set()
        for each in self.by_kind.get("backward", []):
            if each.loss is not None:
                traced = self.traced(each)
                found |= {name for _where, name in traced.names}
                found |= {
                    ast.unparse(its)
                    for end, _scope in traced.ends
                    for its in ast.walk(end)
                    if isinstance(its, ast.Name | ast.Attribute)
                }
        return frozenset(found)


def targets_of(node: ast.AST) -> list[str]:
    """The names that a statement sets, those of a tuple one by one."""
    if isinstance(node, ast.Assign):
        flat = [inner for each in node.targets for inner in (each.elts if isinstance(each, ast.Tuple) else [each])]
    else:
        flat = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []
    return [ast.unparse(each) for each in flat]
