"""Data loaders: the settings in force, the line that made them, and which of them feed training."""

# ruff: noqa: PTH100, PTH120 (pathlib is not imported into somebody else's interpreter)

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    "<frozen ",
    os.path.dirname(os.__file__) + os.sep,
)
_MOST_FILES = 1000
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Loaders:
    """Every loader that was made, and how often it has given a batch."""

    def __init__(self, torch: Any, keep: Callable[[dict[str, Any]], None]) -> None:
        self._torch = torch
        self._keep = keep
        self._made: dict[int, dict[str, Any]] = {}
        self._running: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._fresh: list[dict[str, Any]] = []
        self._told: list[dict[str, Any]] = []

    def construct(self, args: Any, kwargs: Any) -> None:
        """A loader was made. It is told when it first runs: wrappers make several of which one runs."""
        del kwargs
        loader = args[0]
        self._made[id(loader)] = {
            "settings": _settings(self._torch, loader),
            "where": line_of_the_script(),
            "batches": 0,
            "trains": None,
        }

    def start(self, loader: Any, iterator: Any) -> None:
        """A loader begins to run."""
        made = self._made.get(id(loader))
        if made is None:
            return
        if "loader" not in made:
            told = {"kind": "loader", "where": made["where"], **made["settings"]}
            if told not in self._told:
                self._told.append(told)
                self._keep({**told, "loader": len(self._told) - 1})
            made["loader"] = self._told.index(told)
        self._running[id(iterator)] = (iterator, made)
        while len(self._running) > 8:
            self._running.pop(next(iter(self._running)))

    def give(self, iterator: Any) -> int:
        """A loader gave a batch: 1 if it is known as one that feeds training."""
        _iterator, made = self._running.get(id(iterator), (None, None))
        if made is None:
            return 0
        made["batches"] += 1
        if not made["trains"] and not any(each is made for each in self._fresh):
            self._fresh.append(made)
        return int(bool(made["trains"]))

    def stop(self, iterator: Any) -> bool:
        """A loader has come to its end: whether it is one that feeds training."""
        _iterator, made = self._running.pop(id(iterator), (None, None))
        return made is not None and made["trains"] is True

    def mark_training(self) -> int:
        """What has just been read was trained on: the batches of loaders of which that was not known."""
        batches = 0
        while self._fresh:
            made = self._fresh.pop()
            made["trains"] = True
            batches += made["batches"]
            self._keep({"kind": "trains", "loader": made["loader"]})
        return batches

    def mark_evaluation(self) -> None:
        """What has just been read was not."""
        while self._fresh:
            self._fresh.pop()["trains"] = False

    def workers(self) -> list[int]:
        """The processes that load at the moment."""
        found = []
        for iterator, _made in self._running.values():
            found += [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.is_alive()]
        return found

    def counts(self) -> list[list[Any]]:
        """Of each loader that ran: its number, its batches, and whether it feeds training."""
        return [[made["loader"], made["batches"], made["trains"]] for made in self._made.values() if "loader" in made]


def _settings(torch: Any, loader: Any) -> dict[str, Any]:
    samplers = torch.utils.data
    batch = getattr(loader, "batch_size", None)
    if batch is None:
        batch = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    found = {
        "batch_size": batch if isinstance(batch, int) else None,
        "num_workers": getattr(loader, "num_workers", None),
        "pin_memory": bool(getattr(loader, "pin_memory", False)),
        "drop_last": bool(
            getattr(loader, "drop_last", False) or getattr(getattr(loader, "batch_sampler", None), "drop_last", False)
        ),
        "prefetch_factor": getattr(loader, "prefetch_factor", None),
        "persistent_workers": bool(getattr(loader, "persistent_workers", False)),
        "shuffle": isinstance(getattr(loader, "sampler", None), samplers.RandomSampler),
        "sequences": None,
    }
    if not isinstance(loader.dataset, samplers.IterableDataset):
        with suppress(Exception):
            found["sequences"] = len(loader.dataset)
    return found


def files_of_the_script() -> list[str]:
    """The files that were imported so far and are neither a library's nor ours."""
    found = []
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and not name.startswith(_OURS) and not any(part in name for part in _LIBRARIES):
            found.append(os.path.abspath(name))
    return found[:_MOST_FILES]


def line_of_the_script() -> str | None:
    """`file:line` of the nearest caller that is neither a library's nor ours."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 (the documented way to walk the stack cheaply)
    while frame is not None:
        name = frame.f_code.co_filename
        # A dataclass's own __init__ is text that was compiled on the spot.
        is_made_up = name == "<string>" and frame.f_code.co_name == "__init__"
        if not is_made_up and not name.startswith(_OURS) and not any(part in name for part in _LIBRARIES):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
