"""HTML and SVG as text, made so that nothing a user wrote can become a tag.

A text is escaped when it enters a tag, unless it is `Html` already, and only `tag` and `join` make that.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from brim.machine.screen import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

_VOID = frozenset({"meta", "br", "wbr"})


class Html(str):
    """A text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Any value as a page may show it."""
    return value if isinstance(value, Html) else Html(escape(printable(str(value))))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element. `class_` stands for class, `stroke_width` for stroke-width; an attribute of None or False is left out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelt = key.rstrip("_").replace("_", "-")
        # Attributes of SVG with a capital in them are written as they are.
        spelt = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio", "patternunits": "patternUnits"}.get(
            spelt, spelt
        )
        words.append(spelt if value is True else f'{spelt}="{text(value)}"')
    start = f"<{' '.join(words)}>"
    if name in _VOID:
        return Html(start)
    return Html(f"{start}{join(children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Parts one after the other; None is nothing."""
    return Html(text(between).join(text(part) for part in parts if part is not None))
