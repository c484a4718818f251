"""Python imports this at its start, because `brim observe` puts this folder first on PYTHONPATH. Then the script's own one is run."""

# ruff: noqa: PTH100, PTH118, PTH120 (pathlib is not imported into somebody else's interpreter)

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys


def _start_observer(folder: str) -> None:
    try:
        place = os.path.join(folder, "__init__.py")
        spec = importlib.util.spec_from_file_location("_brim_observer", place, submodule_search_locations=[folder])
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["_brim_observer"] = package
        spec.loader.exec_module(package)
        importlib.import_module("_brim_observer.start").start()
    except Exception:  # noqa: BLE001, S110 (the script comes first, whatever happens here)
        pass


def _run_the_other(here: str) -> None:
    """What Python would have imported without us. It takes our place in sys.modules, so that the script sees its own."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("BRIM_OBSERVE"):
    _start_observer(os.path.dirname(_HERE))
_run_the_other(_HERE)
