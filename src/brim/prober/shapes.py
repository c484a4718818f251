"""Which padded shapes a probe runs beside the longest: mixed lengths for the exam, smaller ones for the cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from brim.workload.lengths import Lengths

_PARTS: Final = (2, 4)
"""Of the longest length, the buckets that are run where the data do not say which are of interest."""
_QUANTILES: Final = (0.9, 0.5, 0.1)


@dataclass(frozen=True)
class Shape:
    """The padded shape of a micro-batch."""

    sequences: int
    length: int
    target_length: int = 0
    padded: bool = True
    """Whether a mask with zeros reaches the attention kernels."""

    def part(self, of_length: float, of_sequences: float = 1.0) -> Shape:
        """A smaller one: at least one sequence of one token."""
        return replace(
            self,
            sequences=max(1, int(self.sequences * of_sequences)),
            length=max(1, round(self.length * of_length)),
            target_length=max(1, round(self.target_length * of_length)) if self.target_length else 0,
        )


def mixed_shapes(longest: Shape, lengths: Lengths | None) -> tuple[Shape, ...]:
    """The micro-batches of a step of mixed lengths, a quarter of the size each: the data's own lengths, else parts of the longest."""
    shares = (0.5, 0.25) if lengths is None else [_share(lengths, quantile, longest) for quantile in _QUANTILES]
    return tuple(longest.part(share, 0.25) for share in shares)


def survey_shapes(largest: Shape, lengths: Lengths | None) -> tuple[Shape, ...]:
    """Shapes that take less than the largest: sizes for the curve, from large to small, then shorter sequences, then one without a mask.

    Shorter ones come with at most half of the tokens of the largest, so that they fit whatever else grows with their number.
    """
    if largest.sequences == 1 and largest.length == 1:
        return ()
    curve = [replace(largest, sequences=size) for size in _halves(largest.sequences)]
    shares = [1 / part for part in _PARTS]
    if lengths is not None:
        shares = sorted(
            {round(max(0.05, _share(lengths, quantile, largest)), 2) for quantile in _QUANTILES[1:]} | {0.5}, reverse=True
        )
    shorter = [largest.part(share, min(1.0, 0.5 / share)) for share in shares if share < 1]
    single = [replace(largest, sequences=1)] if largest.sequences > 2 else []
    unmasked = [replace(curve[0], padded=False)] if curve and largest.padded else []
    return tuple(dict.fromkeys([*curve, *shorter, *single, *unmasked]))


def _halves(size: int) -> list[int]:
    found: list[int] = []
    while size > 1 and len(found) < 3:
        size //= 2
        found.append(size)
    return found


def _share(lengths: Lengths, quantile: float, longest: Shape) -> float:
    """Of the longest length, what this quantile of the data has."""
    return min(1.0, max(1.0, float(np.quantile(lengths.tokens, quantile))) / longest.length)
