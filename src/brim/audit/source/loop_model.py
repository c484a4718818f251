"""A training loop as facts: where backward runs, when the optimizer steps, what a window of accumulation is, and who divides.

A *micro loop* is the innermost loop around a backward. If the optimizer steps inside it under a condition that backward does not have,
`(i + 1) % n == 0`, a window of n micro-batches makes one step. If the optimizer steps after it, the micro loop is the window.
"""

from __future__ import annotations

import ast
import re
import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, Literal

from brim.audit.source.loop_events import Event, Flat, Guard, Timeline
from brim.audit.source.loop_losses import ACCUMULATION, Assigned, Losses, Traced
from brim.audit.source.loop_reach import Reach, reach_of
from brim.audit.source.module import Function, Module, is_test, last_name
from brim.audit.source.names import Names, Scope, names_of
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.source.loop_events import Kind, Site
    from brim.audit.source.project import Project

Shape = Literal["modulo", "counter", "sync", "inner", "named"]

_BOUNDARY: Final = re.compile(
    r"sync_grad|should_(step|update|sync)|do_(step|update|sync)|is_(last|boundary|update|sync|final)|last_(micro|accum)|update_grad|accum",
    re.IGNORECASE,
)
_LAST: Final = re.compile(r"len|last|end|total|num_batches|n_batches|max_|remaining|steps_in|per_epoch|final|done", re.IGNORECASE)
_WINDOW: Final = re.compile(rf"{ACCUMULATION.pattern}|window|micro|chunk", re.IGNORECASE)
_MICRO: Final = re.compile(r"micro|chunk|split|sub_?batch|accum|shard", re.IGNORECASE)


@lru_cache(maxsize=2000)
def _occurs(pattern: str, code: str) -> bool:
    return re.search(pattern, code) is not None


@dataclass(frozen=True, eq=False)
class Window:
    """How many micro-batches make one optimizer step."""

    shape: Shape
    count: ast.expr | None
    """The number, as the code says it; None where it says only that there is one."""
    terms: frozenset[str]
    scope: Scope
    guard: Guard | None = None
    index: ast.expr | None = None
    """What is counted: the i of `(i + 1) % n`."""
    steps_on_last: bool = False
    """The condition also holds at the end of the data."""

    @property
    def text(self) -> str:
        """The number in the user's own words."""
        return "" if self.count is None else ast.unparse(self.count)

    @property
    def is_one(self) -> bool:
        """`range(1)`, `% 1`: no accumulation at all."""
        return isinstance(self.count, ast.Constant) and self.count.value == 1


