"""The effective batch cut into micro-batches, exactly: nothing is floored and nothing is repeated.

Ranks get shares that differ by one sequence at most, and a share is cut into micro-batches that differ by one at most. All ranks run
equally many of them, because gradients are reduced together; where there are more ranks than sequences, some run an empty one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from brim.step.slicing import even_shares


@dataclass(frozen=True)
class Cut:
    """One global batch as micro-batches."""

    micro_batch: int
    """The largest slice."""
    accumulation: int
    slices: tuple[int, ...]
    """Every micro-batch, rank by rank; empty where all are `micro_batch`."""

    @property
    def is_even(self) -> bool:
        """Whether micro-batch x accumulation x ranks says it all."""
        return not self.slices


def cut(effective_batch: int, micro_batch: int, ranks: int = 1) -> Cut:
    """The fewest micro-batches of at most `micro_batch` sequences, as equal as they can be."""
    share = -(-effective_batch // ranks)
    return cut_into(effective_batch, -(-share // min(micro_batch, share)), ranks)


def cut_into(effective_batch: int, accumulation: int, ranks: int = 1) -> Cut:
    """`accumulation` micro-batches on every rank, as equal as they can be."""
    shares = even_shares(effective_batch, ranks)
    slices = tuple(size for share in shares for size in even_shares(share, accumulation))
    largest = max(slices)
    return Cut(largest, accumulation, () if min(slices) == largest else slices)


def cuts(effective_batch: int, ranks: int = 1) -> list[Cut]:
    """Every way of cutting, from the smallest micro-batches to the largest; each largest slice once, with the fewest micro-batches."""
    share = -(-effective_batch // ranks)
    found = {cut.micro_batch: cut for cut in (cut_into(effective_batch, count, ranks) for count in _counts(share))}
    return [found[size] for size in sorted(found)]


def _counts(share: int) -> list[int]:
    """Numbers of micro-batches that give different largest slices, the fewest for each."""
    root = math.isqrt(share) + 1
    # Few micro-batches give every large slice; small slices are all there are.
    sizes = {-(-share // count) for count in range(1, min(root, share) + 1)} | set(range(1, min(root, share) + 1))
    return sorted({-(-share // size) for size in sizes}, reverse=True)
