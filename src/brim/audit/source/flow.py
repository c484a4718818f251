"""The way of a value through a project: assignments, attributes, calls, branches, imports. Read, never run.

Functions are gone through where they are called, with what they are called with, so that a value keeps its history across files:
from the dataclass field over `self.config`, a helper's `min(...)` and a keyword to the DataLoader. What nobody in the project calls is
gone through last, its parameters taken as settings. Work is bounded: what lies beyond the bound counts as unknown, never as clean.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING

from brim.audit.source.calling import Calls
from brim.audit.source.definitions import is_config_name
from brim.audit.source.module import Function, Module, last_name
from brim.audit.source.quantities import quantity_of
from brim.audit.source.state import Frame, Layer, State
from brim.audit.source.terms import (
    ClassRef,
    FunctionRef,
    Instance,
    Term,
)

if TYPE_CHECKING:
    from brim.audit.source.definitions import Definitions
    from brim.audit.source.launchers import Launches
    from brim.audit.source.project import Project

_RELEVANT = re.compile(r"batch|accum|workers|pin_mem|\blr\b|learning_rate|max_len|seq_len|block_size|\bbsz?\b", re.IGNORECASE)
_MOST_STATEMENTS = 150_000
_MOST_FOR_ONE_ROOT = 8_000


class Flow(Calls):
    """Goes through a project and keeps every use of a quantity."""

    def __init__(self, project: Project, definitions: Definitions, launches: Launches) -> None:
        super().__init__(project, definitions, launches)
        self.left = _MOST_STATEMENTS
        self.root_left = _MOST_FOR_ONE_ROOT
        self._call_counts: Counter[str] | None = None
        self.relevant = _relevant_functions(project)

    def calls_of(self, name: str) -> int:
        """How many places of the project call something of that name."""
        if self._call_counts is None:
            self._call_counts = Counter(
                last_name(node.func) for module in self.project.modules for node in module.nodes if isinstance(node, ast.Call)
            )
        return self._call_counts[name]

    def run_project(self) -> None:
        """Everything: modules' own level first, then what nothing has called."""
        relevant = [each for each in self.project.modules if _RELEVANT.search(each.source.text)]
        for module in relevant:
            self.root_left = _MOST_FOR_ONE_ROOT
            self.module_globals(module)
        for module in relevant:
            self._run_rest(module)

    def _run_rest(self, module: Module) -> None:
        functions = [node for node in module.nodes if isinstance(node, Function)]
        named = {each.attr if isinstance(each, ast.Attribute) else each.id for each in module.nodes
                 if isinstance(each, ast.Attribute | ast.Name) and isinstance(each.ctx, ast.Load)}  # fmt: skip
        for function in sorted(functions, key=lambda each: each.name in named):
            around = module.parents[function]
            is_nested = not isinstance(around, ast.Module | ast.ClassDef)
            if function in self.executed or is_nested or self.left <= 0 or function not in self.relevant:
                continue
            self.root_left = _MOST_FOR_ONE_ROOT
            self._run_alone(function, around if isinstance(around, ast.ClassDef) else None, module)

    def _run_alone(self, function: Function, owner: ast.ClassDef | None, module: Module) -> None:
        frame = Frame(module, State(), None, self.module_globals(module))
        bound: Term | None = None
        if owner is not None:
            bound = self._alone_instance(owner, module, frame)
        if function not in self.executed:
            self.run(FunctionRef(module, function, function, bound), [], {}, function, frame)

    def _alone_instance(self, owner: ast.ClassDef, module: Module, frame: Frame) -> Instance:
        """An object of a class that nobody makes in this project."""
        instance = Instance(module, owner, owner)
        first = next(
            (each for each in owner.body if isinstance(each, Function) and each.name in {"__init__", "__post_init__"}), None
        )
        if first is not None:
            self.run(FunctionRef(module, first, first, instance), [], {}, first, frame)
        return instance

    def module_globals(self, module: Module) -> Layer[str]:
        """The names of a module's own level, gone through once."""
        known = self.globals.get(module.name)
        if known is not None:
            return known
        frame = Frame(module, State())
        self.globals[module.name] = frame.state.names
        names = frame.state.names
        for statement in module.tree.body:
            if isinstance(statement, Function):
                names[statement.name] = FunctionRef(module, statement, statement)
            elif isinstance(statement, ast.ClassDef):
                names[statement.name] = ClassRef(module, statement, statement)
        if _RELEVANT.search(module.source.text):
            with contextlib.suppress(RecursionError):
                self.block(module.tree.body, frame)
        return names

    def written_elsewhere(self, base: Instance, owner: ast.ClassDef, name: str, frame: Frame) -> Term | None:
        """Go through a method that sets the attribute, if none has been yet."""
        if quantity_of(name) is None and not is_config_name(name):
            return None
        for method in self.names.writers(owner, name):
            if method in self.running or method.name == name:
                continue
            self.run(FunctionRef(self.names.homes[owner], method, method, base), [], {}, method, frame)
            known = frame.state.heap.get((base, name))
            if known is not None:
                return known
        return None


def _relevant_functions(project: Project) -> set[Function]:
    """Functions that speak of a quantity, and those that call them by name, over any number of steps."""
    found: set[Function] = set()
    callers: dict[str, list[Function]] = {}
    for module in project.modules:
        speaking = [bool(_RELEVANT.search(line)) for line in module.lines]
        for node in module.nodes:
            if not isinstance(node, Function):
                continue
            if any(speaking[node.lineno - 1 : node.end_lineno]):
                found.add(node)
        for call in module.calls:
            if isinstance(call.func, ast.Name):
                callers.setdefault(call.func.id, []).extend(each for each in module.above(call) if isinstance(each, Function))
    waiting = list(found)
    while waiting:
        for caller in callers.get(waiting.pop().name, ()):
            if caller not in found:
                found.add(caller)
                waiting.append(caller)
    return found
