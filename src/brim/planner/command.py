"""A question as the command line that asks it, so that every answer can be tried by typing it."""

from __future__ import annotations

import os
import shlex
from typing import Any

from brim.machine.records import GPU
from brim.records import Measurement
from brim.workload.lengths import Lengths
from brim.workload.resolve import Model

_ONLY_IN_PYTHON = frozenset({"cache", "where", "step"})
_NO_CLIPPING = "0"
_REPEATED = frozenset({"data", "freeze"})


def command_of(model: object, asked: dict[str, Any], **changes: Any) -> str:
    """`brim plan MODEL --flags`: what was asked, with changes; a change to None takes a flag out."""
    name = model_name(model)
    said = {**asked, **changes}
    return shlex.join(["brim", "plan", *([name] if name else []), *flags_of(said)])


def model_name(model: object) -> str:
    """What names the model on a command line; empty for a module."""
    return model.given if isinstance(model, Model) else os.fspath(model) if isinstance(model, str | os.PathLike) else ""


def flags_of(asked: dict[str, Any]) -> list[str]:
    """Keywords of `brim.plan` as flags."""
    words: list[str] = []
    for name, value in asked.items():
        if name not in _ONLY_IN_PYTHON:
            words += _flag(name, value)
    return words


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if name == "max_grad_norm" and value is None:
        return [flag, _NO_CLIPPING]
    if name == "padded" and value is False:
        return ["--unpadded"]
    if value is None or value is False or value == ():
        return []
    if value is True:
        return [flag]
    if name == "columns":
        return [flag, ",".join(f"{meaning}={column}" for meaning, column in value.items())]
    if name in _REPEATED:
        several = value if isinstance(value, tuple | list) else (value,)
        return [word for single in several for word in (flag, _said(single))]
    if isinstance(value, tuple | list):
        return [flag, ",".join(map(str, value))]
    return [flag, _said(value)]


def _said(value: Any) -> str:
    if isinstance(value, GPU):
        return value.name
    if isinstance(value, Lengths):
        return value.source or "FILE"
    if isinstance(value, Measurement):
        return "FILE"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
