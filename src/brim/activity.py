"""What a long computation is doing now, for whoever shows progress: a code and its values, without sentences.

The computation writes it and never waits; a view reads it when it likes. One computation runs at a time in a process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Activity:
    """One of `import`; `trace`: what; `trace-several`: what, done, total; `tokens`: path; `compare`: count; `nearest`: flags."""

    code: str = ""
    values: dict[str, Any] = field(default_factory=dict)


_now: Final = [Activity()]


def doing(code: str, **values: Any) -> None:
    """Say what begins."""
    _now[0] = Activity(code, values)


def activity() -> Activity:
    """What was said last."""
    return _now[0]
