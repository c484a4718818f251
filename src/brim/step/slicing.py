"""The promise, as indices: an epoch's order, each rank's share of a global batch, and the micro-batches of a share.

The order follows from the seed and the epoch alone. The next `effective_batch` sequences of it are the global batch, whatever the hardware.
Only inside a global batch are sequences sorted by length, so that no optimizer step knows of another's lengths and sampling stays unbiased.

A micro-batch is padded to its longest sequence. Filling the memory wastes padding, one sequence at a time wastes the fixed cost of a
micro-batch; between them stands a sum that is least, and dynamic programming finds it. Neighbours by length belong together: if two
micro-batches swap sequences so that the longer ones meet in one, neither gets longer. So only cuts of the sorted batch need to be looked
at, and the best of them is the best of all ways (for one length; with a target's length beside it, of all cuts of this order).

Python would spend longer on one share than numpy on hundreds, so dealing, sorting and cutting take stacks: arrays of `[share, sequence]`,
all shares of a stack equally large, one array for each length of a sequence (its own; and its target's, for seq2seq).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from brim.errors import OutOfMemoryError
from brim.locale import _
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.step.budget import Cost, FloatArray

IntArray = npt.NDArray[np.int64]
Order = npt.NDArray[np.signedinteger[Any]]
"""Of int32, where that is enough: an order of ten million sequences is then kept in 40 MB."""

# Few enough that the arrays of one call stay in the processor's cache.
PAIRS_AT_ONCE = 1 << 16


class Cuts(NamedTuple):
    """Micro-batches of a stack of sorted shares, in the order of the shares and from the front of each."""

    share: IntArray
    first: IntArray
    """Place of its first sequence in the sorted share."""
    size: IntArray


def order_of(n: int, seed: int, epoch: int) -> Order:
    """The order of `n` sequences in this epoch: the same on every rank, machine and release of numpy.

    numpy promises that a bit generator's raw numbers never change, and does not promise it of `permutation`; so raw numbers are sorted.
    Each carries its index in its low bits. That saves an argsort, and no two are equal, so every way to sort gives the same.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    width_bytes = 4 if n < 2**31 else 8
    index = np.arange(n, dtype=f"u{width_bytes}")
    low_bits = np.uint64((1 << n.bit_length()) - 1)
    keys &= ~low_bits
    keys |= index
    keys.sort()
    np.bitwise_and(keys, low_bits, out=index, casting="same_kind")
    return index.view(f"i{width_bytes}")


def deal(lengths: IntArray, ranks: int, cost: Cost, *, shares: Sequence[int] | None = None) -> list[IntArray]:
    """Each rank's part of a global batch, as indices into it: equal in number to within one (or `shares`), as equal as can be in cost."""
    shares = even_shares(len(lengths), ranks) if shares is None else shares
    assert len(shares) == ranks
    dealt = deal_stack([column[None] for column in _columns(lengths)], shares, cost)[0]
    return np.split(dealt, np.cumsum(shares)[:-1])


def deal_stack(columns: Sequence[IntArray], shares: Sequence[int], cost: Cost) -> IntArray:
    """`[batch, sequence]`: indices into each global batch, the first rank's share first, then the next one's.

    The costliest sequence that is left goes to the rank that has least to do and still has room.
    """
    batches, sequences = columns[0].shape
    assert sum(shares) == sequences
    single = np.broadcast_to(cost(np.ones(1, np.int64), *columns), (batches, sequences))
    falling = np.argsort(-single, axis=1, kind="stable")
    costs = np.take_along_axis(single, falling, axis=1)
    owners = np.array([_owners(row, shares) for row in costs.tolist()], np.int16).reshape(batches, sequences)
    return np.take_along_axis(falling, np.argsort(owners, axis=1, kind="stable"), axis=1)


def _owners(falling_costs: list[float], shares: Sequence[int]) -> list[int]:
    """The rank of each sequence of one global batch."""
    waiting = [(0.0, rank, room) for rank, room in enumerate(shares) if room]
    owners = []
    for cost in falling_costs:
        load, rank, room = waiting[0]
        owners.append(rank)
        if room > 1:
            heapq.heapreplace(waiting, (load + cost, rank, room - 1))
        else:
            heapq.heappop(waiting)
    return owners


