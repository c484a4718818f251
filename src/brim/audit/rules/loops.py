"""Rules about training loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.audit.rules import loop_steps, loop_windows

if TYPE_CHECKING:
    from brim.audit.rules.rule import Rule

RULES: tuple[Rule, ...] = (*loop_windows.RULES, *loop_steps.RULES)
