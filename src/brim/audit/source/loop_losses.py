"""Where a loss comes from and what it was divided by on its way, across assignments, parameters and the functions that made it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_events import Event, Place, Site, read
from brim.audit.source.module import last_name
from brim.audit.source.names import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from brim.audit.source.names import Names

ACCUMULATION: Final = re.compile(
    r"accum|grad_?acc|acc_?steps|ga_steps|num_micro|n_micro|micro_?(batches|steps)|virtual_batch|update_freq|iter_size|subdivisions"
    r"|backward_passes|batch_multiplier",
    re.IGNORECASE,
)
"""Names that people give to the number of micro-batches in a step."""

_PLAIN: Final = frozenset(
    {"self", "cls", "args", "cfg", "config", "int", "max", "min", "len", "range", "float", "getattr", "hparams", "opt", "math"}
)
_THROUGH: Final = frozenset(
    {
        "mean",
        "sum",
        "float",
        "to",
        "double",
        "half",
        "squeeze",
        "view",
        "reshape",
        "cuda",
        "clone",
        "contiguous",
        "requires_grad_",
        "type",
    }
)
_DEPTH: Final = 12


Branch = tuple[tuple[int, int], ...]
"""The forks that lie between a loss and one of its parts: (which, which side)."""


@dataclass(frozen=True, eq=False)
class Divisor:
    """One division of the loss."""

    node: ast.AST
    """The division itself."""
    by: ast.expr
    scope: Scope
    path: tuple[Site, ...]
    place: Place | None
    """None inside the call of backward itself."""
    branch: Branch = ()

    @property
    def is_of_this_micro_batch(self) -> bool:
        """A sum over a mask, a length, a size: the mean over one micro-batch, whatever their number is."""
        for each in ast.walk(self.by):
            if isinstance(each, ast.Call) and last_name(each.func) in {
                "sum",
                "numel",
                "size",
                "len",
                "count_nonzero",
                "nelement",
            }:
                return True
            if isinstance(each, ast.Attribute) and each.attr == "shape":
                return True
        return False

    def follows(self, other: Divisor) -> bool:
        """Whether what was divided there is divided here too, and not only beside it."""
        sides = dict(other.branch)
        if any(sides.get(fork, side) != side for fork, side in self.branch):
            return False
        return self.place is None or other.place is None or not self.place.excludes(other.place)


@dataclass
class Traced:
    """What is known of a loss."""

    divisors: list[Divisor] = field(default_factory=list)
    ends: list[tuple[ast.expr, Scope]] = field(default_factory=list)
    """Where the way back ends: `outputs.loss`, `F.cross_entropy(...)`, a name nobody assigns."""
    is_summed: bool = False
    names: set[tuple[int, str]] = field(default_factory=set)
    """The names that held it, each with the function (by its id) in which it did."""
    seen: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class _Way:
    """How the way back came here."""

    scope: Scope
    path: tuple[Site, ...]
    place: Place | None = None
    branch: Branch = ()
    depth: int = 0
    index: int = 0
    """Of a tuple that a function returns: which of its elements is meant."""


@dataclass(frozen=True, eq=False)
class Assigned:
    """One assignment to a name."""

    value: ast.expr
    event: Event
    index: int | None = None
    """Of a tuple: which of its elements."""


class Losses:
    """Follows values back. Reads each function once."""

    def __init__(self, names: Names, events: dict[int, list[Event]]) -> None:
        self.names = names
        self.events = events
        self._assigned: dict[int, dict[str, list[Assigned]]] = {}

    def read(self, scope: Scope) -> list[Event]:
        """The events of one function."""
        if id(scope) not in self.events:
            self.events[id(scope)] = read(scope)
        return self.events[id(scope)]

    def assigned(self, scope: Scope, name: str) -> list[Assigned]:
        """Everything that a name is set to in a function, in the order of the text."""
        if id(scope) not in self._assigned:
            table: dict[str, list[Assigned]] = {}
            for event in self.read(scope):
                if event.kind in {"assign", "zero"}:
                    for target, assigned in _targets(event):
                        table.setdefault(target, []).append(assigned)
            self._assigned[id(scope)] = table
        return self._assigned[id(scope)].get(name, [])

    def terms(self, expression: ast.expr, scope: Scope, path: tuple[Site, ...] = (), depth: int = 0) -> frozenset[str]:
        """The names and numbers that a count is made of, those behind its names included."""
        found: set[str] = set()
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant):
                if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > 1:
                    found.add(str(node.value))
                elif isinstance(node.value, str):
                    found.add(node.value)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Name):
                found.add(node.id)
                if depth < 3:
                    found |= self._behind(node.id, scope, path, depth)
        return frozenset(found - _PLAIN)

    def _behind(self, name: str, scope: Scope, path: tuple[Site, ...], depth: int) -> frozenset[str]:
        assigned = self.assigned(scope, name)
        if len(assigned) == 1 and assigned[0].index is None and _is_alias(assigned[0].value):
            return self.terms(assigned[0].value, scope, path, depth + 1)
        if not assigned and path and (argument := argument_of(name, scope, path[-1].call)) is not None:
            return self.terms(argument, path[-1].scope, path[:-1], depth + 1)
        if not assigned and scope.outer is not None and name not in scope.parameters:
            return self._behind(name, scope.outer, (), depth)
        return frozenset()

    def trace(self, expression: ast.expr, scope: Scope, path: tuple[Site, ...]) -> Traced:
        """Follow a loss back."""
        traced = Traced()
        self._trace(expression, _Way(scope, path), traced)
        return traced

    def _trace(self, node: ast.expr, way: _Way, traced: Traced) -> None:
        if way.depth > _DEPTH or id(node) in traced.seen:
            return
        traced.seen.add(id(node))
        way = replace(way, depth=way.depth + 1)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            self._trace(node.left, way, traced)
            traced.divisors.append(Divisor(node, node.right, way.scope, way.path, way.place, way.branch))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            self._trace_product(node, way, traced)
        elif isinstance(node, ast.BinOp):
            self._trace_either(node, (node.left, node.right), way, traced)
        elif isinstance(node, ast.IfExp):
            self._trace_either(node, (node.body, node.orelse), way, traced)
        elif isinstance(node, ast.Call):
            self._trace_call(node, way, traced)
        elif isinstance(node, ast.Name | ast.Attribute):
            self._trace_name(node, way, traced)
        else:
            traced.ends.append((node, way.scope))

    def _trace_either(self, node: ast.AST, parts: Iterable[ast.expr], way: _Way, traced: Traced) -> None:
        """Ways that part here: what is divided on one is not divided again on the other."""
        for side, each in enumerate(parts):
            self._trace(each, replace(way, branch=(*way.branch, (id(node), side))), traced)

    def _trace_product(self, node: ast.BinOp, way: _Way, traced: Traced) -> None:
        for factor, other in ((node.left, node.right), (node.right, node.left)):
            if (by := self._reciprocal(factor, way.scope)) is not None:
                traced.divisors.append(Divisor(node, by, way.scope, way.path, way.place, way.branch))
                self._trace(other, way, traced)
                return
        self._trace(node.left, way, traced)
        self._trace(node.right, way, traced)

    def _reciprocal(self, node: ast.expr, scope: Scope) -> ast.expr | None:
        """The n of `1 / n`, also behind a name."""
        if isinstance(node, ast.Name):
            assigned = self.assigned(scope, node.id)
            node = assigned[0].value if len(assigned) == 1 else node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.left, ast.Constant):
            return node.right
        return None

    def _trace_call(self, call: ast.Call, way: _Way, traced: Traced) -> None:
        name = last_name(call.func)
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_torch = receiver is not None and (way.scope.module.dotted(receiver) or "").partition(".")[0] == "torch"
        subject = call.args[0] if (is_torch or receiver is None) and call.args else receiver
        if (
            subject is not None
            and name in {"div", "div_", "true_divide", "mul", "mul_", "multiply"}
            and len(call.args) > is_torch
        ):
            by = call.args[1 if is_torch else 0]
            by = (self._reciprocal(by, way.scope) or by) if name.startswith("mul") else by
            traced.divisors.append(Divisor(call, by, way.scope, way.path, way.place, way.branch))
            self._trace(subject, way, traced)
        elif subject is not None and name in _THROUGH:
            traced.is_summed |= name == "sum"
            self._trace(subject, way, traced)
        elif name in {"scale", "scale_loss"} and call.args:
            self._trace(call.args[0], way, traced)
        elif (inner := self.names.resolve(call, way.scope)) is not None and len(way.path) < 5:
            self._trace_returns(call, inner, way, traced)
        else:
            traced.ends.append((call, way.scope))

    def _trace_returns(self, call: ast.Call, inner: Scope, way: _Way, traced: Traced) -> None:
        path = (*way.path, Site(call, way.scope))
        for side, event in enumerate(self.read(inner)):
            if event.kind != "return" or not isinstance(event.node, ast.Return) or event.node.value is None:
                continue
            value = event.node.value
            if isinstance(value, ast.Tuple) and value.elts:
                value = value.elts[min(way.index, len(value.elts) - 1)]
            branch = (*way.branch, (id(inner), side))
            self._trace(value, replace(way, scope=inner, path=path, place=event.place, branch=branch, index=0), traced)

    def _trace_name(self, node: ast.Name | ast.Attribute, way: _Way, traced: Traced) -> None:
        name = ast.unparse(node)
        traced.names.add((id(way.scope), name))
        before = [each for each in self.assigned(way.scope, name) if comes_before(each.event.node, node)]
        if before:
            self._trace_assigned(before, way, traced)
            return
        elsewhere = self._set_elsewhere(name, way.scope)
        if elsewhere is not None:
            self._trace_assigned(elsewhere[1], replace(way, scope=elsewhere[0], path=()), traced)
            return
        argument = argument_of(name, way.scope, way.path[-1].call) if way.path else None
        if argument is None:
            traced.ends.append((node, way.scope))
        else:
            self._trace(argument, replace(way, scope=way.path[-1].scope, path=way.path[:-1], place=None), traced)

    def _set_elsewhere(self, name: str, scope: Scope) -> tuple[Scope, list[Assigned]] | None:
        """The one other method of the class that sets `self.loss`, and what it sets it to."""
        klass = self.names.class_around(scope)
        if klass is None or not name.startswith("self."):
            return None
        attribute = name.partition(".")[2]
        methods = [each for each in klass.methods.values() if each is not scope and attribute in each.written]
        return (methods[0], self.assigned(methods[0], name)) if len(methods) == 1 and methods[0].name != "__init__" else None

    def _trace_assigned(self, before: list[Assigned], way: _Way, traced: Traced) -> None:
        """From the last assignment back to the first that surely happens."""
        latest = before[-1].event.place
        for side, each in enumerate(reversed(before)):
            place, statement = each.event.place, each.event.node
            if place.excludes(latest):
                continue
            if isinstance(statement, ast.AugAssign):
                if isinstance(statement.op, ast.Div | ast.Mult) and id(statement) not in traced.seen:
                    traced.seen.add(id(statement))
                    by = statement.value
                    if isinstance(statement.op, ast.Mult):
                        by = self._reciprocal(by, way.scope) or by
                    traced.divisors.append(Divisor(statement, by, way.scope, way.path, place, way.branch))
                continue
            value, index = each.value, each.index or 0
            if each.index is not None and isinstance(value, ast.Tuple) and each.index < len(value.elts):
                value, index = value.elts[each.index], 0
            branch = (*way.branch, (id(latest), side))
            self._trace(value, replace(way, place=place, branch=branch, index=index), traced)
            if not place.beyond(latest):
                return


def argument_of(name: str, scope: Scope, call: ast.Call) -> ast.expr | None:
    """What a call hands to a parameter."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    parameters = scope.parameters
    if name not in parameters:
        return None
    is_method = scope.owner is not None and bool(parameters) and parameters[0] in {"self", "cls"}
    index = parameters.index(name) - (1 if is_method and isinstance(call.func, ast.Attribute) else 0)
    before = call.args[: index + 1]
    if 0 <= index < len(call.args) and not any(isinstance(each, ast.Starred) for each in before):
        return call.args[index]
    return None


