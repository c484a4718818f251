"""Calls: one of the project's functions or classes is gone through with what it is given; a config is read; the rest is unknown."""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from brim.audit.source.definitions import is_config_name, is_dataclass, literal
from brim.audit.source.expressions import bound_name
from brim.audit.source.module import Function, Module, last_name
from brim.audit.source.quantities import quantity_of
from brim.audit.source.state import Frame, Layer, State
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
    Several,
    Term,
)

if TYPE_CHECKING:
    from brim.audit.source.expressions import Evaluator
    from brim.audit.source.names import Names
    from brim.audit.source.settings import Settings
    from brim.audit.source.statements import Executor
    from brim.audit.source.uses import Uses

RELEVANT = re.compile(r"batch|accum|workers|pin_mem|\blr\b|learning_rate|max_len|seq_len|block_size|\bbsz?\b", re.IGNORECASE)
"""What a file or a function speaks of, if a value in it may matter."""
_DEEPEST = 14
_SHORT, _OFTEN, _SELDOM = 40, 12, 4
_TINY = 12
"""Functions of up to so many lines are gone through so often, longer ones so often; each time with other arguments."""
_PARSES = {"parse_args", "parse_known_args", "parse_intermixed_args"}
_HOLDERS = {"SimpleNamespace", "Namespace", "DotDict", "EasyDict", "edict", "Munch", "Box", "AttrDict", "dict", "ConfigDict"}
_PLACES = {"DataLoader": {1: "batch_size", 5: "num_workers", 7: "pin_memory"}, "BatchSampler": {1: "batch_size"}}
"""Arguments that may be given by their place."""


_PURE = {
    "min": "min", "max": "max", "int": "int", "float": "float", "bool": "bool", "abs": "abs", "round": "round", "math.ceil": "ceil",
    "math.floor": "floor", "math.log2": "log2", "math.sqrt": "sqrt", "numpy.clip": "clip", "numpy.minimum": "min",
    "numpy.maximum": "max", "numpy.ceil": "ceil", "numpy.floor": "floor", "torch.clamp": "clip", "ceil": "ceil", "floor": "floor",
    "numpy.log2": "log2",
}  # fmt: skip
_WRAPPERS = {"torch.tensor", "torch.as_tensor", "numpy.array", "numpy.asarray", "numpy.int64", "numpy.int32", "Decimal", "str"}


