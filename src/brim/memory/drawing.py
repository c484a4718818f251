"""The timeline of a step as a picture: areas by kind, stacked, under the line of reserved memory and the limit."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from brim.locale import _
from brim.sizes import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from brim.memory.timeline import Timeline

_WIDTH, _HEIGHT = 960, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 40, 40
_POINTS = 720
_COLOURS = {
    "parameters": "#4c78a8", "buffers": "#9d755d", "workspace": "#bab0ac", "optimizer": "#54a24b", "gradients": "#f58518",
    "communication": "#72b7b2", "activations": "#e45756", "logits": "#b279a2", "temporary": "#eeca3b",
}  # fmt: skip
"""What stays lies below what comes and goes."""


def draw(timeline: Timeline, title: str) -> str:
    """An SVG document: text and shapes only."""
    runs = np.array_split(np.arange(len(timeline.allocated)), min(_POINTS, len(timeline.allocated)))
    # Of every run the event where most is allocated, so that no peak is lost.
    chosen = np.array([run[np.argmax(timeline.allocated[run])] for run in runs])
    reserved = int(timeline.reserved.max())
    # A limit far above would press the picture flat: it is left out then.
    tallest = max(reserved, timeline.limit_bytes) if timeline.limit_bytes < 2 * reserved else reserved * 11 // 10
    scale = _Scale(len(chosen), tallest)
    parts = [*_areas(timeline, chosen, scale), *_lines(timeline, chosen, scale), *_phases(timeline, chosen, scale), *_axis(scale)]
    heading = f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}: {escape(_("memory of one step"))}</text>'
    body = "\n".join([heading, *parts, *_legend(timeline)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


class _Scale:
    def __init__(self, points: int, tallest: int) -> None:
        self._points, self.tallest = max(1, points - 1), tallest

    def x(self, index: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / self._points

    def y(self, size: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * size / self.tallest

    def path(self, sizes: NDArray[np.int64]) -> str:
        return " ".join(f"{self.x(index):.1f},{self.y(size):.1f}" for index, size in enumerate(sizes.tolist()))


def _in_order(timeline: Timeline) -> list[tuple[str, NDArray[np.int64]]]:
    return [(kind, timeline.kinds[kind]) for kind in _COLOURS if kind in timeline.kinds]


def _areas(timeline: Timeline, chosen: NDArray[np.int64], scale: _Scale) -> Iterator[str]:
    below = np.zeros(len(chosen), dtype=np.int64)
    for kind, sizes in _in_order(timeline):
        above = below + sizes[chosen]
        back = " ".join(reversed(scale.path(below).split(" ")))
        yield f'<polygon points="{scale.path(above)} {back}" fill="{_COLOURS[kind]}"><title>{kind}</title></polygon>'
        below = above


def _lines(timeline: Timeline, chosen: NDArray[np.int64], scale: _Scale) -> Iterator[str]:
    yield f'<polyline points="{scale.path(timeline.reserved[chosen])}" fill="none" stroke="black" stroke-width="1.2"/>'
    if timeline.limit_bytes <= scale.tallest:
        y = scale.y(timeline.limit_bytes)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d62728" stroke-dasharray="6 4"/>'
        label = _("limit {size}").format(size=format_bytes(timeline.limit_bytes))
        yield f'<text x="{_WIDTH - _RIGHT + 6}" y="{y + 4:.1f}" fill="#d62728">{escape(label)}</text>'


def _phases(timeline: Timeline, chosen: NDArray[np.int64], scale: _Scale) -> Iterator[str]:
    names = {"forward": _("forward"), "backward": _("backward"), "optimizer": _("optimizer"), "evaluation": _("evaluation")}
    phases = [timeline.phases[index] for index in chosen.tolist()]
    start = 0
    for phase, group in groupby(phases):
        count = len(list(group))
        x = scale.x(start)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#999" stroke-width="0.6"/>'
        if count > len(phases) / 30:
            yield f'<text x="{x + 4:.1f}" y="{_HEIGHT - 16}">{escape(names.get(phase, phase))}</text>'
        start += count


def _axis(scale: _Scale) -> Iterator[str]:
    for share in (0.25, 0.5, 0.75, 1.0):
        y = scale.y(scale.tallest * share)
        label = format_bytes(int(scale.tallest * share)) if scale.tallest < GIB else f"{scale.tallest * share / GIB:.1f} GiB"
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd" stroke-width="0.5"/>'


def _legend(timeline: Timeline) -> Iterator[str]:
    x = _WIDTH - _RIGHT + 6
    for index, (kind, sizes) in enumerate(reversed(_in_order(timeline))):
        y = _TOP + 60 + 20 * index
        yield f'<rect x="{x}" y="{y}" width="11" height="11" fill="{_COLOURS[kind]}"/>'
        yield f'<text x="{x + 16}" y="{y + 10}">{escape(kind)} {format_bytes(int(sizes.max()))}</text>'
    y = _TOP + 60 + 20 * len(timeline.kinds)
    yield f'<line x1="{x}" x2="{x + 11}" y1="{y + 6}" y2="{y + 6}" stroke="black"/>'
    yield f'<text x="{x + 16}" y="{y + 10}">{escape(_("reserved"))}</text>'
