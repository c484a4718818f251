"""Wait for a module to be imported, then do something with it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .importlib_bootstrap import exec_module_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Finder:
    """Stands first on `sys.meta_path`, finds nothing by itself, and listens to the loaders of a few modules.

    The loader stays what it is: only its `exec_module` is another one until it has been called. So a reload is heard too, and whoever
    asks a module for its loader gets the real one.
    """

    def __init__(self, wanted: dict[str, Callable[[Any], None]]) -> None:
        self._wanted = wanted

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the other finders give."""
        then = self._wanted.get(name)
        if then is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                with suppress(Exception):
                    spec.loader.exec_module = exec_module_of(spec.loader, name, then)
                return spec
        return None


def when_imported(wanted: dict[str, Callable[[Any], None]]) -> None:
    """Call each function with its module, now if it is there already."""
    sys.meta_path.insert(0, Finder(wanted))
    for name, then in wanted.items():
        if name in sys.modules:
            then(sys.modules[name])
