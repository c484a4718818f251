"""Nothing fits: how much is missing, and the nearest changes that would do, each tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brim.planner.request import Request
    from brim.records import Candidate


def nearest_that_fit(request: Request) -> list[Candidate]:
    """Configurations on other terms that fit."""
    del request
    return []


def missing_bytes(request: Request) -> int:
    return 0
