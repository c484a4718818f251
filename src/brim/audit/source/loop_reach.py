"""Which function a call reaches, and which functions run a backward pass in the end.

A training loop is seldom in one piece: `fit` calls `train_epoch` calls `self.training_step`. Names are followed as far as they can be
followed without running anything: nested functions, functions of the file, imported ones, methods of the class and of its bases, and a
method of an unknown object if only one class of the project has such a method.
"""

from __future__ import annotations

import ast
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from brim.audit.source.module import Function, Module, last_name

if TYPE_CHECKING:
    from brim.audit.source.project import Project

BACKWARD: Final = frozenset({"backward", "manual_backward"})
ACTIONS: Final = BACKWARD | {
    "step", "optimizer_step", "zero_grad", "optimizer_zero_grad", "zero_", "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_",
    "clip_gradients", "unscale_", "unscale_gradients", "empty_cache", "autocast",
}  # fmt: skip
_DEPTH: Final = 4
_COMMON: Final = frozenset(
    {
        "step",
        "update",
        "forward",
        "__init__",
        "__call__",
        "backward",
        "get",
        "append",
        "add",
        "run",
        "main",
        "to",
        "item",
        "close",
        "reset",
    }
)
"""Method names that say nothing about whose method it is."""


@dataclass(eq=False)
class Scope:
    """A function, or the body of a file."""

    module: Module
    node: Function | ast.Module
    owner: ast.ClassDef | None = None
    outer: Scope | None = None
    inner: dict[str, Scope] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    """The last names of all that it calls."""
    own: set[str] = field(default_factory=set)
    """Those among them that it calls by name or on `self`: nobody else's."""
    made: dict[str, ast.expr] = field(default_factory=dict)
    """Of a name or attribute that holds the result of a call: what was called."""

    @property
    def name(self) -> str:
        """Of the function; empty for a file."""
        return self.node.name if isinstance(self.node, Function) else ""

    @property
    def parameters(self) -> list[str]:
        """By position, `self` included."""
        if isinstance(self.node, ast.Module):
            return []
        arguments = self.node.args
        return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


@dataclass(eq=False)
class Klass:
    """A class of the project."""

    module: Module
    node: ast.ClassDef
    methods: dict[str, Scope] = field(default_factory=dict)


