"""Statements: assignments, branches and loops, and what each leaves behind."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Literal

from brim.audit.source.expressions import bound_name
from brim.audit.source.module import Function, calls_of, last_name
from brim.audit.source.quantities import quantity_of
from brim.audit.source.state import Frame, Layer, State
from brim.audit.source.terms import (
    Apply,
    Choice,
    ClassRef,
    Constant,
    FunctionRef,
    Instance,
    Opaque,
    Repeat,
    Setting,
    Several,
    Term,
    settings_in,
)
from brim.audit.source.uses import WINDOW

if TYPE_CHECKING:
    from brim.audit.source.expressions import Evaluator
    from brim.audit.source.settings import Settings
    from brim.audit.source.terms import Kind
    from brim.audit.source.uses import Uses

End = Literal["return", "raise"] | None
"""How a block ends: by a return, by an error or a jump, or (None) by coming to its end."""
_MOST_STATEMENTS = 150_000
_MOST_FOR_ONE_ROOT = 8_000
_GETTER = re.compile(r"^_*(get|compute|choose|pick|determine|calc|calculate|resolve|find|select|safe|make)_")


class Executor:
    """Goes through statements."""

    def __init__(self, evaluator: Evaluator, settings: Settings, uses: Uses) -> None:
        self._evaluator, self._settings, self._uses = evaluator, settings, uses
        self._left = _MOST_STATEMENTS
        """Statements that may still be gone through, in all and from one root."""
        self._root_left = _MOST_FOR_ONE_ROOT

    @property
    def is_spent(self) -> bool:
        """Whether no more statements may be gone through from this root."""
        return self._left <= 0 or self._root_left <= 0

    def start_root(self) -> None:
        """Begin with something that nothing has called."""
        self._root_left = _MOST_FOR_ONE_ROOT

    def block(self, statements: list[ast.stmt], frame: Frame) -> End:
        """Go through statements; says how the block ends, if it does not come to its end."""
        for statement in statements:
            self._left -= 1
            self._root_left -= 1
            method = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            if method is None:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.expr):
                        self._evaluator.value(child, frame)
            elif (end := method(statement, frame)) is not None:
                return end  # type: ignore[no-any-return]
        return None

    def _do_assign(self, node: ast.Assign, frame: Frame) -> End:
        term = self._evaluator.value(node.value, frame)
        for target in node.targets:
            self._assign(target, term, node.value, frame)
        return None

    def _do_annassign(self, node: ast.AnnAssign, frame: Frame) -> End:
        if node.value is not None:
            self._assign(node.target, self._evaluator.value(node.value, frame), node.value, frame)
        return None

    def _do_augassign(self, node: ast.AugAssign, frame: Frame) -> End:
        whole = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
        term = self._evaluator.value(whole, frame)
        self._evaluator.bind(node.target, term, frame)
        return None

    def _do_if(self, node: ast.If, frame: Frame) -> End:
        condition = self._evaluator.value(node.test, frame)
        self._window(node, frame)
        before = frame.state
        then, otherwise = before.branch(), before.branch()
        negated = Apply(frame.module, node.test, "not", (condition,))
        ends: list[End] = []
        for state, holds, body in ((then, condition, node.body), (otherwise, negated, node.orelse)):
            frame.state = state
            frame.conditions.append((holds, node))
            ends.append(self.block(body, frame))
            frame.conditions.pop()
        frame.state = before
        if ends[0] is None and ends[1] is not None:
            before.take(then)
        elif ends[0] is not None and ends[1] is None:
            if ends[0] == "return":  # what it did to objects is seen by whoever called
                self._join_heaps(condition, then, otherwise, node, frame)
            else:
                before.take(otherwise)
            before.names.own.update(otherwise.names.own)
        else:
            self._join(condition, then, otherwise, node, frame)
        return ends[0] if ends[0] is not None and ends[1] is not None else None

    def _join(self, condition: Term, then: State, otherwise: State, node: ast.AST, frame: Frame) -> None:
        """After a branch: what the two sides leave differently becomes a choice."""
        for name in {**then.names.own, **otherwise.names.own}:
            mine, theirs = otherwise.names.get(name), then.names.get(name)
            known = (
                mine if theirs is None else theirs if mine is None else self._either(condition, theirs, mine, name, node, frame)
            )
            assert known is not None
            frame.state.names[name] = known
        self._join_heaps(condition, then, otherwise, node, frame)

    def _join_heaps(self, condition: Term, then: State, otherwise: State, node: ast.AST, frame: Frame) -> None:
        for key in {**then.heap.own, **otherwise.heap.own}:
            sides = [self._now(state, key, node, frame) for state in (then, otherwise)]
            frame.state.heap[key] = self._either(condition, sides[0], sides[1], key[1], node, frame)

    def _now(self, state: State, key: tuple[Term, str], node: ast.AST, frame: Frame) -> Term:
        """An attribute in one of two states; read there, if nothing has touched it yet."""
        known = state.heap.get(key)
        if known is None:
            known = self._evaluator.attribute(key[0], key[1], node, Frame(frame.module, state, frame.function, frame.globals))
        return known

    def _either(self, condition: Term, then: Term, otherwise: Term, name: str, node: ast.AST, frame: Frame) -> Term:
        if then is otherwise or (isinstance(then, Opaque) and isinstance(otherwise, Opaque)):
            return then
        choice = Choice(frame.module, node, condition, then, otherwise)
        if isinstance(node, ast.If):
            self._uses.keep_named(name, choice, node.test, frame)
        return choice

    def _window(self, node: ast.If, frame: Frame) -> None:
        """`if (i + 1) % n == 0: optimizer.step()`: n is the accumulation in force."""
        divided = [each for each in ast.walk(node.test) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod)]
        if divided and _steps(node):
            for each in divided:
                self._uses.keep("accumulation", "", self._evaluator.value(each.right, frame), each.right, frame, WINDOW)

    def _do_for(self, node: ast.For | ast.AsyncFor, frame: Frame) -> End:
        source = self._evaluator.value(node.iter, frame)
        self._evaluator.bind(node.target, Opaque(frame.module, node.target, "item", (source,)), frame)
        counted = node.iter.args if isinstance(node.iter, ast.Call) and last_name(node.iter.func) == "range" else []
        if len(counted) == 1 and _accumulates(node):
            self._uses.keep("accumulation", "", self._evaluator.value(counted[0], frame), counted[0], frame, WINDOW)
        self.block(node.body, frame)
        self.block(node.orelse, frame)
        return None

    _do_asyncfor = _do_for

    def _do_while(self, node: ast.While, frame: Frame) -> End:
        if self._repeat(node, frame):
            return None
        self._evaluator.value(node.test, frame)
        self.block(node.body, frame)
        self.block(node.orelse, frame)
        return None

    def _repeat(self, node: ast.While, frame: Frame) -> bool:
        """`while bs > 16: bs //= 2`."""
        body = node.body[0]
        if len(node.body) != 1 or not isinstance(body, ast.AugAssign | ast.Assign):
            return False
        target = body.target if isinstance(body, ast.AugAssign) else body.targets[0]
        start = frame.state.names.get(target.id) if isinstance(target, ast.Name) else None
        if not isinstance(target, ast.Name) or start is None:
            return False
        turning = Setting(frame.module, node, target.id, None, "default")
        frame.state.names[target.id] = turning
        condition = self._evaluator.value(node.test, frame)
        self.block(node.body, frame)
        after = frame.state.names.get(target.id)
        assert after is not None
        frame.state.names[target.id] = found = Repeat(frame.module, node, start, turning, condition, after)
        self._uses.keep_named(target.id, found, node.test, frame)
        return True

    def _do_with(self, node: ast.With | ast.AsyncWith, frame: Frame) -> End:
        for item in node.items:
            term = self._evaluator.value(item.context_expr, frame)
            if item.optional_vars is not None:
                self._evaluator.bind(item.optional_vars, term, frame)
        return self.block(node.body, frame)

    _do_asyncwith = _do_with

    def _do_try(self, node: ast.Try, frame: Frame) -> End:
        end = self.block(node.body, frame)
        for handler in node.handlers:
            self._perhaps(handler.body, Opaque(frame.module, handler, "exception"), handler, frame)
        self.block(node.orelse, frame)
        return self.block(node.finalbody, frame) or (end if not node.handlers else None)

    _do_trystar = _do_try

    def _do_match(self, node: ast.Match, frame: Frame) -> End:
        self._evaluator.value(node.subject, frame)
        for case in node.cases:
            self._perhaps(case.body, Opaque(frame.module, node.subject, "case"), node, frame)
        return None

    def _perhaps(self, body: list[ast.stmt], condition: Opaque, node: ast.AST, frame: Frame) -> None:
        """Go through statements that may not run, under a condition that is unknown."""
        before = frame.state
        branch, other = before.branch(), before.branch()
        frame.state = branch
        ended = self.block(body, frame)
        frame.state = before
        if ended is None:
            self._join(condition, branch, other, node, frame)

    def _do_return(self, node: ast.Return, frame: Frame) -> End:
        term = self._evaluator.value(node.value, frame)
        frame.results.append((tuple(frame.conditions), term))
        name = _GETTER.sub("", frame.function.name) if frame.function else ""
        if node.value is not None:
            self._uses.keep_named(name, term, node.value, frame)
        return "return"

    def _do_raise(self, _node: ast.Raise, _frame: Frame) -> End:
        return "raise"

    _do_continue = _do_break = _do_raise

    def _do_functiondef(self, node: Function, frame: Frame) -> End:
        reference = FunctionRef(frame.module, node, node, None, frame.state.names)
        frame.state.names[node.name] = reference
        if frame.function is not None:
            frame.nested.append(reference)
        return None

    _do_asyncfunctiondef = _do_functiondef

    def _do_classdef(self, node: ast.ClassDef, frame: Frame) -> End:
        frame.state.names[node.name] = ClassRef(frame.module, node, node)
        body = [each for each in node.body if not isinstance(each, Function | ast.ClassDef)]
        if any(not isinstance(each.value, ast.Constant) for each in body if isinstance(each, ast.Assign)):
            inner = State(Layer(frame.state.names), frame.state.heap)
            self.block(body, Frame(frame.module, inner, None, frame.globals))
        return None

    def _assign(self, target: ast.expr, term: Term, node: ast.expr, frame: Frame) -> None:
        if (
            isinstance(target, ast.Tuple | ast.List)
            and isinstance(term, Several)
            and isinstance(node, ast.Tuple | ast.List)
            and len(target.elts) == len(term.elements) == len(node.elts)
        ):
            for each, part, value in zip(target.elts, term.elements, node.elts, strict=True):
                self._assign(each, part, value, frame)
            return
        name = bound_name(target)
        if quantity_of(name) is not None:
            term = self._as_setting(name, term, node, target, frame)
            self._uses.keep_named(name, term, node, frame)
        self._evaluator.bind(target, term, frame)

    def _as_setting(self, name: str, term: Term, node: ast.expr, target: ast.expr, frame: Frame) -> Term:
        """`BATCH_SIZE = 64`: a number under such a name is where a user sets it."""
        if isinstance(term, Constant) and isinstance(term.value, int | float):
            kind: Kind = "field" if self._is_of_own_config(target, frame) else "constant"
            return self._settings.at(name, frame.module, node, kind=kind, value=term.value, place=node)
        return term

    def _is_of_own_config(self, target: ast.expr, frame: Frame) -> bool:
        """`config = TrainConfig()` and then `config.batch_size = 16`, in one function: this is where it is set."""
        if not isinstance(target, ast.Attribute | ast.Subscript):
            return False
        base = self._evaluator.value(target.value, frame)
        call = base.node
        if not isinstance(base, Instance | Opaque) or not isinstance(call, ast.Call) or not last_name(call.func)[:1].isupper():
            return False
        known = frame.state.heap.get((base, bound_name(target)))
        if known is not None and any(each.kind in {"flag", "environment", "key"} for each in settings_in(known)):
            return False
        around = [frame.module.enclosing(each, ast.FunctionDef, ast.AsyncFunctionDef) for each in (call, target)]
        return call in frame.module.parents and around[0] is around[1]


def _steps(node: ast.If) -> bool:
    """Whether the body of an `if` steps an optimizer."""
    functions = (call.func for statement in node.body for call in calls_of(statement))
    owners = (last_name(each.value).lower() for each in functions if isinstance(each, ast.Attribute) and each.attr == "step")
    return any("opt" in owner or "scaler" in owner for owner in owners)


def _accumulates(node: ast.For | ast.AsyncFor) -> bool:
    """Whether a loop runs backward and leaves the optimizer's step to what comes after it."""
    names = {last_name(call.func) for statement in node.body for call in calls_of(statement)}
    return "backward" in names and "step" not in names
