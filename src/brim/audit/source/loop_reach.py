"""Which functions call which, by name, and which of them run a backward pass in the end.

A training loop is seldom in one piece: `fit` calls `train_epoch` calls `self.training_step`. What one call means is in names.py.
"""

from __future__ import annotations

import ast
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from brim.audit.source.module import Module, last_name
from brim.audit.source.names import COMMON, Names, Scope, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from brim.audit.source.project import Project

BACKWARD: Final = frozenset({"backward", "manual_backward"})
ACTIONS: Final = BACKWARD | {
    "step", "optimizer_step", "zero_grad", "optimizer_zero_grad", "zero_", "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_",
    "clip_gradients", "unscale_", "unscale_gradients", "empty_cache", "autocast",
}  # fmt: skip
_DEPTH: Final = 4


class Reach:
    """The calls of a project, from the side of those that call and of those that are called."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._calls: dict[int, dict[str | None, list[ast.Call]]] = {}
        self._makers: dict[int, dict[str, list[ast.Call]]] = {}

    @cached_property
    def trainers(self) -> frozenset[Scope]:
        """The functions that run a backward pass, themselves or by what they call. By name only, so some that do not."""
        return self._closure(BACKWARD)

    @cached_property
    def active(self) -> frozenset[Scope]:
        """The functions in which something happens that a training loop is judged by, themselves or by what they call."""
        return self._closure(ACTIONS)

    def _closure(self, names: frozenset[str]) -> frozenset[Scope]:
        found = {each for each in self.names.scopes if each.called & names}
        fresh = set(found)
        for _hop in range(_DEPTH):
            fresh = {caller for each in fresh if each.name for caller in self._callers.get(each.name, [])} - found
            found |= fresh
        return frozenset(found)

    @cached_property
    def _callers(self) -> dict[str, list[Scope]]:
        callers: dict[str, list[Scope]] = {}
        for each in self.names.scopes:
            for name in (each.called - COMMON) | each.own | self._of_made(each):
                callers.setdefault(name, []).append(each)
        return callers

    @cached_property
    def _class_names(self) -> frozenset[str]:
        return frozenset(name for _module, name in self.names.classes)

    def _of_made(self, scope: Scope) -> set[str]:
        """Methods with common names that it calls on objects of classes of the project."""
        common = scope.called & COMMON
        if not common:
            return set()
        makers = (made for each in islice(scope.outward, 2) for made in each.made.values())
        return common if any(last_name(made) in self._class_names for made in makers) else set()

    def callers(self, name: str) -> list[Scope]:
        """The functions that call something of this name."""
        return self._callers.get(name, [])

    def calls(self, module: Module, *names: str) -> list[ast.Call]:
        """The calls in a file, in the order of the text; of these names only, if any are given."""
        by_name = self._calls.get(id(module)) or self._calls.setdefault(id(module), _by_name(module))
        if not names:
            return by_name[None]
        found = [each for name in names for each in by_name.get(name, [])]
        return found if len(names) == 1 else _in_order(found)

    def made_by(self, module: Module, name: str) -> list[ast.Call]:
        """The calls in a file whose result a name or attribute is set to."""
        if id(module) not in self._makers:
            table: dict[str, list[ast.Call]] = {}
            for node in module.nodes:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                    for target in node.targets:
                        table.setdefault(last_name(target), []).append(node.value)
            self._makers[id(module)] = table
        return self._makers[id(module)].get(name, [])

    def importers(self, module: Module) -> list[Module]:
        """The files that import something from this one."""
        return self._importers.get(module.name, [])

    @cached_property
    def _importers(self) -> dict[str, list[Module]]:
        found: dict[str, list[Module]] = {}
        for each in self.names.project.modules:
            names = set(each.imports.values()) | {dotted.rpartition(".")[0] for dotted in each.imports.values()}
            for name in names - {each.name, ""}:
                found.setdefault(name, []).append(each)
        return found


def _by_name(module: Module) -> dict[str | None, list[ast.Call]]:
    """The calls of a file under the names of what they call; under None all."""
    found: dict[str | None, list[ast.Call]] = {None: _in_order(module.calls)}
    for each in found[None]:
        found.setdefault(last_name(each.func), []).append(each)
    return found


def _in_order(calls: Iterable[ast.Call]) -> list[ast.Call]:
    return sorted(calls, key=lambda each: (each.lineno, each.col_offset))


@lru_cache(maxsize=1)
def _reach(names: Names) -> Reach:
    return Reach(names)


def reach_of(project: Project) -> Reach:
    """What the functions of a project call; kept for the last one asked for, because every check asks."""
    return _reach(names_of(project))
