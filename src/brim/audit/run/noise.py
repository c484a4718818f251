"""How noisy the gradient is, from the micro-batches of ordinary steps.

The noise scale `B = tr(S) / |G|^2` (McCandlish et al. 2018, arXiv 1812.06162) is the batch at which noise and signal of a gradient are
equally large. Much below it, a batch twice as large takes half as many steps; much above it, as many steps at twice the cost.

A step has k micro-batches. The i-th has n_i supervised tokens and the gradient g_i of its mean loss; all N tokens together have g. Then

    S = (sum of n_i |g_i|^2 - N |g|^2) / (k - 1),        |G|^2 = |g|^2 - S / N

have the right means whatever the n_i are. The usual formula for two batch sizes puts averages in the place of the n_i, and is wrong for
ragged tokens: in simulation it gives twice the noise and a negative signal. One step says little, so S and |G|^2 are averaged over steps,
each by itself, and then divided; steps that are drawn again and again, in blocks because neighbours resemble each other, say how sure
that is.

Two things to know. The tokens of one sequence resemble each other, so the answer is better read in sequences. And where micro-batches hold
sequences of like length, as brim's do, what differs between short and long ones counts as noise too; on instruction data with a small model
that made no difference that could be measured (S between 108 and 110 for micro-batches of 1 to 8 sequences).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.records import LedgerEntry

FEWEST_STEPS: Final = 20
_DRAWS: Final = 1000
_OUTSIDE: Final = 0.025
"""At each end: nineteen of twenty draws lie between."""

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale of a run, with its 95 % interval; None where the signal cannot be told from zero."""

    steps: int
    noise: float
    """S, for one token."""
    signal: float
    """|G|^2."""
    noise_interval: Interval
    signal_interval: Interval
    tokens: float | None
    tokens_interval: Interval | None
    at_least_tokens: float
    """What it is at least, by the same sureness, where the signal is too small to be told: 0 if even that cannot be said."""
    tokens_per_sequence: float

    @property
    def sequences(self) -> float | None:
        """The noise scale in sequences of the run's own mean length."""
        return None if self.tokens is None else self.tokens / self.tokens_per_sequence

    @property
    def sequences_interval(self) -> Interval | None:
        """Its interval."""
        if self.tokens_interval is None:
            return None
        low, high = self.tokens_interval
        return low / self.tokens_per_sequence, high / self.tokens_per_sequence


def of_step(items: npt.ArrayLike, squares: npt.ArrayLike, whole_square: float) -> tuple[float, float]:
    """S and |G|^2 of one step: tokens and squared gradient norms of its micro-batches, and the squared norm of the whole gradient."""
    counts, norms = np.asarray(items, np.float64), np.asarray(squares, np.float64)
    total = float(counts.sum())
    noise = (float(counts @ norms) - total * whole_square) / (len(counts) - 1)
    return noise, whole_square - noise / total


def of_entry(entry: LedgerEntry) -> tuple[float, float] | None:
    """The same of a line of the ledger; None where it has not two micro-batches with a known gradient each."""
    taught = [one for one in entry.slices if one.items]
    squares = [one.gradient_square for one in taught if one.gradient_square is not None]
    if len(taught) < 2 or len(squares) < len(taught) or entry.grad_norm is None or entry.skipped:
        return None
    found = of_step([one.items for one in taught], squares, entry.grad_norm**2)
    return found if all(np.isfinite(found)) else None


def noise_scale(steps: Sequence[tuple[float, float]] | Floats, *, tokens_per_sequence: float = 1.0) -> NoiseScale | None:
    """The noise scale of a run from (S, |G|^2) of each of its steps, in their order; None for fewer steps than can say anything."""
    values = np.asarray(steps, np.float64).reshape(-1, 2)
    if len(values) < FEWEST_STEPS:
        return None
    noise, signal = values.mean(axis=0)
    draws = _drawn_means(values)
    noise_interval, signal_interval = _interval(draws[:, 0]), _interval(draws[:, 1])
    is_known = noise > 0 and signal > 0 and signal_interval[0] > 0
    return NoiseScale(
        steps=len(values),
        noise=float(noise),
        signal=float(signal),
        noise_interval=noise_interval,
        signal_interval=signal_interval,
        tokens=float(noise / signal) if is_known else None,
        tokens_interval=_interval(_ratios(draws)) if is_known else None,
        at_least_tokens=max(0.0, noise_interval[0]) / signal_interval[1] if signal_interval[1] > 0 else 0.0,
        tokens_per_sequence=tokens_per_sequence,
    )


def _ratios(draws: Floats) -> Floats:
    """Noise by signal of each draw; without end where a draw has no signal."""
    ratios = np.full(len(draws), np.inf)
    positive = draws[:, 1] > 0
    with np.errstate(over="ignore"):
        ratios[positive] = np.maximum(draws[positive, 0], 0) / draws[positive, 1]
    return ratios


def _drawn_means(values: Floats) -> Floats:
    """Means of the steps drawn anew, block by block (moving-block bootstrap, Kuensch 1989). The same draws for the same run."""
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(0).integers(0, count - length + 1, size=(_DRAWS, -(-count // length)))
    sums = np.concatenate([np.zeros((1, 2)), values.cumsum(axis=0)])
    blocks = (sums[length:] - sums[:-length]) / length
    means: Floats = blocks[starts].mean(axis=1)
    return means


def _interval(values: Floats) -> Interval:
    low, high = np.quantile(values, [_OUTSIDE, 1 - _OUTSIDE])
    return float(low), float(high)
