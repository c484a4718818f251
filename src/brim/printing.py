"""How brim's objects print: as the command of the same name prints them, in a terminal and in a notebook.

Views are above the objects that they show. They are named here, once, and imported when something is printed; `repr()` stays that of the
dataclass.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_VIEWS: Final = "brim.cli._views"


class Printable:
    """`print(it)` is what its command prints, and a notebook shows tables."""

    def __str__(self) -> str:
        text = _views().text_of(self)
        return repr(self) if text is None else str(text)

    def _repr_html_(self) -> str | None:
        html = _views().html_of(self)
        return None if html is None else str(html)


def _views() -> Any:
    return importlib.import_module(_VIEWS)