@dataclass(eq=False)
class TrainLoop:
    """One micro loop, with all that happens in it and around it."""

    model: Model
    root: Scope
    timeline: Timeline
    chain: tuple[ast.AST, ...]
    """The loops around backward, outermost first."""
    backwards: list[Event]
    scopes: list[Scope]
    """The functions that take part, and their files."""
    modules: list[Module]
    window: Window | None = None

    @property
    def micro(self) -> ast.AST:
        """The innermost loop around backward."""
        return self.chain[-1]

    def of(self, kind: Kind) -> list[Event]:
        """The events of one kind in the micro loop."""
        return self._kinds_inside.get(kind, [])

    def all_of(self, *kinds: Kind) -> list[Event]:
        """The events of some kinds anywhere in the root."""
        by_kind = self.timeline.by_kind
        if len(kinds) == 1:
            return by_kind.get(kinds[0], [])
        return sorted((each for kind in kinds for each in by_kind.get(kind, [])), key=lambda each: each.order)

    @cached_property
    def _inside(self) -> list[Event]:
        depth = len(self.chain)
        return [
            each
            for each in self.timeline.by_loop.get(id(self.micro), [])
            if len(each.place.loops) >= depth and all(a is b for a, b in zip(each.place.loops, self.chain, strict=False))
        ]

    @cached_property
    def _kinds_inside(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = {}
        for each in self._inside:
            found.setdefault(each.kind, []).append(each)
        return found

    @cached_property
    def steps(self) -> list[Event]:
        """Where the optimizer steps inside the micro loop; where it steps in the loop around it, if the micro loop is the window."""
        inside = [each for each in self.of("step") if not each.place.in_handler]
        return inside or self.outer_steps

    @cached_property
    def outer_steps(self) -> list[Event]:
        """Steps right around the micro loop, behind it."""
        if isinstance(self.micro, Function):
            return []
        outer = self.chain[:-1]
        last = self.backwards[-1].order
        return [
            each
            for each in self.all_of("step")
            if each.order > last
            and len(each.place.loops) == len(outer)
            and all(a is b for a, b in zip(each.place.loops, outer, strict=True))
        ]

    @cached_property
    def later_steps(self) -> list[Event]:
        """Steps behind the micro loop: what is left over is stepped there."""
        last = self.backwards[-1].order
        inside = set(map(id, self._inside))
        return [each for each in self.all_of("step") if each.order > last and id(each) not in inside]

    def mentions(self, pattern: str) -> bool:
        """Whether a file that takes part has this in its code; comments do not count."""
        return any(self.model.has(pattern, each) for each in self.modules)

    @cached_property
    def framework(self) -> str:
        """Who runs backward: accelerate, fabric, lightning, engine, or nobody but torch."""
        for each in self.backwards:
            if each.call is not None and last_name(each.call.func) == "manual_backward":
                return "lightning"
            if not each.receiver:
                continue
            return self._framework(each)
        return ""

    def _framework(self, event: Event) -> str:
        """By what the object was made from, else by its name."""
        maker = self.model.names.maker(event.receiver, event.place.scope)
        for name in (last_name(maker) if maker is not None else "", event.receiver):
            if "accel" in name.lower():
                return "accelerate"
            if "fabric" in name.lower():
                return "fabric"
        return "engine"

    @cached_property
    def in_accumulate(self) -> bool:
        """Inside `with accelerator.accumulate(model)`: accelerate divides, skips steps and clears by itself."""
        contexts = [context for each in (*self.backwards, *self.of("step")) for context in each.place.withs]
        return any(isinstance(each, ast.Call) and last_name(each.func) == "accumulate" for each in contexts)

    @cached_property
    def has_closure(self) -> bool:
        """`optimizer.step(closure)`: the optimizer runs backward itself, as often as it likes."""
        return any(
            each.call is not None and not each.scaler and (each.call.args or any(k.arg == "closure" for k in each.call.keywords))
            for each in self.all_of("step")
        )

    @cached_property
    def optimizers(self) -> set[str]:
        """The optimizers that step in it."""
        return {each.receiver for each in self.steps}

    @cached_property
    def losses(self) -> list[tuple[Event, Traced]]:
        """Each backward with what is known of its loss."""
        return [(each, self.timeline.traced(each)) for each in self.backwards if each.loss is not None]

    def counts_micro_batches(self, expression: ast.expr, scope: Scope, path: tuple[Site, ...] = ()) -> bool:
        """Whether a number is the number of micro-batches: that of the window, or one that is named so."""
        terms = self.model.losses.terms(expression, scope, path)
        if self.window is not None and self.window.terms & terms:
            return True
        return any(ACCUMULATION.search(each) for each in terms)


class Model:
    """The training loops of a project."""

    def __init__(self, project: Project) -> None:
        self.names: Names = names_of(project)
        self.reach: Reach = reach_of(project)
        self._events: dict[int, list[Event]] = {}
        self._code: dict[int, str] = {}
        self._quotients: dict[int, list[tuple[ast.AST, ast.expr, ast.expr]]] = {}
        self._has: dict[tuple[int, str], bool] = {}
        self.losses = Losses(self.names, self._events)

    def code_of(self, module: Module) -> str:
        """The text of a file without its comments."""
        if id(module) not in self._code:
            self._code[id(module)] = re.sub(r"(?m)(^|\s)#.*$", "", module.source.text)
        return self._code[id(module)]

    def has(self, pattern: str, module: Module) -> bool:
        """Whether the code of a file matches; every loop in it asks the same."""
        key = (id(module), pattern)
        if key not in self._has:
            self._has[key] = re.search(pattern, self.code_of(module)) is not None
        return self._has[key]

    def quotients(self, scope: Scope) -> list[tuple[ast.AST, ast.expr, ast.expr]]:
        """The divisions in a function: itself, what is divided, and by what."""
        if id(scope) not in self._quotients:
            parts = ((node, quotient_of(node)) for node in ast.walk(scope.node))
            self._quotients[id(scope)] = [(node, *found) for node, found in parts if found is not None]
        return self._quotients[id(scope)]

    def in_module(self, module: Module) -> list[TrainLoop]:
        """The loops whose backward is reached from this file, the shortest way."""
        return self._by_module.get(id(module), [])

    @cached_property
    def _by_module(self) -> dict[int, list[TrainLoop]]:
        found: dict[int, list[TrainLoop]] = {}
        for each in self._all:
            found.setdefault(id(each.root.module), []).append(each)
        return found

    @cached_property
    def _all(self) -> list[TrainLoop]:
        best: dict[tuple[int, int], tuple[tuple[bool, int], TrainLoop]] = {}
        for scope in self.names.scopes:
            if scope not in self.reach.trainers:
                continue
            for loop in self._readable(scope):
                first = loop.backwards[0]
                rank = (not loop.steps, first.place.depth)
                key = (id(loop.micro), id(first.node))
                if key not in best or rank < best[key][0]:
                    best[key] = (rank, loop)
        return [loop for _rank, loop in best.values()]

    def _readable(self, scope: Scope) -> list[TrainLoop]:
        """The loops of a function; none where an expression is nested too deeply to be written out."""
        try:
            return list(self._of(scope))
        except RecursionError:
            note = _("{file}: {name} was not read in full, for it is nested too deeply.")
            self.names.project.notes.append(note.format(file=scope.module.source.file, name=scope.name or _("the module")))
            return []

    def _of(self, root: Scope) -> Iterator[TrainLoop]:
        flat = Flat(root, self.names, self.reach.active, self._events)
        timeline = Timeline(flat.events, self.losses)
        groups: dict[int, list[Event]] = {}
        for each in timeline.by_kind.get("backward", []):
            if each.place.loops and not each.place.in_handler:
                groups.setdefault(id(each.place.loops[-1]), []).append(each)
        modules = list({id(each.module): each.module for each in flat.scopes.values()}.values())
        for backwards in groups.values():
            loop = TrainLoop(self, root, timeline, backwards[0].place.loops, backwards, list(flat.scopes.values()), modules)
            loop.window = self._window(loop)
            yield loop

    def _window(self, loop: TrainLoop) -> Window | None:
        inside = [each for each in loop.of("step") if not each.place.in_handler]
        for step in inside:
            before = [each for each in loop.backwards if each.order < step.order] or loop.backwards
            for guard in step.place.beyond(before[-1].place):
                window = self._guarded(guard)
                if window is not None and not window.is_one and not _counts_the_loop(window, loop.chain):
                    return window
        if not inside and loop.outer_steps:
            return self._inner(loop)
        return None

    def _inner(self, loop: TrainLoop) -> Window | None:
        """`for _ in range(accumulation): ... backward()` and then a step."""
        micro = loop.micro
        if not isinstance(micro, ast.For):
            return None
        scope = loop.backwards[0].place.scope
        iterated = micro.iter
        while (
            isinstance(iterated, ast.Call)
            and last_name(iterated.func) in {"enumerate", "tqdm", "trange", "zip", "list"}
            and iterated.args
        ):
            iterated = iterated.args[0]
        if isinstance(iterated, ast.Call) and last_name(iterated.func) == "range" and iterated.args:
            count = iterated.args[1] if len(iterated.args) > 1 else iterated.args[0]
            window = Window("inner", count, self.losses.terms(count, scope), scope)
            is_window = isinstance(count, ast.Constant) or any(_WINDOW.search(each) for each in window.terms)
            return window if is_window and not window.is_one else None
        if _MICRO.search(ast.unparse(micro.iter)):
            length = ast.Call(ast.Name("len", ast.Load()), [iterated], [])
            return Window("inner", length, self.losses.terms(iterated, scope), scope)
        return None

    def _guarded(self, guard: Guard) -> Window | None:
        """What a condition says about the window; None if it is about something else."""
        tests = list(self._behind(guard.test, guard.scope))
        ends = any(_holds_at_the_end(each) for each in tests)
        for test in tests:
            for node in ast.walk(test):
                if (parts := remainder_of(node)) is not None:
                    index, count = parts
                    return Window("modulo", count, self.losses.terms(count, guard.scope), guard.scope, guard, index, ends)
        for test in tests:
            for node in ast.walk(test):
                if isinstance(node, ast.Attribute) and node.attr in {"sync_gradients", "is_gradient_accumulation_boundary"}:
                    return Window("sync", None, frozenset(), guard.scope, guard, steps_on_last=True)
                if isinstance(node, ast.Compare) and (window := self._counted(node, guard, ends)) is not None:
                    return window
        if any(_BOUNDARY.search(ast.unparse(test)) for test in tests):
            return Window("named", None, frozenset(), guard.scope, guard, steps_on_last=True)
        return None

    def _counted(self, node: ast.Compare, guard: Guard, ends: bool) -> Window | None:
        for side in (node.comparators[0], node.left):
            if isinstance(side, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ops[0], ast.Eq | ast.GtE | ast.Gt):
                terms = self.losses.terms(side, guard.scope)
                other = node.left if side is not node.left else node.comparators[0]
                if any(ACCUMULATION.search(each) for each in terms) and not isinstance(other, ast.Constant):
                    return Window("counter", side, terms, guard.scope, guard, other, ends)
        return None

    def value_of(self, node: ast.expr, scope: Scope) -> ast.expr:
        """What a name in a condition stands for, if it is set once in its function; any other expression as it is."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return node
        assigned = self.losses.assigned(scope, ast.unparse(node))
        return (_condition(assigned[0]) or node) if len(assigned) == 1 else node

    def remainder(self, node: ast.AST, scope: Scope) -> tuple[ast.expr, ast.expr] | None:
        """The two sides of a remainder, also behind a name."""
        return remainder_of(self.value_of(node, scope) if isinstance(node, ast.expr) else node)

    def _behind(self, test: ast.expr, scope: Scope, depth: int = 0) -> Iterator[ast.expr]:
        """A condition, and what its names and calls stand for."""
        yield test
        if depth > 2:
            return
        for node in ast.walk(test):
            if isinstance(node, ast.Name | ast.Attribute):
                for each in self.losses.assigned(scope, ast.unparse(node)):
                    if (value := _condition(each)) is not None:
                        yield from self._behind(value, scope, depth + 1)
            elif isinstance(node, ast.Call) and (inner := self.names.resolve(node, scope)) is not None:
                for event in self.losses.read(inner):
                    if event.kind == "return" and isinstance(event.node, ast.Return) and event.node.value is not None:
                        yield from self._behind(event.node.value, inner, depth + 2)


def quotient_of(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """What is divided, and by what."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.target, node.value
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and bool(node.args)
    if (
        is_method
        and isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"div_", "div", "mul_"}
    ):
        return node.func.value, node.args[0]
    return None


