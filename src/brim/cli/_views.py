"""Every record that a command prints, with the view that prints it: on the terminal, by `print(record)`, and in a notebook.

A view gives blocks: strings, tables and grids of rich. Here they become plain text or HTML.
"""

from __future__ import annotations

import importlib
from html import escape
from typing import TYPE_CHECKING, Any, Final

from brim.cli._output import plain_text
from brim.machine.screen import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.table import Column, Table

_VIEWS: Final[dict[str, tuple[str, str]]] = {
    "Diagnosis": ("_doctor_view", "diagnosis_blocks"),
    "Emitted": ("_plan_view", "emitted_lines"),
    "Emulation": ("_emulate_view", "blocks_of"),
    "Environment": ("env", "environment_blocks"),
    "Estimate": ("estimate", "estimate_blocks"),
    "GPU": ("gpus", "gpu_blocks"),
    "GPUChoice": ("gpus", "choice_blocks"),
    "Largest": ("max", "largest_blocks"),
    "Machine": ("_machine", "machine_blocks"),
    "Measurement": ("_probe_view", "probe_blocks"),
    "Model": ("models", "model_blocks"),
    "ModelCard": ("models", "card_blocks"),
    "Observation": ("_observe_view", "lines_of"),
    "Plan": ("_plan_view", "plan_blocks"),
    "Solution": ("_plan_view", "solution_blocks"),
    "Sweep": ("_plan_view", "sweep_blocks"),
    "TrainingResult": ("_train_view", "result_blocks"),
    "Verification": ("_verify_view", "verification_blocks"),
}
"""By class: the module of `brim.cli` and its function."""


def text_of(value: object) -> str | None:
    """As the command prints it; None where no command does."""
    blocks = _blocks(value)
    return None if blocks is None else plain_text(*blocks)


def html_of(value: object) -> str | None:
    """The same for a notebook: tables as tables."""
    blocks = _blocks(value)
    return None if blocks is None else "<div>" + "".join(map(_html, blocks)) + "</div>"


def _blocks(value: object) -> Iterable[RenderableType] | None:
    home = _VIEWS.get(type(value).__name__)
    if home is None:
        return None
    module, function = home
    found: Iterable[RenderableType] = getattr(importlib.import_module(f"brim.cli.{module}"), function)(value)
    return found


def _html(block: Any) -> str:
    from rich.padding import Padding
    from rich.table import Table

    if isinstance(block, Padding):
        return _html(block.renderable)
    if isinstance(block, Table):
        return _table(block)
    text = getattr(block, "plain", block)
    return f'<div style="white-space:pre-wrap">{escape(printable(str(text)))}</div>' if text else "<br>"


def _table(table: Table) -> str:
    rows = ["".join(_cell("td", cell, column) for cell, column in zip(row, table.columns, strict=True)) for row in _rows(table)]
    head = "".join(_cell("th", column.header, column) for column in table.columns) if table.show_header else ""
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in ([head] if head else []) + rows) + "</table>"


def _rows(table: Table) -> Iterable[tuple[object, ...]]:
    return zip(*(column.cells for column in table.columns), strict=True)


def _cell(name: str, text: object, column: Column) -> str:
    side = "right" if column.justify == "right" else "left"
    return f'<{name} style="text-align:{side};white-space:pre-wrap">{escape(printable(str(text)))}</{name}>'
