"""What one format writes, before it is written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Files:
    """File names and their texts, and what should be said of them."""

    texts: dict[str, str]
    notes: tuple[str, ...] = ()