class Caller:
    """Goes through what is called: functions, the making of objects, and the own level of a module, which an import calls."""

    def __init__(
        self, names: Names, evaluator: Evaluator, executor: Executor, settings: Settings, uses: Uses, relevant: set[Function]
    ) -> None:
        self._names, self._settings, self._uses = names, settings, uses
        self._evaluator, self._executor = evaluator, executor
        self._relevant = relevant
        self._globals: dict[str, Layer[str]] = {}
        self._running: list[Function] = []
        self._times: Counter[Function] = Counter()

    def has_run(self, function: Function) -> bool:
        """Whether a function has been gone through."""
        return function in self._times

    def call(self, node: ast.Call, frame: Frame) -> Term:
        """A call: arithmetic, a way to read a config, one of the project's functions or classes, or something unknown."""
        module = frame.module
        dotted = module.dotted(node.func)
        args = [self._evaluator.value(each, frame) for each in node.args]
        keywords: dict[str, Term] = {}
        nodes: dict[str, ast.expr] = {}
        for each in node.keywords:
            term = self._evaluator.value(each.value, frame)
            if each.arg is not None:
                keywords[each.arg], nodes[each.arg] = term, each.value
            elif isinstance(term, Mapping):
                written = {name: value for (base, name), value in frame.state.heap.flat().items() if base is term}
                for name, value in {**term.items, **written}.items():
                    keywords[name] = value
                    if isinstance(value.node, ast.expr):
                        nodes[name] = value.node
        self._uses_of_call(node, dotted or last_name(node.func), args, keywords, nodes, frame)
        found = self._pure(dotted, args, node, frame) or self._reading(node, dotted, args, keywords, frame)
        if found is not None:
            return found
        function = self._evaluator.value(node.func, frame)
        if isinstance(function, FunctionRef):
            return self.run(function, args, keywords, node, frame)
        if isinstance(function, ClassRef):
            return self._instance(function, args, keywords, node, frame)
        inputs = (*args, *keywords.values(), *([function] if isinstance(node.func, ast.Attribute) else []))
        made = Opaque(module, node, module.text_of(node)[:200] if node.lineno == node.end_lineno else dotted or "", inputs)
        if last_name(node.func).endswith(("Arguments", "Config")):
            for name in nodes:  # a library's config: what is read from it later is what it was given
                self._evaluator.read[(made, name)] = keywords[name]
        return made

    def _uses_of_call(
        self, node: ast.Call, dotted: str, args: list[Term], keywords: dict[str, Term], nodes: dict[str, ast.expr], frame: Frame
    ) -> None:
        about = self._about(node, frame)
        if dotted.rpartition(".")[2] == "partial" and node.args:
            dotted = frame.module.dotted(node.args[0]) or dotted  # functools.partial(DataLoader, batch_size=...)
        for name, value in nodes.items():
            self._uses.keep_named(name, keywords[name], value, frame, dotted, about)
        for callee, places in _PLACES.items():
            if dotted.rpartition(".")[2] != callee:
                continue
            for index, name in places.items():
                if index < len(args):
                    self._uses.keep_named(name, args[index], node.args[index], frame, dotted, about)

    def _about(self, node: ast.Call, frame: Frame) -> str:
        """What a loader is for, by the name that it gets and the data that it takes."""
        parent = frame.module.parents.get(node)
        names = [bound_name(parent.targets[0])] if isinstance(parent, ast.Assign) else []
        return " ".join([*names, *(last_name(each) for each in node.args[:1])])

    def _reading(
        self, node: ast.Call, dotted: str | None, args: list[Term], keywords: dict[str, Term], frame: Frame
    ) -> Term | None:
        """Calls that read a config: `cfg.get("bs", 8)`, `getattr(cfg, "bs")`, `os.environ.get`, `parse_args()`."""
        name = last_name(node.func)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        first = literal(node.args[0]) if node.args else None
        if dotted in {"os.environ.get", "os.getenv"} and isinstance(first, str):
            default = literal(node.args[1]) if len(node.args) > 1 else None
            return self._settings.at(first, frame.module, node, kind="environment", value=_as_number(default))
        if name in {"item", "clamp", "clip"} and owner is not None and not isinstance(owner, ast.Name):
            base = self._evaluator.value(owner, frame)
            if isinstance(base, Setting | Apply | Choice):
                unknown = Opaque(frame.module, node, "no bound")
                low = keywords.get("min") or (args[0] if args else unknown)
                high = keywords.get("max") or (args[1] if len(args) > 1 else unknown)
                return base if name == "item" else Apply(frame.module, node, "clip", (base, low, high))
        if name == "next" and args and isinstance(args[0], Filtered):
            return Apply(frame.module, node, "pick0", (args[0],))
        if name in _PARSES:
            return Namespace(frame.module, node)
        if name in {"get", "pop"} and isinstance(first, str) and owner is not None and quantity_of(first):
            return self._evaluator.attribute(self._evaluator.value(owner, frame), first, node, frame)
        second = literal(node.args[1]) if len(node.args) > 1 else None
        if name == "getattr" and isinstance(second, str):
            return self._evaluator.attribute(args[0], second, node, frame)
        if name == "setattr" and isinstance(second, str) and len(args) > 2:
            frame.state.heap[(args[0], second)] = args[2]
        if name in _HOLDERS and keywords and not args:
            items = {key: self._evaluator.in_mapping(key, term, node, frame) for key, term in keywords.items()}
            return Mapping(frame.module, node, items)
        if name in _HOLDERS and len(args) == 1 and isinstance(args[0], Mapping):
            return args[0]
        return None

    def _instance(self, reference: ClassRef, args: list[Term], keywords: dict[str, Term], node: ast.AST, frame: Frame) -> Term:
        owner, module = reference.owner, reference.module
        instance = Instance(module, node, owner)
        if is_dataclass(owner):
            fields = (each.target for each in owner.body if isinstance(each, ast.AnnAssign))
            names = [each.id for each in fields if isinstance(each, ast.Name)]
            for name, term in [*zip(names, args, strict=False), *keywords.items()]:
                known = term
                if isinstance(term, Constant) and quantity_of(name) is not None:
                    known = self._settings.at(name, module, owner, kind="field", owner=owner)
                    known.value, known.set_at = term.value, (frame.module.source.file, getattr(term.node, "lineno", 1))
                frame.state.heap[(instance, name)] = known
        first = self._evaluator.of_class(instance, owner, "__post_init__" if is_dataclass(owner) else "__init__", node, frame)
        if isinstance(first, FunctionRef):
            self.run(first, args, keywords, node, frame)
        return instance

    def run(self, reference: FunctionRef, args: list[Term], keywords: dict[str, Term], node: ast.AST, frame: Frame) -> Term:
        """Go through one of the project's functions with these arguments."""
        function, module = reference.function, reference.module
        unknown = Opaque(frame.module, node, function.name, (*args, *keywords.values()))
        too_much = len(self._running) >= _DEEPEST or self._executor.is_spent
        if function in self._running or too_much or not self._is_worth_it(function, args, keywords):
            return unknown
        self._times[function] += 1
        inner = Frame(module, State(Layer(reference.closure), frame.state.heap), function, self.globals_of(module))
        self._bind_parameters(reference, args, keywords, node, frame, inner)
        self._running.append(function)
        try:
            self._executor.block(function.body, inner)
            for nested in inner.nested:  # handed to `map` or a loader, perhaps
                if not self.has_run(nested.function):
                    self.run(nested, [], {}, nested.function, inner)
        finally:
            self._running.pop()
        return _combined(inner, unknown)

    def _is_worth_it(self, function: Function, args: list[Term], keywords: dict[str, Term]) -> bool:
        """Whether a value that matters may go through: the function speaks of one, or is given one, and was not tried often."""
        times = self._times[function]
        length = (function.end_lineno or 0) - function.lineno
        if not times and length <= _TINY:
            return True
        if times >= (_OFTEN if length <= _SHORT else _SELDOM):
            return False
        if function in self._relevant:
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
            elif value is not None:
                self._uses.keep_named(parameter.arg, term, value, frame, module.name + "." + function.name)
            inner.state.names[parameter.arg] = term
        if function.args.kwarg is not None:
            known = {each.arg for each, _default in pairs}
            extra = {key: term for key, term in keywords.items() if key not in known}
            inner.state.names[function.args.kwarg.arg] = Mapping(module, function, extra)

    def _missing(self, parameter: ast.arg, default: ast.expr | None, module: Module, inner: Frame, *, is_root: bool) -> Term:
        """A parameter that nobody gives: a setting if its name says so, an object if its annotation does."""
        if quantity_of(parameter.arg) is not None:
            kind: Any = "parameter" if is_root else "default"
            return self._settings.at(parameter.arg, module, parameter, kind=kind, value=literal(default))
        annotated = self._evaluator.reference_of(parameter.annotation, module) if parameter.annotation is not None else None
        if isinstance(annotated, ClassRef) and (is_root or default is None):
            return Instance(module, parameter, annotated.owner)
        if default is not None:
            return self._evaluator.value(default, Frame(module, State(), None, inner.globals))
        return Opaque(module, parameter, parameter.arg)

    def globals_of(self, module: Module) -> Layer[str]:
        """The names of a module's own level, gone through once."""
        known = self._globals.get(module.name)
        if known is not None:
            return known
        frame = Frame(module, State())
        self._globals[module.name] = names = frame.state.names
        for statement in module.tree.body:
            if isinstance(statement, Function):
                names[statement.name] = FunctionRef(module, statement, statement)
            elif isinstance(statement, ast.ClassDef):
                names[statement.name] = ClassRef(module, statement, statement)
        if RELEVANT.search(module.source.text):
            with contextlib.suppress(RecursionError):
                self._executor.block(module.tree.body, frame)
        return names

    def written_elsewhere(self, base: Instance, owner: ast.ClassDef, name: str, frame: Frame) -> Term | None:
        """Go through a method that sets the attribute, if none has been yet."""
        if quantity_of(name) is None and not is_config_name(name):
            return None
        for method in self._names.writers(owner, name):
            if method in self._running or method.name == name:
                continue
            self.run(FunctionRef(self._names.homes[owner], method, method, base), [], {}, method, frame)
            if (known := frame.state.heap.get((base, name))) is not None:
                return known
        return None

    def _pure(self, dotted: str | None, args: list[Term], node: ast.Call, frame: Frame) -> Term | None:
        """Arithmetic that doctor can do itself."""
        what = _PURE.get(dotted or "")
        if dotted in _WRAPPERS and len(args) == 1:
            return args[0]
        bounds = {each.arg: self._evaluator.value(each.value, frame) for each in node.keywords}
        if what == "clip" and set(bounds) <= {"min", "max", "a_min", "a_max"} and args:
            unknown = Opaque(frame.module, node, "no bound")
            low = bounds.get("min") or bounds.get("a_min") or (args[1] if len(args) > 1 else unknown)
            high = bounds.get("max") or bounds.get("a_max") or (args[2] if len(args) > 2 else unknown)
            return Apply(frame.module, node, "clip", (args[0], low, high))
        if what is None or what == "clip" or not args or node.keywords:
            return None
        if what in {"min", "max"} and len(args) == 1:
            only = args[0]
            if isinstance(only, Filtered):
                return Apply(frame.module, node, what, (only,))
            if not isinstance(only, Several) or not only.elements:
                return None
            args = list(only.elements)
        if what not in {"min", "max", "clip"} and len(args) != 1:
            return None
        return Apply(frame.module, node, what, tuple(args))


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
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        return value
