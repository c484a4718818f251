"""Calls: one of the project's functions or classes is gone through with what it is given; a config is read; the rest is unknown."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from brim.audit.source.definitions import is_dataclass, literal
from brim.audit.source.module import Function, Module, last_name
from brim.audit.source.quantities import quantity_of
from brim.audit.source.state import Frame, Layer, State
from brim.audit.source.statements import Statements, bound_name
from brim.audit.source.terms import (
    Apply,
    Choice,
    ClassRef,
    Constant,
    Filtered,
    FunctionRef,
    Instance,
    Mapping,
    Namespace,
    Opaque,
    Repeat,
    Setting,
    Term,
)

if TYPE_CHECKING:
    from brim.audit.source.definitions import Definitions
    from brim.audit.source.launchers import Launches
    from brim.audit.source.project import Project

_DEEPEST = 14
_SHORT, _OFTEN, _SELDOM = 40, 12, 4
_TINY = 12
"""Functions of up to so many lines are gone through so often, longer ones so often; each time with other arguments."""
_PARSES = {"parse_args", "parse_known_args", "parse_intermixed_args"}
_HOLDERS = {"SimpleNamespace", "Namespace", "DotDict", "EasyDict", "edict", "Munch", "Box", "AttrDict", "dict", "ConfigDict"}
_PLACES = {"DataLoader": {1: "batch_size", 5: "num_workers", 7: "pin_memory"}, "BatchSampler": {1: "batch_size"}}
"""Arguments that may be given by their place."""


class Calls(Statements):
    """The part of the flow that follows calls."""

    def __init__(self, project: Project, definitions: Definitions, launches: Launches) -> None:
        super().__init__(project, definitions, launches)
        self.relevant: set[Function] = set()
        """Functions that a value may matter in."""
        self.executed: set[Function] = set()
        self.running: list[Function] = []
        self._times: dict[Function, int] = {}

    def call(self, node: ast.Call, frame: Frame) -> Term:
        """A call: arithmetic, a way to read a config, one of the project's functions or classes, or something unknown."""
        module = frame.module
        dotted = module.dotted(node.func)
        args = [self.value(each, frame) for each in node.args]
        keywords: dict[str, Term] = {}
        nodes: dict[str, ast.expr] = {}
        for each in node.keywords:
            term = self.value(each.value, frame)
            if each.arg is not None:
                keywords[each.arg], nodes[each.arg] = term, each.value
            elif isinstance(term, Mapping):
                written = {name: value for (base, name), value in frame.state.heap.flat().items() if base is term}
                for name, value in {**term.items, **written}.items():
                    keywords[name] = value
                    if isinstance(value.node, ast.expr):
                        nodes[name] = value.node
        self._uses_of_call(node, dotted or last_name(node.func), args, keywords, nodes, frame)
        found = self.pure(dotted, args, node, frame) or self._reading(node, dotted, args, keywords, frame)
        if found is not None:
            return found
        function = self.value(node.func, frame)
        if isinstance(function, FunctionRef):
            return self.run(function, args, keywords, node, frame)
        if isinstance(function, ClassRef):
            return self._instance(function, args, keywords, node, frame)
        inputs = (*args, *keywords.values(), *([function] if isinstance(node.func, ast.Attribute) else []))
        made = Opaque(module, node, module.text_of(node)[:200] if node.lineno == node.end_lineno else dotted or "", inputs)
        if last_name(node.func).endswith(("Arguments", "Config")):
            for name in nodes:  # a library's config: what is read from it later is what it was given
                self._read[(made, name)] = keywords[name]
        return made

    def _uses_of_call(
        self, node: ast.Call, dotted: str, args: list[Term], keywords: dict[str, Term], nodes: dict[str, ast.expr], frame: Frame
    ) -> None:
        about = self._about(node, frame)
        if dotted.rpartition(".")[2] == "partial" and node.args:
            dotted = frame.module.dotted(node.args[0]) or dotted  # functools.partial(DataLoader, batch_size=...)
        for name, value in nodes.items():
            quantity = quantity_of(name)
            if quantity is not None:
                self.use(quantity, name, keywords[name], value, frame, dotted, about)
        for callee, places in _PLACES.items():
            if dotted.rpartition(".")[2] != callee:
                continue
            for index, name in places.items():
                quantity = quantity_of(name)
                if index < len(args) and quantity is not None:
                    self.use(quantity, name, args[index], node.args[index], frame, dotted, about)

    def _about(self, node: ast.Call, frame: Frame) -> str:
        """What a loader is for, by the name that it gets and the data that it takes."""
        parent = frame.module.parents.get(node)
        target = parent.targets[0] if isinstance(parent, ast.Assign) else None
        names = [bound_name(target)] if target is not None else []
        return " ".join([*names, *(last_name(each) for each in node.args[:1])])

    def _reading(
        self, node: ast.Call, dotted: str | None, args: list[Term], keywords: dict[str, Term], frame: Frame
    ) -> Term | None:
        """Calls that read a config: `cfg.get("bs", 8)`, `getattr(cfg, "bs")`, `os.environ.get`, `parse_args()`."""
        name = last_name(node.func)
        first = literal(node.args[0]) if node.args else None
        if dotted in {"os.environ.get", "os.getenv"} and isinstance(first, str):
            default = literal(node.args[1]) if len(node.args) > 1 else None
            return self.setting(first, frame.module, node, kind="environment", value=_as_number(default))
        if (
            isinstance(node.func, ast.Attribute)
            and name in {"item", "clamp", "clip"}
            and not isinstance(node.func.value, ast.Name)
        ):
            base = self.value(node.func.value, frame)
            if isinstance(base, Setting | Apply | Choice):
                unknown = Opaque(frame.module, node, "no bound")
                low = keywords.get("min") or (args[0] if args else unknown)
                high = keywords.get("max") or (args[1] if len(args) > 1 else unknown)
                return base if name == "item" else Apply(frame.module, node, "clip", (base, low, high))
        if name == "next" and args and isinstance(args[0], Filtered):
            return Apply(frame.module, node, "pick0", (args[0],))
        if name in _PARSES:
            return Namespace(frame.module, node)
        if name in {"get", "pop"} and isinstance(first, str) and isinstance(node.func, ast.Attribute) and quantity_of(first):
            return self.attribute(self.value(node.func.value, frame), first, node, frame)
        second = literal(node.args[1]) if len(node.args) > 1 else None
        if name == "getattr" and isinstance(second, str):
            return self.attribute(args[0], second, node, frame)
        if name == "setattr" and isinstance(second, str) and len(args) > 2:
            frame.state.heap[(args[0], second)] = args[2]
        if name in _HOLDERS and keywords and not args:
            items = {key: self.in_mapping(key, term, node, frame) for key, term in keywords.items()}
            return Mapping(frame.module, node, items)
        if name in _HOLDERS and len(args) == 1 and isinstance(args[0], Mapping):
            return args[0]
        return None

    def _instance(self, reference: ClassRef, args: list[Term], keywords: dict[str, Term], node: ast.AST, frame: Frame) -> Term:
        owner, module = reference.owner, reference.module
        instance = Instance(module, node, owner)
        if is_dataclass(owner):
            names = [
                each.target.id for each in owner.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            for name, term in [*zip(names, args, strict=False), *keywords.items()]:
                known = term
                if isinstance(term, Constant) and quantity_of(name) is not None:
                    known = self.setting(name, module, owner, kind="field", owner=owner)
                    known.value, known.set_at = term.value, (frame.module.source.file, getattr(term.node, "lineno", 1))
                frame.state.heap[(instance, name)] = known
        first = self.of_class(instance, owner, "__post_init__" if is_dataclass(owner) else "__init__", node, frame)
        if isinstance(first, FunctionRef):
            self.run(first, args, keywords, node, frame)
        return instance

    def run(self, reference: FunctionRef, args: list[Term], keywords: dict[str, Term], node: ast.AST, frame: Frame) -> Term:
        """Go through one of the project's functions with these arguments."""
        function, module = reference.function, reference.module
        unknown = Opaque(frame.module, node, function.name, (*args, *keywords.values()))
        too_much = len(self.running) >= _DEEPEST or self.left <= 0 or self.root_left <= 0
        if function in self.running or too_much or not self._is_worth_it(function, args, keywords):
            return unknown
        self._times[function] = self._times.get(function, 0) + 1
        self.executed.add(function)
        inner = Frame(module, State(Layer(reference.closure), frame.state.heap), function, self.module_globals(module))
        self._bind_parameters(reference, args, keywords, node, frame, inner)
        self.running.append(function)
        try:
            self.block(function.body, inner)
            for nested in inner.nested:  # handed to `map` or a loader, perhaps
                if nested.function not in self.executed:
                    self.run(nested, [], {}, nested.function, inner)
        finally:
            self.running.pop()
        return _combined(inner, unknown)

    def _is_worth_it(self, function: Function, args: list[Term], keywords: dict[str, Term]) -> bool:
        """Whether a value that matters may go through: the function speaks of one, or is given one, and was not tried often."""
        times = self._times.get(function, 0)
        length = (function.end_lineno or 0) - function.lineno
        if not times and length <= _TINY:
            return True
        if times >= (_OFTEN if length <= _SHORT else _SELDOM):
            return False
        if function in self.relevant:
            return True
        given = any(isinstance(each, Setting | Apply | Choice | Repeat) for each in (*args, *keywords.values()))
        return given and length <= _SHORT

    def _bind_parameters(
        self, reference: FunctionRef, args: list[Term], keywords: dict[str, Term], node: ast.AST, frame: Frame, inner: Frame
    ) -> None:
        function, module = reference.function, reference.module
        names = [*function.args.posonlyargs, *function.args.args]
        is_static = any(last_name(each) == "staticmethod" for each in function.decorator_list)
        given = [reference.bound, *args] if reference.bound is not None and not is_static else list(args)
        if reference.bound is None and names and names[0].arg in {"self", "cls"} and node is function:
            given = [Opaque(module, function, "self"), *given]
        nodes = {each.arg: each.value for each in node.keywords} if isinstance(node, ast.Call) else {}
        places = [
            *([None] if reference.bound is not None and not is_static else []),
            *(node.args if isinstance(node, ast.Call) else []),
        ]
        defaults = [None] * (len(names) - len(function.args.defaults)) + list(function.args.defaults)
        pairs = [*zip(names, defaults, strict=True), *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)]
        for index, (parameter, default) in enumerate(pairs):
            term: Term | None = keywords.get(parameter.arg)
            value = nodes.get(parameter.arg)
            if term is None and index < len(given) and index < len(names):
                term = given[index]
                value = places[index] if index < len(places) else None
            if term is None:
                term = self._missing(parameter, default, module, inner, is_root=node is function)
            elif value is not None and (quantity := quantity_of(parameter.arg)) is not None:
                self.use(quantity, parameter.arg, term, value, frame, module.name + "." + function.name)
            inner.state.names[parameter.arg] = term
        if function.args.kwarg is not None:
            known = {each.arg for each, _default in pairs}
            extra = {key: term for key, term in keywords.items() if key not in known}
            inner.state.names[function.args.kwarg.arg] = Mapping(module, function, extra)

    def _missing(self, parameter: ast.arg, default: ast.expr | None, module: Module, inner: Frame, *, is_root: bool) -> Term:
        """A parameter that nobody gives: a setting if its name says so, an object if its annotation does."""
        if quantity_of(parameter.arg) is not None:
            kind: Any = "parameter" if is_root else "default"
            return self.setting(parameter.arg, module, parameter, kind=kind, value=literal(default))
        annotated = self.reference_of(parameter.annotation, module) if parameter.annotation is not None else None
        if isinstance(annotated, ClassRef) and (is_root or default is None):
            return Instance(module, parameter, annotated.owner)
        if default is not None:
            return self.value(default, Frame(module, State(), None, inner.globals))
        return Opaque(module, parameter, parameter.arg)


def _combined(frame: Frame, unknown: Term) -> Term:
    """What a function returns: its returns in their order, each under the condition of the branch that it stands in."""
    result: Term | None = None
    for conditions, term in reversed(frame.results):
        if result is None or not conditions:
            result = term
            continue
        parts = tuple(condition for condition, _node in conditions)
        node = conditions[0][1]
        whole = parts[0] if len(parts) == 1 else Apply(frame.module, parts[-1].node, "and", parts)
        result = Choice(frame.module, node, whole, term, result)
    return unknown if result is None else result


def _as_number(value: object) -> Any:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return value
    return value