def remainder_of(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """The two sides of `a % b`, `divmod(a, b)[1]` or `math.fmod(a, b)`; None for string formatting and anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant | ast.JoinedStr):
        return node.left, node.right
    call = node.value if isinstance(node, ast.Subscript) else node
    if not isinstance(call, ast.Call) or len(call.args) != 2:
        return None
    is_rest = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 1
    is_remainder = last_name(call.func) == "divmod" if is_rest else last_name(call.func) in {"fmod", "mod", "remainder"}
    return (call.args[0], call.args[1]) if is_remainder else None


def _condition(assigned: Assigned) -> ast.expr | None:
    """What a name in a condition stands for: a comparison, a call, arithmetic, the rest of `divmod`."""
    value = assigned.value
    if assigned.index is None:
        return value if isinstance(value, ast.Compare | ast.BoolOp | ast.Call | ast.UnaryOp | ast.BinOp) else None
    if assigned.index == 1 and isinstance(value, ast.Call) and last_name(value.func) == "divmod":
        return ast.copy_location(ast.Subscript(value, ast.copy_location(ast.Constant(1), value), ast.Load()), value)
    return None


def _counts_the_loop(window: Window, chain: tuple[ast.AST, ...]) -> bool:
    """A number that changes with the loop is no size of a window."""
    targets = {
        each.id for loop in chain if isinstance(loop, ast.For) for each in ast.walk(loop.target) if isinstance(each, ast.Name)
    }
    return window.count is not None and any(isinstance(each, ast.Name) and each.id in targets for each in ast.walk(window.count))


def _holds_at_the_end(test: ast.expr) -> bool:
    """Whether a condition also speaks of the last batch: `or i + 1 == batches`, `or is_last`."""
    joined = [value for each in ast.walk(test) if isinstance(each, ast.BoolOp) for value in each.values]
    return any(_LAST.search(ast.unparse(value)) or _is_reached(value) for value in joined)


def _is_reached(value: ast.expr) -> bool:
    """A comparison with a name, which may well be the number of batches; `% n == 0` is none."""
    if not isinstance(value, ast.Compare) or not isinstance(value.ops[0], ast.Eq | ast.GtE):
        return False
    sides = (value.left, *value.comparators)
    return not any(
        isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for side in sides for each in ast.walk(side)
    ) and all(any(isinstance(each, ast.Name | ast.Attribute) for each in ast.walk(side)) for side in sides)


_last: tuple[weakref.ref[Project], int, Model] | None = None


def model_of(project: Project) -> Model:
    """The training loops of a project; those of the last one asked for are kept."""
    global _last
    if _last is None or _last[0]() is not project or _last[1] != len(project.modules):
        _last = (weakref.ref(project), len(project.modules), Model(project))
    return _last[2]


def loops_of(module: Module, project: Project) -> list[TrainLoop]:
    """The training loops of one file; none of a test, which trains for a few steps on purpose."""
    return [] if is_test(module) else model_of(project).in_module(module)
