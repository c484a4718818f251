"""How much of what the device computes is padding, by how sequences come into micro-batches; and the padded shapes of brim's own steps.

A micro-batch is as long as its longest sequence, so random neighbours waste most. Sorting cures it. transformers' `group_by_length` sorts
across optimizer steps, which makes neighbouring steps alike; brim sorts inside each global batch only, and comes as far.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from brim.records import DataReport
from brim.step.budget import FIXED_TOKENS, FloatArray
from brim.step.slicing import IntArray, by_length, deal, even_shares, order_of, slice_batch

if TYPE_CHECKING:
    from brim.records import Strategy
    from brim.workload.lengths import Lengths

_MOST_SLICED: Final = 4096
"""Sequences that are sliced for the report: enough for a share to half a percent, few enough for a tenth of a second."""
_MOST_SHAPED: Final = 8192
_MEGA_BATCHES: Final = 50


def padding_waste(
    lengths: Lengths,
    *,
    effective_batch: int,
    micro_batch: int,
    ranks: int = 1,
    seed: int = 42,
    most_batches: int = 64,
    fixed_tokens: float = FIXED_TOKENS,
) -> dict[Strategy, float]:
    """Share of the computed tokens that is padding, by strategy. `lengths` as the model sees them: already cut.

    `fixed_tokens` is the fixed cost of a micro-batch, as tokens that could be computed in that time: it decides how finely brim slices.
    """
    if lengths.are_equal:
        return {"shuffled": 0.0, "grouped": 0.0, "sliced": 0.0}
    table = _table(lengths)
    order = order_of(len(table), seed, 0)
    shares = tuple(even_shares(effective_batch, ranks))
    parts = _dealt(lengths, effective_batch, shares, seed, _steps(lengths, effective_batch, most_batches, _MOST_SLICED))
    return {
        "shuffled": _waste(table[order], micro_batch),
        "grouped": _waste(table[_grouped(table[order, 0], order, shares[0])], micro_batch),
        "sliced": _sliced_waste(table, parts, micro_batch, fixed_tokens),
    }


def sorted_slices(
    lengths: Lengths, effective_batch: int, slices: tuple[int, ...], ranks: int = 1, seed: int = 42, most_batches: int = 32
) -> IntArray:
    """Padded shapes of sampled optimizer steps, `[batch, rank, micro-batch]` of (sequences, length) or (sequences, length, target length).

    `slices` are the sizes of all micro-batches of a step, rank by rank, as `Configuration.slices` holds them. Inside a global batch
    sequences are sorted, dealt to ranks and cut into these sizes; the short ones come first, because the first slices are the larger.
    """
    assert sum(slices) == effective_batch
    sizes = np.array(slices, np.int64).reshape(ranks, -1)
    shares = tuple(sizes.sum(axis=1).tolist())
    batches = _steps(lengths, effective_batch, most_batches, _MOST_SHAPED)
    steps = []
    for parts in _dealt(lengths, effective_batch, shares, seed, batches):
        longest = np.stack([_longest_of_runs(part[::-1], run) for part, run in zip(parts, sizes, strict=True)])
        steps.append(np.concatenate([sizes[..., None], longest], axis=2))
    return np.stack(steps)


def report(
    lengths: Lengths,
    *,
    max_length: int,
    target_length: int | None = None,
    effective_batch: int,
    micro_batch: int,
    ranks: int = 1,
    seed: int = 42,
    fixed_tokens: float = FIXED_TOKENS,
) -> DataReport:
    """What the plan says of the data. `lengths` as they were measured: it is cut here."""
    seen = lengths.cut(max_length, target_length)
    tokens = seen.tokens + seen.target_tokens
    too_long = lengths.tokens > max_length
    if lengths.documents is not None:
        too_long = too_long & ~lengths.documents
    if target_length is not None:
        too_long = too_long | (lengths.target_tokens > target_length)
    median, p95 = (int(value) for value in np.percentile(tokens, [50, 95], method="inverted_cdf"))
    return DataReport(
        source=lengths.source,
        sequences=seen.n,
        tokens=int(tokens.sum()),
        counted_by=lengths.counted_by,
        exact=lengths.exact,
        mean_tokens=float(tokens.mean()),
        median_tokens=median,
        p95_tokens=p95,
        longest_tokens=int((lengths.tokens + lengths.target_tokens).max()),
        cut=int(too_long.sum()),
        padding=padding_waste(
            seen, effective_batch=effective_batch, micro_batch=micro_batch, ranks=ranks, seed=seed, fixed_tokens=fixed_tokens
        ),
    )


def _table(lengths: Lengths) -> IntArray:
    """`[n, 1]`, or `[n, 2]` where targets are padded too."""
    columns = [lengths.tokens, lengths.target_tokens] if lengths.has_targets else [lengths.tokens]
    return np.stack(columns, axis=1)


def _tokens(count: IntArray, *lengths: IntArray) -> FloatArray:
    return (count * sum(lengths)).astype(np.float64)


def _waste(table: IntArray, micro_batch: int) -> float:
    """Of sequences that come in this order, `micro_batch` at a time."""
    starts = np.arange(0, len(table), micro_batch)
    counts = np.diff(np.append(starts, len(table)))
    padded = (np.maximum.reduceat(table, starts).sum(axis=1) * counts).sum()
    return _share(int(table.sum()), int(padded))


def _share(real: int, padded: int) -> float:
    return 1 - real / padded


def _grouped(sources: IntArray, order: IntArray, share: int) -> IntArray:
    """The order of transformers' `group_by_length`, which sorts mega-batches by falling length, of the source only.

    A mega-batch is 50 times one rank's share of a step, or a quarter of the data if that is less.
    """
    mega = share * max(1, min(len(order) // (share * 4), _MEGA_BATCHES))
    return order[np.lexsort((-sources, np.arange(len(order)) // mega))]


def _sliced_waste(table: IntArray, batches: list[list[IntArray]], micro_batch: int, fixed_tokens: float) -> float:
    """By the slicer, where a micro-batch may hold as many tokens as `micro_batch` of the longest sequences."""
    limit = float(micro_batch * table.max(axis=0).sum())
    real = padded = 0
    for part in itertools.chain.from_iterable(batches):
        for one in slice_batch(
            part, cost_bytes=_tokens, cost_seconds=lambda *shape: fixed_tokens + _tokens(*shape), limit_bytes=limit
        ):
            real += int(part[one].sum())
            padded += int(len(one) * part[one].max(axis=0).sum())
    return _share(real, padded)


@functools.lru_cache(maxsize=32)
def _dealt(lengths: Lengths, effective_batch: int, shares: tuple[int, ...], seed: int, batches: int) -> list[list[IntArray]]:
    """Lengths of every rank's share of the first global batches, the longest first. A search asks for the same ones again and again."""
    return [
        [batch[part][by_length(batch[part])] for part in deal(batch, len(shares), _tokens, shares=shares)]
        for batch in _sample(lengths, effective_batch, batches, seed)
    ]