def _targets(event: Event) -> Iterator[tuple[str, Assigned]]:
    node = event.node
    if isinstance(node, ast.AugAssign):
        yield ast.unparse(node.target), Assigned(node.value, event)
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield ast.unparse(node.target), Assigned(node.value, event)
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            if item.optional_vars is not None:
                yield ast.unparse(item.optional_vars), Assigned(item.context_expr, event)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                for index, element in enumerate(target.elts):
                    yield ast.unparse(element), Assigned(node.value, event, index)
            else:
                yield ast.unparse(target), Assigned(node.value, event)


def comes_before(statement: ast.AST, node: ast.AST) -> bool:
    """Whether a statement ends before a node begins, in the text."""
    first, second = getattr(statement, "lineno", 0), getattr(node, "lineno", 0)
    if isinstance(statement, ast.With | ast.AsyncWith):
        return bool(first < second)
    return bool(
        (getattr(statement, "end_lineno", first), getattr(statement, "end_col_offset", 0))
        < (second, getattr(node, "col_offset", 0) + 1)
    )


def _is_alias(node: ast.expr) -> bool:
    """`n = config.accumulation`, `n = max(1, args.steps)`, `n = getattr(args, "steps", 1)`: the same number under another name."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Constant):
        return True
    if isinstance(node, ast.Call) and last_name(node.func) in {"max", "int", "getattr", "get"}:
        return all(_is_alias(each) for each in node.args)
    if isinstance(node, ast.Subscript):
        return True
    return isinstance(node, ast.BoolOp) and all(_is_alias(each) for each in node.values)
