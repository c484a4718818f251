"""A training as the command line that repeats it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.planner.command import flags_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def command_of(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """`brim train MODEL --flags`: what was asked for, word by word."""
    told: dict[str, Any] = {}
    for name, value in asked.items():
        if name == "model":
            continue
        if name in {"verify", "probe"}:
            told |= {f"no_{name}": True} if value is False else {name: value} if isinstance(value, str) else {}
        else:
            told[name] = value
    return ("brim", "train", str(asked["model"]), *flags_of(told))
