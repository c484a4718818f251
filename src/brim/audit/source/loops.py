"""All checks of training loops."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

from brim.audit.source import loop_cost, loop_division, loop_exchange, loop_order, loop_precision, loop_rhythm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.audit.found import Found
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project

    Check = Callable[[Module, Project], Iterator[Found]]


def once(check: Check) -> Check:
    """The same check, without repeats: a step that two loops call is looked at twice."""

    @wraps(check)
    def checked(module: Module, project: Project) -> Iterator[Found]:
        seen = set()
        for found in check(module, project):
            key = (found.rule, found.file, found.line, found.end_line, found.message)
            if key not in seen:
                seen.add(key)
                yield found

    return checked


_ALL = (
    *loop_division.CHECKS,
    *loop_order.CHECKS,
    *loop_rhythm.CHECKS,
    *loop_exchange.CHECKS,
    *loop_precision.CHECKS,
    *loop_cost.CHECKS,
)
CHECKS = tuple(map(once, _ALL))
