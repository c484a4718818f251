"""The parts that sections are made of: facts, tables, figures, lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from brim.locale import _
from brim.pictures.charts import Drawing
from brim.pictures.markup import Html, join, tag
from brim.pictures.plot import SYMBOLS, Symbol


@dataclass(frozen=True)
class Section:
    """One part of the page; `name` is its place in addresses and in `--json`."""

    name: str
    title: str
    body: Html


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a line, a mark or a field of colour, and its words."""

    said: str
    look: str
    shape: Symbol | Literal["line", "field"]


@dataclass(frozen=True)
class Table:
    """Words in rows. Columns whose number is in `left` hold words, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: frozenset[int] = frozenset({0})
    note: str = ""


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """Labels and values; a row without a value is left out."""
    found = [(label, value) for label, value in rows if value not in ("", None)]
    return tag("dl", *(tag("div", tag("dt", label), tag("dd", value)) for label, value in found), class_="facts")


def paragraphs(*texts: str) -> Html:
    """One paragraph each."""
    return join(tag("p", each) for each in texts if each)


def listed(items: Iterable[object], look: str = "") -> Html:
    """A list; nothing where it would be empty."""
    found = [tag("li", each) for each in items]
    return tag("ul", *found, class_=look or None) if found else Html("")


def table(made: Table, label: str) -> Html:
    """In a box of its own, which scrolls where the table is wider than the page."""

    def look(place: int) -> str | None:
        return None if place in made.left else "number"

    head = tag("tr", *(tag("th", each, scope="col", class_=look(place)) for place, each in enumerate(made.heads)))
    body = [tag("tr", *(tag("td", cell, class_=look(place)) for place, cell in enumerate(row))) for row in made.rows]
    whole = tag("table", tag("caption", label, class_="hidden"), tag("thead", head), tag("tbody", *body))
    note = tag("p", made.note, class_="small") if made.note else None
    return join([tag("div", whole, class_="wide", role="region", aria_label=label, tabindex=0), note])


def folded(summary: str, body: Html) -> Html:
    """Out of the way until somebody asks; print opens it."""
    return tag("details", tag("summary", summary), body)


def figure(name: str, title: str, says: str, drawing: Drawing | Html, data: Table, *, legend: Sequence[Key] = ()) -> Html:
    """A chart: its heading, one sentence that says what it shows, the picture, and its numbers as a table."""
    found = drawing if isinstance(drawing, Drawing) else Drawing(drawing)
    picture = tag(
        "div", found.svg, class_="drawing", role="img", id=f"chart-{name}", aria_labelledby=f"title-{name} says-{name}",
        data_tips=found.tips or None, tabindex=0 if found.tips else None,
    )  # fmt: skip
    return tag(
        "figure",
        tag("h3", title, id=f"title-{name}"),
        tag("figcaption", says, id=f"says-{name}"),
        _legend(legend),
        picture,
        tag("p", class_="tip", aria_live="polite") if found.tips else None,
        folded(_("The numbers"), table(data, title)),
        class_="chart",
    )


def _legend(keys: Sequence[Key]) -> Html | None:
    if not keys:
        return None
    return tag("ul", *(tag("li", _swatch(key), tag("span", key.said)) for key in keys), class_="legend")


def _swatch(key: Key) -> Html:
    if key.shape == "field":
        drawn = tag("rect", x=1, y=1, width=22, height=12, class_=f"part {key.look}")
    elif key.shape == "line":
        drawn = tag("path", d="M1 7H23", class_=f"line level {key.look}")
    else:
        drawn = tag("g", tag("path", d=SYMBOLS[key.shape]), transform="translate(12 7)", class_=f"mark {key.shape} {key.look}")
    return tag("svg", drawn, width=24, height=14, class_="swatch", aria_hidden="true", focusable="false")
