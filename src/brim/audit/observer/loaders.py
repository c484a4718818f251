"""Data loaders: the settings in force, the line that made them, and which of them feed training."""

# ruff: noqa: PTH100, PTH120 (pathlib is not imported into somebody else's interpreter)

from __future__ import annotations

import os
import sys
import weakref
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
_MOST_SAMPLERS = 8
"""How deep samplers may lie in samplers."""
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Loaders:
    """Every loader that was made, and how often it has given a batch."""

    def __init__(self, torch: Any, keep: Callable[[dict[str, Any]], None]) -> None:
        self._torch = torch
        self._keep = keep
        self._made: dict[int, dict[str, Any]] = {}
        self._running: dict[int, tuple[Any, dict[str, Any], int | None]] = {}
        self._fresh: list[dict[str, Any]] = []
        self._told: list[dict[str, Any]] = []

    def construct(self, args: Any, kwargs: Any) -> None:
        """A loader was made. It is told when it first runs: wrappers make several of which one runs."""
        del kwargs
        loader = args[0]
        self._made[id(loader)] = {"where": line_of_the_script(), "batches": 0, "trains": None}

    def start(self, loader: Any, iterator: Any) -> None:
        """A loader begins to run."""
        made = self._made.get(id(loader))
        if made is None:
            return
        if "loader" not in made:
            # Now, not when it was made: wrappers (accelerate) put samplers of their own in after that.
            told = {"kind": "loader", "where": made["where"], **_settings(self._torch, loader)}
            if told not in self._told:
                self._told.append(told)
                self._keep({**told, "loader": len(self._told) - 1})
            made["loader"] = self._told.index(told)
        length = None
        if not isinstance(loader.dataset, self._torch.utils.data.IterableDataset):
            with suppress(Exception):
                length = len(loader)
        # Weakly: an iterator that the script lets go takes its workers with it.
        self._running[id(iterator)] = (weakref.ref(iterator), made, length and made["batches"] + length)
        while len(self._running) > 8:
            self._running.pop(next(iter(self._running)))

    def _made_of(self, iterator: Any) -> tuple[dict[str, Any] | None, int | None]:
        """What is known of the loader of an iterator, and with which batch it ends."""
        reference, made, last = self._running.get(id(iterator), (None, None, None))
        return (made, last) if reference is not None and reference() is iterator else (None, None)

    def gave_last(self, iterator: Any) -> bool:
        """Whether it has just given its last batch for training: who knows the length (Lightning) does not ask for one more."""
        made, last = self._made_of(iterator)
        if made is None or made["trains"] is not True or last is None or made["batches"] < last:
            return False
        self._running.pop(id(iterator))
        return True

    def give(self, iterator: Any) -> int:
        """A loader gave a batch: 1 if it is known as one that feeds training."""
        made, _last = self._made_of(iterator)
        if made is None:
            return 0
        made["batches"] += 1
        if not made["trains"] and not any(each is made for each in self._fresh):
            self._fresh.append(made)
        return int(bool(made["trains"]))

    def stop(self, iterator: Any) -> bool:
        """A loader has come to its end: whether it is one that feeds training."""
        made, _last = self._made_of(iterator)
        self._running.pop(id(iterator), None)
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
        for reference, _made, _last in self._running.values():
            found += [worker.pid for worker in getattr(reference(), "_workers", ()) if worker.is_alive()]
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
        "shuffle": None,
        "sequences": None,
    }
    if not isinstance(loader.dataset, samplers.IterableDataset):
        with suppress(Exception):
            found["sequences"] = len(loader.dataset)
        with suppress(Exception):
            found["shuffle"] = _shuffles(samplers, loader)
    return found


def _shuffles(samplers: Any, loader: Any) -> bool | None:
    """Whether the order is random; None where that does not show."""
    found = _first_of(loader, "batch_sampler", "sampler")
    for _depth in range(_MOST_SAMPLERS):
        if isinstance(found, (samplers.RandomSampler, samplers.SubsetRandomSampler, samplers.WeightedRandomSampler)):
            return True
        if isinstance(found, samplers.SequentialSampler):
            return False
        told = getattr(found, "shuffle", None)
        if isinstance(told, bool):
            return told
        # Batch samplers hold a sampler, and those of accelerate hold a batch sampler.
        inner = _first_of(found, "batch_sampler", "sampler")
        if inner is None:
            # Who holds a generator of random numbers draws from it.
            return True if getattr(found, "generator", None) is not None else None
        found = inner
    return None


def _first_of(owner: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(owner, name, None)) is not None), None)


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