class Reach:
    """Functions and classes of a project by name."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.scopes: list[Scope] = []
        self.by_module: dict[int, list[Scope]] = {}
        self.classes: dict[tuple[str, str], Klass] = {}
        self._methods: dict[str, list[Scope]] = {}
        self._calls: dict[int, list[ast.Call]] = {}
        self._calls_by_name: dict[int, dict[str, list[ast.Call]]] = {}
        for module in project.modules:
            self._read(module)

    def _read(self, module: Module) -> None:
        body = Scope(module, module.tree)
        self._calls[id(module)] = []
        self._collect(body, module.tree, None)
        self._calls[id(module)].sort(key=lambda each: (each.lineno, each.col_offset))

    def _collect(self, scope: Scope, node: ast.AST, owner: ast.ClassDef | None) -> None:
        """One walk over everything; each function becomes a scope of its own."""
        self.scopes.append(scope)
        self.by_module.setdefault(id(scope.module), []).append(scope)
        waiting: list[tuple[ast.AST, ast.ClassDef | None]] = [(child, owner) for child in ast.iter_child_nodes(node)]
        while waiting:
            here, klass = waiting.pop()
            if isinstance(here, Function):
                self._enter(scope, here, klass)
                continue
            if isinstance(here, ast.ClassDef):
                self.classes.setdefault((scope.module.name, here.name), Klass(scope.module, here))
                klass = here
            elif isinstance(here, ast.Call):
                self._calls[id(scope.module)].append(here)
                if name := last_name(here.func):
                    scope.called.add(name)
                    if isinstance(here.func, ast.Name) or _is_self(here.func):
                        scope.own.add(name)
            elif isinstance(here, ast.Assign) and isinstance(here.value, ast.Call) and (made := _short_name(here.targets[0])):
                scope.made[made] = here.value.func
            waiting += [(child, klass) for child in ast.iter_child_nodes(here)]

    def _enter(self, outer: Scope, node: Function, klass: ast.ClassDef | None) -> None:
        scope = Scope(outer.module, node, klass or outer.owner, outer)
        if klass is not None:
            self.classes[outer.module.name, klass.name].methods[node.name] = scope
            self._methods.setdefault(node.name, []).append(scope)
        else:
            outer.inner[node.name] = scope
        self._collect(scope, node, None)

    def body_of(self, module: Module) -> Scope:
        """The scope of a file's own statements."""
        return self.by_module[id(module)][0]

    def resolve(self, call: ast.Call, scope: Scope) -> Scope | None:
        """The function that a call runs, if it is one of the project."""
        function = call.func
        if isinstance(function, ast.Name):
            return self._named(function.id, scope)
        if isinstance(function, ast.Attribute):
            return self._method(function, scope)
        return None

    def _named(self, name: str, scope: Scope) -> Scope | None:
        here: Scope | None = scope
        while here is not None:
            if name in here.inner:
                return here.inner[name]
            here = here.outer
        return self._imported(scope.module.imports.get(name, ""))

    def _imported(self, dotted: str) -> Scope | None:
        where, _dot, name = dotted.rpartition(".")
        module = self.project.module(where) if where else None
        return self.body_of(module).inner.get(name) if module is not None and id(module) in self.by_module else None

    def _method(self, function: ast.Attribute, scope: Scope) -> Scope | None:
        value, name = function.value, function.attr
        if isinstance(value, ast.Name) and value.id in {"self", "cls"} and scope.owner is not None:
            return self.method(scope.module, scope.owner, name)
        if isinstance(value, ast.Name) and value.id in scope.module.imports:
            return self._imported(f"{scope.module.imports[value.id]}.{name}")
        if isinstance(value, ast.Call) and last_name(value.func) == "super":
            return None
        klass = self._class_of(value, scope)
        if klass is not None:
            return self.method(klass.module, klass.node, name)
        same = self._methods.get(name, [])
        return same[0] if len(same) == 1 and name not in _COMMON and not name.startswith("__") else None

    def _class_of(self, value: ast.expr, scope: Scope) -> Klass | None:
        """The class of the project that an object was made from, where that is in sight."""
        if not isinstance(value, ast.Name | ast.Attribute):
            return None
        made = self.maker(ast.unparse(value), scope)
        if made is None:
            return None
        where, _dot, name = (scope.module.dotted(made) or "").rpartition(".")
        return self.classes.get((where or scope.module.name, name))

    def maker(self, name: str, scope: Scope) -> ast.expr | None:
        """What was called to make the object behind a name: in the function, around it, or in another method of the class."""
        here: Scope | None = scope
        while here is not None:
            if name in here.made:
                return here.made[name]
            here = here.outer
        klass = self.classes.get((scope.module.name, scope.owner.name)) if scope.owner is not None else None
        if klass is not None and name.startswith("self."):
            return next((each.made[name] for each in klass.methods.values() if name in each.made), None)
        return None

    def method(self, module: Module, owner: ast.ClassDef, name: str) -> Scope | None:
        """A method of a class, or of a base of it in the project."""
        seen: set[int] = set()
        waiting = [self.classes.get((module.name, owner.name))]
        while waiting:
            klass = waiting.pop(0)
            if klass is None or id(klass) in seen:
                continue
            seen.add(id(klass))
            if name in klass.methods:
                return klass.methods[name]
            waiting += [self._base(klass, base) for base in klass.node.bases]
        return None

    def _base(self, klass: Klass, base: ast.expr) -> Klass | None:
        dotted = klass.module.dotted(base) or ""
        where, _dot, name = dotted.rpartition(".")
        return self.classes.get((where or klass.module.name, name))

    @cached_property
    def trainers(self) -> frozenset[Scope]:
        """The functions that run a backward pass, themselves or by what they call. By name only, so some that do not."""
        return self._closure(BACKWARD)

    @cached_property
    def active(self) -> frozenset[Scope]:
        """The functions in which something happens that a training loop is judged by, themselves or by what they call."""
        return self._closure(ACTIONS)

    def _closure(self, names: frozenset[str]) -> frozenset[Scope]:
        found = {each for each in self.scopes if each.called & names}
        fresh = set(found)
        for _hop in range(_DEPTH):
            fresh = {caller for each in fresh if each.name for caller in self._callers.get(each.name, [])} - found
            found |= fresh
        return frozenset(found)

    @cached_property
    def _callers(self) -> dict[str, list[Scope]]:
        callers: dict[str, list[Scope]] = {}
        for each in self.scopes:
            for name in (each.called - _COMMON) | each.own | self._of_made(each):
                callers.setdefault(name, []).append(each)
        return callers

    @cached_property
    def _class_names(self) -> frozenset[str]:
        return frozenset(name for _module, name in self.classes)

    def _of_made(self, scope: Scope) -> set[str]:
        """Methods with common names that it calls on objects of classes of the project."""
        common = scope.called & _COMMON
        if not common:
            return set()
        makers = [scope.made, *(each.made for each in ([scope.outer] if scope.outer else []))]
        return common if any(last_name(made) in self._class_names for each in makers for made in each.values()) else set()

    def callers(self, name: str) -> list[Scope]:
        """The functions that call something of this name."""
        return self._callers.get(name, [])

    def calls(self, module: Module, *names: str) -> list[ast.Call]:
        """The calls in a file, in the order of the text; of these names only, if any are given."""
        if not names:
            return self._calls[id(module)]
        by_name = self._calls_by_name.get(id(module))
        if by_name is None:
            by_name = self._calls_by_name[id(module)] = {}
            for each in self._calls[id(module)]:
                by_name.setdefault(last_name(each.func), []).append(each)
        found = [each for name in dict.fromkeys(names) for each in by_name.get(name, ())]
        return found if len(names) == 1 else sorted(found, key=lambda each: (each.lineno, each.col_offset))

    def importers(self, module: Module) -> list[Module]:
        """The files that import something from this one."""
        return self._importers.get(module.name, [])

    @cached_property
    def _importers(self) -> dict[str, list[Module]]:
        found: dict[str, list[Module]] = {}
        for each in self.project.modules:
            names = set(each.imports.values()) | {dotted.rpartition(".")[0] for dotted in each.imports.values()}
            for name in names - {each.name, ""}:
                found.setdefault(name, []).append(each)
        return found


def _short_name(node: ast.expr) -> str:
    """`name` or `self.name`; empty for anything longer."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_self(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"


_last: tuple[weakref.ref[Project], int, Reach] | None = None


def reach_of(project: Project) -> Reach:
    """The functions of a project; those of the last one asked for are kept, because every check asks."""
    global _last
    if _last is None or _last[0]() is not project or _last[1] != len(project.modules):
        _last = (weakref.ref(project), len(project.modules), Reach(project))
    return _last[2]
