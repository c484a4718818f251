"""A polynomial of the padded shape through amounts that are known at some shapes: bytes or seconds, predicted or measured.

The peak of a step is the largest of several moments (the loss, the optimizer's step, ...), each of which grows in its own way: where one
polynomial is off, the largest of two or three is taken. Coefficients are never negative, so the cost never falls when there are more
sequences or longer ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np

from brim.step.budget import FloatArray, ShapeCost
from brim.step.exchange import travels

Shape = tuple[int, ...]
"""Sequences, padded length, and the targets' where there are any."""

BEYOND: Final = 1.3
"""Times the limit: shapes that need more say nothing about what fits."""
_NEAR: Final = 0.85
MOST_UNDERSTATED: Final = 0.03
"""Of a shape that is not near the limit."""
MOST_PIECES: Final = 3
_GOOD_ERROR: Final = 0.01
"""Between the most and the least stated of the shapes that were looked at: good enough, no further piece is tried."""
_WORTH: Final = 0.8
"""Of the error before, what a further piece must leave at most."""
_ROUNDS: Final = 10
_NO_PULL: Final = 1e-9


@travels
@dataclass(frozen=True)
class LargestOf:
    """The largest of several costs: a peak is that of its highest moment."""

    costs: tuple[ShapeCost, ...]

    def __call__(self, count: Any, *lengths: Any) -> FloatArray:
        """The cost of `count` sequences padded to these lengths."""
        largest = self.costs[0](count, *lengths)
        for cost in self.costs[1:]:
            largest = np.maximum(largest, cost(count, *lengths))
        return largest


def fit(points: dict[Shape, Any], limit: float, *, most_pieces: int = MOST_PIECES) -> LargestOf:
    """The largest of as few polynomials as describe these amounts well. What is beyond the limit counts little."""
    shapes, amounts = np.array(list(points), np.float64), np.array(list(points.values()), np.float64)
    terms = _terms(shapes)
    weights = np.minimum(1.0, limit / amounts) ** 2 / amounts
    best: tuple[float, FloatArray] | None = None
    for pieces in range(1, most_pieces + 1):
        found = _largest(terms, amounts, weights, pieces)
        error = _spread(terms, found, amounts, limit)
        if best is None or error < _WORTH * best[0]:
            best = error, found
        if best[0] <= _GOOD_ERROR:
            break
    assert best is not None
    names = [field.name for field in fields(ShapeCost)]
    return LargestOf(tuple(ShapeCost(**dict(zip(names, map(float, row), strict=False))) for row in best[1]))


def raised(cost: LargestOf, points: dict[Shape, int], limit: float) -> LargestOf:
    """The cost times what it takes not to understate these: not at all near the limit, where it decides, and little below it."""
    within = {shape: needed for shape, needed in points.items() if needed <= BEYOND * limit} or points
    allowed = {shape: 1.0 if needed >= _NEAR * limit else 1 - MOST_UNDERSTATED for shape, needed in within.items()}
    factor = max(allowed[shape] * needed / float(cost(*shape)) for shape, needed in within.items())
    return LargestOf(tuple(ShapeCost(**{name: factor * value for name, value in asdict(each).items()}) for each in cost.costs))


def _terms(shapes: FloatArray) -> FloatArray:
    """What each coefficient of `ShapeCost` is multiplied with, in the order of its fields."""
    count, length, *targets = shapes.T
    several = count if len(set(count)) > 1 else 0 * count  # one count: no different from what is fixed
    columns = [np.ones(len(count)), several, count * length, count * _square(length)]
    for target in targets:
        columns += [count * target, count * _square(target), count * length * target]
    return np.stack(columns, axis=1)


def _square(lengths: FloatArray) -> FloatArray:
    """Two lengths do not tell a square from a line, and between them the line is above."""
    return lengths**2 if len(set(lengths)) > 2 else 0 * lengths


def _largest(terms: FloatArray, amounts: FloatArray, weights: FloatArray, pieces: int) -> FloatArray:
    """Coefficients of each piece: every piece is fitted to the shapes at which it is the largest, over and over."""
    groups = np.argsort(np.argsort(amounts, kind="stable")) * pieces // len(amounts)
    best, least = None, np.inf
    for _round in range(_ROUNDS):
        found = np.stack([_not_negative(terms, amounts, weights * (groups == group)) for group in np.unique(groups)])
        stated = terms @ found.T
        error = float((((stated.max(axis=1) - amounts) * weights) ** 2).sum())
        if error < least:
            best, least = found, error
        before, groups = groups, stated.argmax(axis=1)
        if (before == groups).all():
            break
    assert best is not None
    return best


def _not_negative(terms: FloatArray, amounts: FloatArray, weights: FloatArray) -> FloatArray:
    """Least squares without negative coefficients (Lawson and Hanson, Solving Least Squares Problems, chapter 23)."""
    scale = np.maximum((terms * weights[:, None]).max(axis=0), np.finfo(float).tiny)
    left, right = terms * weights[:, None] / scale, amounts * weights
    found = np.zeros(len(scale))
    used = np.zeros(len(scale), np.bool_)
    for _round in range(_ROUNDS * len(scale)):
        pull = np.where(used, -np.inf, left.T @ (right - left @ found))
        if pull.max() <= _NO_PULL * np.abs(right).max():
            break
        used[pull.argmax()] = True
        while True:
            wanted = np.zeros(len(scale))
            wanted[used] = np.linalg.lstsq(left[:, used], right, rcond=None)[0]
            if (wanted[used] > 0).all():
                break
            # As far towards it as none becomes negative; whoever reaches zero is out.
            falling = used & (wanted <= 0)
            share = (found[falling] / np.maximum(found[falling] - wanted[falling], np.finfo(float).tiny)).min()
            found = found + share * (wanted - found)
            used &= found > _NO_PULL
        found = wanted
    return np.asarray(found / scale, np.float64)


def _spread(terms: FloatArray, found: FloatArray, amounts: FloatArray, limit: float) -> float:
    """Between the most overstated and the most understated of what matters."""
    ratios = (terms @ found.T).max(axis=1) / amounts
    within = ratios[amounts <= BEYOND * limit] if (amounts <= BEYOND * limit).any() else ratios
    return float(within.max() / within.min() - 1)
