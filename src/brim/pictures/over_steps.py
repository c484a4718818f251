"""What the charts over the steps of a run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from brim.locale import _
from brim.pictures.charts import Line
from brim.pictures.parts import Table
from brim.pictures.plot import Numbers, Symbol
from brim.pictures.thinning import spread, thin

if TYPE_CHECKING:
    from brim.pictures.steps import Steps

Named = tuple[str, Numbers, Callable[[float | None], str]]
"""A column of a table: heading, values, how one is written."""


def line_of(name: str, steps: Steps, values: Numbers, look: str, symbol: Symbol | None = None, *, is_drawn: bool = True) -> Line:
    """A series, thinned to what a picture shows."""
    kept = thin(values)
    return Line(name, [steps.step[place] for place in kept], [values[place] for place in kept], look, symbol, is_drawn)


def table_of(steps: Steps, columns: Sequence[Named]) -> Table:
    """The same numbers at even distances."""
    places = spread(len(steps))
    rows = [
        [f"{steps.step[place]:,.0f}", *(form(values[place]) for _name, values, form in columns)]
        for place in places
    ]  # fmt: skip
    note = ""
    if steps.stride > 1:
        note = _(
            "{shown} of {all} steps. One in {stride} was read for the chart: a peak between two of them is not seen."
        ).format(shown=len(places), all=f"{steps.total:,}", stride=steps.stride)
    elif len(places) < steps.total:
        note = _(
            "{shown} of {all} steps, at even distances; the chart holds the highest and the lowest of every stretch."
        ).format(shown=len(places), all=f"{steps.total:,}")
    return Table([_("step"), *(name for name, _values, _form in columns)], rows, frozenset(), note)