def even_shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` numbers that differ by one at most, the larger first."""
    each, more = divmod(total, parts)
    return [each + 1] * more + [each] * (parts - more)


def by_length(lengths: IntArray) -> IntArray:
    """Indices by falling length, equal ones in their order. With targets, as `sort_stack` does it."""
    return sort_stack([column[None] for column in _columns(lengths)]).ravel()


def sort_stack(columns: Sequence[IntArray]) -> IntArray:
    """`[share, sequence]`: indices into each share by falling length, equal ones in their order.

    With targets, both lengths are padded and neighbours must be alike in both. The one that varies more sorts the share into about sqrt(n)
    groups, the other sorts each group, down and up in turn. On 3,000 Chinese questions and answers this costs 2 % less than sorting by
    the sum with 64 sequences in a batch, 9 % less with 1,024.
    """
    if len(columns) == 1:
        return np.argsort(-columns[0], axis=1, kind="stable")
    source, target = columns
    n = source.shape[1]
    source_leads = (_spread(source) > _spread(target))[:, None]
    falling = np.argsort(-np.where(source_leads, source, target), axis=1, kind="stable")
    other = np.take_along_axis(np.where(source_leads, target, source), falling, axis=1)
    groups = np.arange(n) * round(n**0.5) // max(1, n)
    turn = np.where(groups % 2, 1, -1)
    inside = np.lexsort((turn * other, np.broadcast_to(groups, other.shape)), axis=1)
    return np.take_along_axis(falling, inside, axis=1)


def _spread(column: IntArray) -> IntArray:
    """Variance of each row, times n squared: in integers, so that no machine rounds it otherwise."""
    total, squares = column.sum(axis=1), (column * column).sum(axis=1)
    return np.asarray(column.shape[1] * squares - total * total)


def slice_batch(
    lengths: IntArray, *, cost_bytes: Cost, cost_seconds: Cost, limit_bytes: float, may_exceed_alone: bool = False
) -> list[IntArray]:
    """Cut one rank's share of a global batch into the micro-batches that take the fewest seconds, none of them over the limit.

    `lengths` are tokens, `[n]`, or `[n, 2]` with the targets' beside them. The answer holds indices into it, the longest first, so
    that what needs most memory runs first. A sequence that does not even fit alone is an error, or, if it may, a micro-batch of its own;
    nothing is left out.
    """
    if not len(lengths):
        return []
    if not may_exceed_alone:
        _check_each_fits(lengths, cost_bytes, limit_bytes)
    order = by_length(lengths)
    sorted_columns = [column[None] for column in _columns(lengths[order])]
    return np.split(order, cut_stack(sorted_columns, cost_bytes, cost_seconds, limit_bytes).first[1:])


def _columns(lengths: IntArray) -> list[IntArray]:
    return [lengths] if lengths.ndim == 1 else list(lengths.T)


def _check_each_fits(lengths: IntArray, cost_bytes: Cost, limit_bytes: float) -> None:
    needed = cost_bytes(np.ones(len(lengths), np.int64), *_columns(lengths))
    worst = int(np.argmax(needed))
    if needed[worst] <= limit_bytes:
        return
    text = _("Sequence {index} of the batch ({tokens} tokens) needs {needed} even alone, and the limit is {limit}.")
    raise OutOfMemoryError(
        text.format(
            index=worst,
            tokens=" + ".join(str(column[worst]) for column in _columns(lengths)),
            needed=format_bytes(int(needed[worst])),
            limit=format_bytes(int(limit_bytes)),
        ),
        hint=_("Allow shorter sequences (--seq-len), or save memory: --checkpointing full, a smaller model, LoRA."),
    )


def cut_stack(columns: Sequence[IntArray], cost: Cost, seconds: Cost, limit: float) -> Cuts:
    """The cuts of sorted shares that take the fewest seconds, no micro-batch of two or more over the limit.

    From the end: the best cut of the rest is known before that of the whole is asked for.
    """
    shares, n = columns[0].shape
    run = longest_run(columns, cost, limit)
    best_seconds = np.zeros((shares, n + 1))
    take = np.zeros((shares, n), np.int64)
    every = np.arange(shares)
    rows = max(1, PAIRS_AT_ONCE // (run * shares))
    for end in range(n, 0, -rows):
        start = max(0, end - rows)
        block = seconds_of_runs(columns, start, end, min(run, n - start), cost, seconds, limit)
        for first in range(end - 1, start - 1, -1):
            most = min(run, n - first)
            total = block[:, first - start, :most] + best_seconds[:, first + 1 : first + 1 + most]
            size = total.argmin(axis=1)
            take[:, first] = size + 1
            best_seconds[:, first] = total[every, size]
    return _follow(take)


def longest_run(columns: Sequence[IntArray], cost: Cost, limit: float) -> int:
    """The most sequences that fit into one micro-batch if all were as short as the shortest: no run can be longer."""
    counts = np.arange(1, columns[0].shape[1] + 1)
    fitting = np.flatnonzero(cost(counts, *(np.full(len(counts), column.min()) for column in columns)) <= limit)
    return int(counts[fitting[-1]]) if len(fitting) else 1


def seconds_of_runs(
    columns: Sequence[IntArray], start: int, end: int, most: int, cost: Cost, seconds: Cost, limit: float
) -> FloatArray:
    """`[share, first - start, count - 1]`: seconds of the micro-batch that begins there; infinite where it does not fit.

    The costs get counts and lengths as they broadcast, so that what depends on the length alone is computed once for all counts.
    """
    counts = np.arange(1, most + 1)
    longest = _longest_in_runs(columns, start, end, most)
    may_run = (cost(counts, *longest) <= limit) | (counts == 1)
    found = np.where(may_run, seconds(counts, *longest), np.inf)
    return np.broadcast_to(found, (len(columns[0]), end - start, most))


def _longest_in_runs(columns: Sequence[IntArray], start: int, end: int, most: int) -> list[IntArray]:
    """Of each column, `[share, first - start, count - 1]`: the longest of so many sequences from there; beyond the end are none."""
    if len(columns) == 1:
        return [columns[0][:, start:end, None]]  # It falls: the first is the longest, whatever the count.
    found = []
    for column in columns:
        reach = np.zeros((len(column), end - start + most - 1), np.int64)
        inside = column[:, start : end + most - 1]
        reach[:, : inside.shape[1]] = inside
        windows = np.lib.stride_tricks.sliding_window_view(reach, most, axis=1)
        found.append(np.maximum.accumulate(windows, axis=2))
    return found


def _follow(take: IntArray) -> Cuts:
    """The cuts of every share, from the best first size at each place."""
    shares, n = take.shape
    begins = np.zeros((shares, n), bool)
    share, place = np.arange(shares), np.zeros(shares, np.int64)
    while len(share):
        begins[share, place] = True
        place = place + take[share, place]
        share, place = share[place < n], place[place < n]
    share, first = np.nonzero(begins)
    return Cuts(share, first, take[share, first])
