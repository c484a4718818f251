"""The way of a value through a project: assignments, attributes, calls, branches, imports. Read, never run.

Functions are gone through where they are called, with what they are called with, so that a value keeps its history across files:
from the dataclass field over `self.config`, a helper's `min(...)` and a keyword to the DataLoader. What nobody in the project calls is
gone through last, its parameters taken as settings. Work is bounded: what lies beyond the bound counts as unknown, never as clean.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from brim.audit.source.calling import RELEVANT, Caller
from brim.audit.source.expressions import Evaluator
from brim.audit.source.module import Function, Module, last_name
from brim.audit.source.names import names_of
from brim.audit.source.settings import Settings
from brim.audit.source.state import Frame, State
from brim.audit.source.statements import Executor
from brim.audit.source.terms import FunctionRef, Instance
from brim.audit.source.uses import Uses

if TYPE_CHECKING:
    from brim.audit.source.definitions import Definitions
    from brim.audit.source.launchers import Launches
    from brim.audit.source.project import Project


class Flow:
    """Goes through a project and keeps every use of a quantity."""

    def __init__(self, project: Project, definitions: Definitions, launches: Launches) -> None:
        self.project = project
        self.definitions = definitions
        self.launches = launches
        self.names = names_of(project)
        self.settings = Settings(definitions, launches)
        kept = Uses()
        self.uses = kept.all
        self._relevant = _relevant_functions(project)
        self.evaluator = Evaluator(self.names, self.settings, kept)
        self._executor = Executor(self.evaluator, self.settings, kept)
        self._caller = Caller(self.names, self.evaluator, self._executor, self.settings, kept, self._relevant)
        self.evaluator.calls = self._caller  # calls need the evaluator too: one of the two comes later

    @cached_property
    def calls_of(self) -> Counter[str]:
        """How many places of the project call something of a name."""
        return Counter(last_name(call.func) for module in self.project.modules for call in module.calls)

    def run_project(self) -> None:
        """Everything: modules' own level first, then what nothing has called."""
        relevant = [each for each in self.project.modules if RELEVANT.search(each.source.text)]
        for module in relevant:
            self._executor.start_root()
            self._caller.globals_of(module)
        for module in relevant:
            self._run_rest(module)

    def _run_rest(self, module: Module) -> None:
        functions = [node for node in module.nodes if isinstance(node, Function)]
        named = {each.attr if isinstance(each, ast.Attribute) else each.id for each in module.nodes
                 if isinstance(each, ast.Attribute | ast.Name) and isinstance(each.ctx, ast.Load)}  # fmt: skip
        for function in sorted(functions, key=lambda each: each.name in named):
            around = module.parents[function]
            is_nested = not isinstance(around, ast.Module | ast.ClassDef)
            self._executor.start_root()
            if self._caller.has_run(function) or is_nested or self._executor.is_spent or function not in self._relevant:
                continue
            self._run_alone(function, around if isinstance(around, ast.ClassDef) else None, module)

    def _run_alone(self, function: Function, owner: ast.ClassDef | None, module: Module) -> None:
        frame = Frame(module, State(), None, self._caller.globals_of(module))
        bound = self._alone_instance(owner, module, frame) if owner is not None else None
        if not self._caller.has_run(function):
            self._caller.run(FunctionRef(module, function, function, bound), [], {}, function, frame)

    def _alone_instance(self, owner: ast.ClassDef, module: Module, frame: Frame) -> Instance:
        """An object of a class that nobody makes in this project."""
        instance = Instance(module, owner, owner)
        firsts = (each for each in owner.body if isinstance(each, Function) and each.name in {"__init__", "__post_init__"})
        if (first := next(firsts, None)) is not None:
            self._caller.run(FunctionRef(module, first, first, instance), [], {}, first, frame)
        return instance


def _relevant_functions(project: Project) -> set[Function]:
    """Functions that speak of a quantity, and those that call them by name, over any number of steps."""
    found: set[Function] = set()
    callers: dict[str, list[Function]] = {}
    for module in project.modules:
        speaking = [bool(RELEVANT.search(line)) for line in module.lines]
        functions = (node for node in module.nodes if isinstance(node, Function))
        found |= {each for each in functions if any(speaking[each.lineno - 1 : each.end_lineno])}
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
