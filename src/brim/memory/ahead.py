"""Several structures traced at once, one on each core, before they are asked for.

A trace is Python all the way, so threads would not help; a forked process shares the imports, which are the most of a cold start, and
leaves its family in the cache, where the asker finds it. Nothing has been computed before the fork but shapes, so no pool of threads can be
lost in it. Where that is not certain (other Python threads, no fork, no cache) nothing happens here, and each is traced when it is asked
for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from typing import TYPE_CHECKING

from brim.activity import doing
from brim.memory.obtain import is_traced, obtain, obtain_family, quiet, said

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.memory.setup import Setup, Target

_LONGEST_SECONDS = 120.0
_MOST_PROCESSES = 4

Pair = tuple["Setup", "Target"]


def trace_ahead(wanted: Sequence[tuple[Setup, Target]]) -> None:
    """Trace what is not in the cache yet."""
    if not hasattr(os, "fork") or threading.active_count() > 1:
        return
    missing = [pair for pair in wanted if not is_traced(*pair)]
    shares = _shares(missing, min(_MOST_PROCESSES, _cores()))
    if len(shares) < 2:
        return
    _import_everything(with_adapters=any(setup.method != "full" for setup, _target in missing))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_in_child, args=(share, os.getpid()), daemon=True) for share in shares[1:]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer warn of forks beside native threads
        for process in processes:
            process.start()
    try:
        for pair in shares[0]:
            _tell(pair[0], missing)
            _trace([pair])
        for process in processes:
            _tell(shares[-1][-1][0], missing)
            process.join(_LONGEST_SECONDS)
    finally:
        doing("")
        for process in processes:
            if process.is_alive():
                process.kill()


def _tell(setup: Setup, missing: Sequence[Pair]) -> None:
    done = sum(is_traced(*pair) for pair in missing)
    doing("trace-several", what=said(setup), done=done, total=len(missing))


def _shares(missing: Sequence[tuple[Setup, Target]], count: int) -> list[list[tuple[Setup, Target]]]:
    """Dealt out; structures that differ in the optimizer alone share most of their traces, and stay together."""
    groups: dict[tuple[object, ...], list[tuple[Setup, Target]]] = {}
    for setup, target in missing:
        key = (setup.precision, setup.attention, setup.checkpointing, setup.method, setup.accumulation, setup.micro_batch == 1)
        groups.setdefault(key, []).append((setup, target))
    # A checkpointed step takes twice as long to trace.
    ordered = sorted(groups.values(), key=lambda group: group[0][0].checkpointing == "none")
    shares = [[pair for group in ordered[start::count] for pair in group] for start in range(count)]
    return [share for share in shares if share]


def _trace(share: Sequence[tuple[Setup, Target]]) -> None:
    for setup, target in share:
        try:
            if obtain_family(setup, target) is None:
                obtain(setup, target)
        except Exception:  # noqa: BLE001, S112 (whoever asks for it meets it again, and says it)
            continue


def _in_child(share: Sequence[tuple[Setup, Target]], parent: int) -> None:
    """Ctrl-C is the parent's business; a parent that is gone needs no more families."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for pair in share:
        if os.getppid() == parent:
            _trace([pair])


def _import_everything(*, with_adapters: bool) -> None:
    """What a trace imports on its way, so that it is imported once."""
    doing("import")
    if with_adapters:
        import peft  # noqa: F401

    import brim.memory.tracing.depth  # noqa: F401

    with quiet():
        pass


def _cores() -> int:
    from brim.machine.host import host

    return max(1, int(host().cores))