def _sample(lengths: Lengths, effective_batch: int, batches: int, seed: int) -> IntArray:
    """`[batch, sequence, 1 or 2]`: the first global batches as a run would draw them, epoch after epoch where one is too short."""
    table = _table(lengths)
    needed = batches * effective_batch
    if lengths.are_equal:
        return np.broadcast_to(table[0], (1, effective_batch, table.shape[1]))
    epochs = np.concatenate([order_of(len(table), seed, epoch) for epoch in range(-(-needed // len(table)))])
    return np.take(table, epochs[:needed], axis=0).reshape(batches, effective_batch, -1)


def _steps(lengths: Lengths, effective_batch: int, most_batches: int, most_sequences: int) -> int:
    """Global batches to look at: not more than an epoch has."""
    return max(1, min(most_batches, most_sequences // effective_batch, -(-lengths.n // effective_batch)))


def _longest_of_runs(lengths: IntArray, sizes: IntArray) -> IntArray:
    """`[run, 1 or 2]`: the longest of each run of sequences; 0 where a run is empty."""
    longest = np.zeros((len(sizes), lengths.shape[1]), np.int64)
    starts = np.cumsum(sizes) - sizes
    if len(lengths):
        longest[sizes > 0] = np.maximum.reduceat(lengths, starts[sizes > 0])
    return longest
