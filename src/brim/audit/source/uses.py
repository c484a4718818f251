"""Where the code uses a quantity: the value of a batch size, an accumulation, a learning rate at the place where it is bound."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brim.audit.source.module import Module
from brim.audit.source.quantities import Quantity, is_for_evaluation, quantity_of
from brim.audit.source.terms import Apply, Term

if TYPE_CHECKING:
    from brim.audit.source.state import Frame

WINDOW = "% window"
"""The `call` of a use in the condition under which an optimizer steps."""
_MOST_USES = 100_000
_MOST_USES_OF_A_NODE = 12


@dataclass(eq=False)
class Use:
    """A value of a quantity at the place where it is bound: to a name, an attribute, a parameter of a call."""

    quantity: Quantity
    target: str
    term: Term
    node: ast.expr
    module: Module
    call: str = ""
    """The callable that takes it, imported names resolved; empty for an assignment."""
    is_for_evaluation: bool = False
    when: str = ""
    """The condition of the innermost `if` around it, as the code says it."""


class Uses:
    """The uses of all quantities in a project, each once."""

    def __init__(self) -> None:
        self.all: list[Use] = []
        self._seen: set[tuple[int, int, str]] = set()
        self._times: dict[int, int] = {}

    def keep_named(self, name: str, term: Term, node: ast.expr, frame: Frame, call: str = "", about: str = "") -> None:
        """Keep a use of the quantity that a name speaks of, if it speaks of one."""
        quantity = quantity_of(name)
        if quantity is not None:
            self.keep(quantity, name, term, node, frame, call, about)

    def keep(
        self, quantity: Quantity, target: str, term: Term, node: ast.expr, frame: Frame, call: str = "", about: str = ""
    ) -> None:
        """Keep a use, unless the same was met before."""
        times = self._times.get(id(node), 0)
        if times >= _MOST_USES_OF_A_NODE:
            return
        key = (id(node), id(term), call)
        if key in self._seen or len(self._seen) > _MOST_USES:
            return
        self._seen.add(key)
        self._times[id(node)] = times + 1
        function = frame.function.name if frame.function is not None and not call.endswith("Arguments") else ""
        evaluates = quantity == "eval-batch" or is_for_evaluation(about) or is_for_evaluation(function)
        self.all.append(Use(quantity, target, term, node, frame.module, call, evaluates, _condition(frame)))


def _condition(frame: Frame) -> str:
    """What must hold at this place, by the innermost `if` of the function."""
    held = frame.conditions[-1][0] if frame.conditions else None
    text = frame.module.text_of(held.node) if held is not None and isinstance(held.node, ast.expr) else ""
    if not text or "__name__" in text:
        return ""
    text = " ".join(text.split())
    return f"not ({text})" if isinstance(held, Apply) and held.what == "not" else text
