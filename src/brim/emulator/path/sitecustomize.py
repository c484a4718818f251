"""Python imports this module at startup, because `brim emulate` puts this folder first on PYTHONPATH. It starts the agent, then runs the
sitecustomize that Python would have imported without brim.
"""

# ruff: noqa: PTH100, PTH118, PTH120 (runs in the user's interpreter at startup: nothing but the standard library's core)

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys


def _start_agent(folder: str) -> None:
    """Load the agent by its path, because brim may not be installed for this interpreter."""
    spec = importlib.util.spec_from_file_location(
        "_brim_agent", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["_brim_agent"] = package
    spec.loader.exec_module(package)
    importlib.import_module("_brim_agent.start").start()


def _run_next_sitecustomize(here: str) -> None:
    """Import the next sitecustomize on the path in place of this one in `sys.modules`. This folder stays on the path, because it also
    contains `brim_card`.
    """
    remaining = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", remaining)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("BRIM_EMULATE_SESSION"):
    try:
        _start_agent(os.path.join(os.path.dirname(_HERE), "agent"))
    except Exception as error:  # noqa: BLE001 (Python would print the error and continue without protecting the user's files)
        sys.stderr.write(f"brim emulate: failed to start the agent: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
_run_next_sitecustomize(_HERE)
