"""What is known while the code is gone through: names, attributes, and the place that has been reached."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from brim.audit.source.module import Function, Module
from brim.audit.source.terms import FunctionRef, Term

K = TypeVar("K")


class Layer(Generic[K]):
    """What is known under a key, on top of what was known before a branch. Making one costs nothing, however much is known."""

    def __init__(self, below: Layer[K] | None = None) -> None:
        self.own: dict[K, Term] = {}
        self.below = below

    def get(self, key: K) -> Term | None:
        """What is known now."""
        layer: Layer[K] | None = self
        while layer is not None:
            found = layer.own.get(key)
            if found is not None:
                return found
            layer = layer.below
        return None

    def __setitem__(self, key: K, term: Term) -> None:
        self.own[key] = term

    def flat(self) -> dict[K, Term]:
        """Everything, as one dict."""
        return {**(self.below.flat() if self.below is not None else {}), **self.own}


@dataclass
class State:
    """What is known at one place: names, and the attributes of objects that the code has set."""

    names: Layer[str] = field(default_factory=Layer)
    heap: Layer[tuple[Term, str]] = field(default_factory=Layer)

    def branch(self) -> State:
        """The same, to go on from in one of two ways."""
        return State(Layer(self.names), Layer(self.heap))

    def take(self, branch: State) -> None:
        """Go on as the branch did."""
        self.names.own.update(branch.names.own)
        self.heap.own.update(branch.heap.own)


@dataclass
class Frame:
    """One function, or one module's body, while it is gone through."""

    module: Module
    state: State
    function: Function | None = None
    globals: Layer[str] | None = None
    """Of the module, where the frame is a function."""
    conditions: list[tuple[Term, ast.AST]] = field(default_factory=list)
    """Of the branches around the place that has been reached: what must hold, and the `if`."""
    results: list[tuple[tuple[tuple[Term, ast.AST], ...], Term]] = field(default_factory=list)
    """What it returns: under which conditions, and what."""
    nested: list[FunctionRef] = field(default_factory=list)
    """Functions that are defined in it: some are only handed on, and never called by name."""
