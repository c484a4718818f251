"""The same batch on other numbers of GPUs, and other batches on the same: a part of a plan on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.cli._output import Column, bar, format_seconds, table
from brim.locale import _
from brim.pictures import scaling_words as words
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from brim.records import Scaling

_BAR: Final = 16


def scaling_blocks(scaling: Scaling, gpus: int) -> Iterator[RenderableType]:
    """The curve over numbers of GPUs, and the guide to the batch."""
    text = _("The same batch on other numbers of GPUs ({inside} in a node, {between} between nodes; > the plan)")
    yield from ("", text.format(inside=scaling.inside.name, between=scaling.between.name), _curve(scaling, gpus))
    yield from (words.knee(scaling), words.planned(scaling, gpus))
    yield from ("", _("Other batches on {gpus:,} GPUs").format(gpus=gpus), _batches(scaling))
    yield from (words.batch(scaling, gpus), words.noise(scaling))


def _curve(scaling: Scaling, gpus: int) -> Table:
    columns = (
        Column(""),
        Column(_("GPUs"), right=True),
        Column(_("Slices"), right=True, rank=1),
        Column(_("Memory"), right=True),
        Column(_("s/step"), right=True),
        Column(_("Tokens/s"), right=True),
        Column(_("In node"), right=True, rank=3),
        Column(_("Between"), right=True, rank=3),
        Column(_("Waits"), right=True, rank=2),
        Column(_("Efficiency"), right=True),
        Column("", rank=4),
    )
    rows = []
    for point in scaling.points:
        row = [
            ">" if point.gpus == gpus else "",
            f"{point.gpus:,}",
            f"{point.micro_batch} x {point.accumulation}",
            format_bytes(point.device_bytes),
        ]
        if point.efficiency is None:
            rows.append([*row, *["-"] * 5, _("does not fit"), ""])
            continue
        rows.append(
            [
                *row,
                f"{point.step_seconds:.3g}" if point.step_seconds < 999.5 else f"{point.step_seconds:,.0f}",
                f"{point.tokens_per_second:,.0f}",
                format_seconds(point.inside_seconds),
                format_seconds(point.between_seconds) if point.nodes > 1 else "-",
                f"{point.exposed_seconds / point.step_seconds:.0%}",
                f"{point.efficiency:.0%}",
                bar(point.efficiency, width=_BAR),
            ]
        )
    return table(columns, rows)


def _batches(scaling: Scaling) -> Table:
    has_noise = scaling.batches.noise_scale is not None
    columns = (
        Column(_("Effective"), right=True),
        Column(_("s/step"), right=True),
        Column(_("Tokens/s"), right=True),
        Column(_("Efficiency"), right=True),
        *(
            (Column(_("Steps"), right=True), Column(_("Sequences"), right=True), Column(_("Time"), right=True))
            if has_noise
            else ()
        ),
    )
    rows = []
    for point in scaling.batches.points:
        known = [f"{value:.2f}x" for value in (point.steps, point.examples, point.time) if value is not None]
        row = [f"{point.effective_batch:,}", f"{point.step_seconds:.3g}", f"{point.tokens_per_second:,.0f}"]
        rows.append([*row, f"{point.efficiency:.0%}", *known])
    return table(columns, rows)
