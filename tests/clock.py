"""Tests by the clock: what else the machine does may spoil a measurement, so such a test is tried again before it fails."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ATTEMPTS = 4
REST_SECONDS = 0.5


def by_the_clock(test: Callable[..., None]) -> Callable[..., None]:
    """A test that holds on a quiet machine: one attempt of a few must pass, each in a folder of its own.

    Only for measured seconds and for what follows from them; what must hold at any speed says so with `pytest.fail`, which ends it at once.
    """

    @functools.wraps(test)
    def tried(*arguments: Any, **fixtures: Any) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                test(*arguments, **_in_a_folder_of_its_own(fixtures, attempt))
            except AssertionError:
                if attempt == ATTEMPTS:
                    raise
                time.sleep(REST_SECONDS)
            else:
                return

    return tried


def _in_a_folder_of_its_own(fixtures: dict[str, Any], attempt: int) -> dict[str, Any]:
    if not isinstance(path := fixtures.get("tmp_path"), Path):
        return fixtures
    folder = path / f"attempt-{attempt}"
    folder.mkdir()
    return fixtures | {"tmp_path": folder}
