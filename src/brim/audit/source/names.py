"""What a name means in a project: the module, class or function that it stands for.

Names are followed as far as they can be followed without running anything: imports, nested functions, functions of the file, methods of a
class and of its bases, objects by what they were made with, and a method of an unknown object if only one class has such a method.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

from brim.audit.source.module import Function, Module, last_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.audit.source.project import Project

_MOST_STEPS: Final = 8
"""From an object back to the class that it was made from."""
_WRAPPERS: Final = frozenset({"DistributedDataParallel", "DDP", "DataParallel", "compile", "prepare", "get_peft_model"})
_SAME: Final = frozenset({"to", "cuda", "train", "eval", "bfloat16", "float"})
"""Methods of a model that return the model."""
COMMON: Final = frozenset({
    "step", "update", "forward", "__init__", "__call__", "backward", "get", "append", "add", "run", "main", "to", "item", "close", "reset",
})  # fmt: skip
"""Method names that say nothing about whose method it is."""


class _Assigned(Protocol):
    @property
    def value(self) -> ast.expr: ...
    @property
    def index(self) -> int | None: ...


class Values(Protocol):
    """What names are set to in a function."""

    def assigned(self, scope: Scope, name: str) -> Sequence[_Assigned]:
        """Everything that a name is set to."""


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
    written: set[str] = field(default_factory=set)
    """The attributes of `self` that it sets."""
    made: dict[str, ast.expr] = field(default_factory=dict)
    """Of a name or attribute that holds the result of a call: what was called."""

    @property
    def name(self) -> str:
        """Of the function; empty for a file."""
        return self.node.name if isinstance(self.node, Function) else ""

    @property
    def outward(self) -> Iterator[Scope]:
        """This one and those that it is defined in, the nearest first."""
        here: Scope | None = self
        while here is not None:
            yield here
            here = here.outer

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


class Names:
    """The modules, classes and functions of a project by name."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.scopes: list[Scope] = []
        self.by_module: dict[int, list[Scope]] = {}
        """The body of each file, then its functions."""
        self.classes: dict[tuple[str, str], Klass] = {}
        """By module name and class name; of several, the first."""
        self._methods: dict[str, list[Scope]] = {}
        for module in project.modules:
            self._collect(Scope(module, module.tree))

    def _collect(self, scope: Scope) -> None:
        """One walk over everything; each function becomes a scope of its own."""
        self.scopes.append(scope)
        self.by_module.setdefault(id(scope.module), []).append(scope)
        waiting: list[tuple[ast.AST, ast.ClassDef | None]] = [(child, None) for child in ast.iter_child_nodes(scope.node)]
        while waiting:
            here, klass = waiting.pop()
            if isinstance(here, Function):
                self._enter(scope, here, klass)
                continue
            if isinstance(here, ast.ClassDef):
                self.classes.setdefault((scope.module.name, here.name), Klass(scope.module, here))
                klass = here
            elif isinstance(here, ast.Call) and (name := last_name(here.func)):
                scope.called.add(name)
                if isinstance(here.func, ast.Name) or _is_self(here.func):
                    scope.own.add(name)
            elif isinstance(here, ast.Assign) and isinstance(here.value, ast.Call) and (made := _short_name(here.targets[0])):
                scope.made[made] = here.value.func
            elif isinstance(here, ast.Attribute) and isinstance(here.ctx, ast.Store) and _is_self(here):
                scope.written.add(here.attr)
            waiting += [(child, klass) for child in ast.iter_child_nodes(here)]

    def _enter(self, outer: Scope, node: Function, klass: ast.ClassDef | None) -> None:
        scope = Scope(outer.module, node, klass or outer.owner, outer)
        if klass is not None:
            self.classes[outer.module.name, klass.name].methods[node.name] = scope
            self._methods.setdefault(node.name, []).append(scope)
        else:
            outer.inner[node.name] = scope
        self._collect(scope)

    def around(self, node: ast.AST, module: Module) -> Scope:
        """The function that a node stands in, or the body of the file."""
        function = module.enclosing(node, ast.FunctionDef, ast.AsyncFunctionDef)
        return self._by_node.get(id(function)) or self.by_module[id(module)][0]

    @cached_property
    def _by_node(self) -> dict[int, Scope]:
        return {id(each.node): each for each in self.scopes}

    def module(self, dotted: str, seen_from: Module) -> Module | None:
        """A module by its name: whole, or as seen from the folder of the one that imports it."""
        if not dotted:
            return None
        package = seen_from.name.rpartition(".")[0]
        found = self.project.module(dotted) or (self.project.module(f"{package}.{dotted}") if package else None)
        if found is None and "." in dotted:
            # `import myproject.config` with the target being the folder myproject itself, or its parent's src/.
            found = self.project.module(dotted.partition(".")[2])
        return found if found is not seen_from else None

    def place(self, dotted: str, seen_from: Module) -> tuple[Module, str] | None:
        """The module that an imported name stands for, or the one that it comes from and its name there."""
        module = self.module(dotted, seen_from)
        if module is not None:
            return module, ""
        base, _dot, name = dotted.rpartition(".")
        owner = self.module(base, seen_from)
        return (owner, name) if owner is not None else None

    def klass(self, node: ast.expr, module: Module) -> Klass | None:
        """The class that a name in this module means."""
        dotted = module.dotted(node) or ""
        owner, name = self.place(dotted, module) or (module, dotted)
        return self.classes.get((owner.name, name))

    def class_around(self, scope: Scope) -> Klass | None:
        """The class that a method, or a function in one, belongs to."""
        return self.classes.get((scope.module.name, scope.owner.name)) if scope.owner is not None else None

    def function(self, name: str, scope: Scope) -> Scope | None:
        """The function that a plain name means in a function: defined in it, around it, or imported."""
        inner = next((here.inner[name] for here in scope.outward if name in here.inner), None)
        return inner or self._imported(scope.module.imports.get(name, ""), scope.module)

    def resolve(self, call: ast.Call, scope: Scope) -> Scope | None:
        """The function that a call runs, if it is one of the project."""
        if isinstance(call.func, ast.Name):
            return self.function(call.func.id, scope)
        return self._method(call.func, scope) if isinstance(call.func, ast.Attribute) else None

    def _imported(self, dotted: str, module: Module) -> Scope | None:
        place = self.place(dotted, module)
        return self.by_module[id(place[0])][0].inner.get(place[1]) if place is not None else None

    def _method(self, function: ast.Attribute, scope: Scope) -> Scope | None:
        value, name = function.value, function.attr
        if isinstance(value, ast.Name) and value.id in {"self", "cls"} and scope.owner is not None:
            return self.method(self.class_around(scope), name)
        if isinstance(value, ast.Name) and value.id in scope.module.imports:
            return self._imported(f"{scope.module.imports[value.id]}.{name}", scope.module)
        if isinstance(value, ast.Call) and last_name(value.func) == "super":
            return None
        klass = self._class_of(value, scope)
        if klass is not None:
            return self.method(klass, name)
        same = self._methods.get(name, [])
        return same[0] if len(same) == 1 and name not in COMMON and not name.startswith("__") else None

    def _class_of(self, value: ast.expr, scope: Scope) -> Klass | None:
        """The class of the project that an object was made from, where that is in sight."""
        if not isinstance(value, ast.Name | ast.Attribute):
            return None
        made = self.maker(ast.unparse(value), scope)
        return self.klass(made, scope.module) if made is not None else None

    def maker(self, name: str, scope: Scope) -> ast.expr | None:
        """What was called to make the object behind a name: in the function, around it, or in another method of the class."""
        klass = self.class_around(scope) if name.startswith("self.") else None
        places = [*scope.outward, *(klass.methods.values() if klass is not None else ())]
        return next((each.made[name] for each in places if name in each.made), None)

    def made_class(self, value: ast.expr, scope: Scope, values: Values, depth: int = 0) -> Klass | None:
        """The class of the project that an object is of: also through `.to(...)`, wrappers and functions that return it."""
        if depth > _MOST_STEPS:
            return None
        if isinstance(value, ast.Call):
            return self._class_of_call(value, scope, values, depth + 1)
        if isinstance(value, ast.Tuple) and value.elts:
            return self.made_class(value.elts[0], scope, values, depth + 1)
        if not isinstance(value, ast.Name | ast.Attribute):
            return None
        name = ast.unparse(value)
        for here in self._where_set(name, scope):
            for each in values.assigned(here, name):
                found = self.made_class(each.value, here, values, depth + 1) if not each.index else None
                if found is not None:
                    return found
        return None

    def _where_set(self, name: str, scope: Scope) -> Iterator[Scope]:
        """The functions that may set a name, the nearest first; of `self.name` also other methods."""
        klass = self.class_around(scope)
        if klass is None or not name.startswith("self."):
            return scope.outward
        return (each for each in klass.methods.values() if name.partition(".")[2] in each.written)

    def _class_of_call(self, call: ast.Call, scope: Scope, values: Values, depth: int) -> Klass | None:
        klass = self.klass(call.func, scope.module)
        if klass is not None:
            return klass
        inner = self.resolve(call, scope)
        if inner is not None:
            returned = (each.value for each in ast.walk(inner.node) if isinstance(each, ast.Return) and each.value is not None)
            return next((found for each in returned if (found := self.made_class(each, inner, values, depth)) is not None), None)
        name = (scope.module.dotted(call.func) or "").rpartition(".")[2]
        if name in _WRAPPERS and call.args:
            return self.made_class(call.args[0], scope, values, depth)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME:
            return self.made_class(call.func.value, scope, values, depth)
        return None

    def method(self, klass: Klass | None, name: str) -> Scope | None:
        """A method of a class, or of a base of it in the project."""
        seen: set[Klass] = set()
        waiting = [klass]
        while waiting:
            here = waiting.pop(0)
            if here is None or here in seen:
                continue
            seen.add(here)
            if name in here.methods:
                return here.methods[name]
            waiting += [self.klass(base, here.module) for base in here.node.bases]
        return None

    def writers(self, owner: ast.ClassDef, name: str) -> list[Function]:
        """The methods of a class that set this attribute of `self`, in the order of the text; once for each time that they do."""
        return sorted(self._writers.get((owner, name), []), key=lambda each: each.lineno)

    @cached_property
    def homes(self) -> dict[ast.ClassDef, Module]:
        """The module that each class is written in."""
        return {node: module for module in self.project.modules for node in module.nodes if isinstance(node, ast.ClassDef)}

    @cached_property
    def _writers(self) -> dict[tuple[ast.ClassDef, str], list[Function]]:
        found: dict[tuple[ast.ClassDef, str], list[Function]] = {}
        for module in self.project.modules:
            for node in module.nodes:
                if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and last_name(node.value) == "self"):
                    continue
                for around in module.above(node):
                    if isinstance(around, Function) and isinstance(owner := module.parents[around], ast.ClassDef):
                        found.setdefault((owner, node.attr), []).append(around)
        return found


_last: tuple[int, Names] | None = None


def names_of(project: Project) -> Names:
    """The names of a project; those of the last one asked for are kept, because every check asks."""
    global _last
    if _last is None or _last[1].project is not project or _last[0] != len(project.modules):
        _last = (len(project.modules), Names(project))
    return _last[1]


def _short_name(node: ast.expr) -> str:
    """`name` or `self.name`; empty for anything longer."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_self(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"
