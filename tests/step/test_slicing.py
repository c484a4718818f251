"""A global batch is cut into micro-batches: every sequence once, none over the limit, in the fewest predicted seconds, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import OutOfMemoryError
from brim.step.budget import Cost, FloatArray
from brim.step.slicing import IntArray, by_length, cut_stack, deal, deal_stack, even_shares, order_of, slice_batch, sort_stack

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40).map(np.array)
PAIRS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40).map(np.array)


def bytes_of(count: IntArray, *lengths: IntArray) -> FloatArray:
    return np.asarray(100 + count * sum(length + length**2 / 64 for length in lengths), np.float64)


def seconds_of(count: IntArray, *lengths: IntArray) -> FloatArray:
    return np.asarray(25 + count * sum(length + length**2 / 100 for length in lengths), np.float64)


def alone(cost: Cost, lengths: IntArray) -> float:
    """Cost of one micro-batch that holds all of these."""
    longest = lengths.reshape(len(lengths), -1).max(axis=0)
    return float(cost(np.array([len(lengths)]), *longest[:, None])[0])


def limit_for(lengths: IntArray, room: float) -> float:
    """A limit under which each sequence fits, and not all of them need to fit together."""
    single = max(alone(bytes_of, lengths[[index]]) for index in range(len(lengths)))
    return single + room * alone(bytes_of, lengths)


def sliced(lengths: IntArray, limit: float) -> list[IntArray]:
    return slice_batch(lengths, cost_bytes=bytes_of, cost_seconds=seconds_of, limit_bytes=limit)


@given(LENGTHS | PAIRS, st.floats(0, 1))
def test_every_sequence_is_in_exactly_one_micro_batch_and_none_is_over_the_limit(lengths: IntArray, room: float) -> None:
    limit = limit_for(lengths, room)
    slices = sliced(lengths, limit)
    assert sorted(np.concatenate(slices).tolist()) == list(range(len(lengths)))
    assert all(len(one) and alone(bytes_of, lengths[one]) <= limit for one in slices)
    again = sliced(lengths, limit)
    assert [one.tolist() for one in slices] == [one.tolist() for one in again]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put items into micro-batches, neighbours by length or not."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for index in range(len(parts)):
            yield [*parts[:index], [first, *parts[index]], *parts[index + 1 :]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7).map(np.array), st.floats(0, 1))
def test_no_other_way_to_form_micro_batches_takes_fewer_seconds(lengths: IntArray, room: float) -> None:
    limit = limit_for(lengths, room)
    best = min(
        sum(alone(seconds_of, lengths[part]) for part in parts)
        for parts in partitions(list(range(len(lengths))))
        if all(alone(bytes_of, lengths[part]) <= limit for part in parts)
    )
    found = sum(alone(seconds_of, lengths[one]) for one in sliced(lengths, limit))
    assert found == pytest.approx(best)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8).map(np.array), st.floats(0, 1))
def test_with_targets_no_other_cut_of_the_same_order_takes_fewer_seconds(pairs: IntArray, room: float) -> None:
    limit = limit_for(pairs, room)
    order = by_length(pairs)
    best = np.inf
    for cuts in range(2 ** (len(order) - 1)):
        places = [place for place in range(1, len(order)) if cuts >> (place - 1) & 1]
        parts = np.split(order, places)
        if all(alone(bytes_of, pairs[part]) <= limit for part in parts):
            best = min(best, sum(alone(seconds_of, pairs[part]) for part in parts))
    assert sum(alone(seconds_of, pairs[one]) for one in sliced(pairs, limit)) == pytest.approx(best)


def test_the_longest_sequences_run_first_and_a_blocked_search_gives_the_same_as_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 200)
    limit = limit_for(lengths, 0.1)
    whole = sliced(lengths, limit)
    longest = [lengths[one].max() for one in whole]
    assert longest == sorted(longest, reverse=True)
    monkeypatch.setattr("brim.step.slicing.PAIRS_AT_ONCE", 300)
    assert [one.tolist() for one in sliced(lengths, limit)] == [one.tolist() for one in whole]


def test_without_a_fixed_cost_unequal_sequences_run_alone_and_with_a_great_one_together() -> None:
    lengths = np.array([10, 20, 30])
    alone_each = slice_batch(
        lengths, cost_bytes=bytes_of, cost_seconds=lambda count, length: 1.0 * count * length, limit_bytes=1e9
    )
    together = slice_batch(lengths, cost_bytes=bytes_of, cost_seconds=lambda count, length: 1e6 + count * length, limit_bytes=1e9)
    assert [one.tolist() for one in alone_each] == [[2], [1], [0]]
    assert [one.tolist() for one in together] == [[2, 1, 0]]


def test_a_cost_need_not_look_at_all_that_it_is_given() -> None:
    slices = slice_batch(
        np.array([3, 1, 2, 5, 4]),
        cost_bytes=lambda count, _length: 1.0 * count,
        cost_seconds=lambda count, _length: np.ones(count.shape),
        limit_bytes=2,
    )
    assert len(slices) == 3
    assert max(len(one) for one in slices) == 2


def test_a_sequence_that_does_not_fit_alone_is_named_and_never_left_out() -> None:
    with pytest.raises(OutOfMemoryError, match=r"Sequence 1 of the batch \(9000 tokens\) needs .* even alone") as caught:
        sliced(np.array([5, 9000, 7]), 1000.0)
    assert caught.value.exit_code == 1
    with pytest.raises(OutOfMemoryError, match=r"\(50 \+ 9000 tokens\)"):
        sliced(np.array([[5, 5], [50, 9000]]), 1000.0)


@given(LENGTHS | PAIRS, st.floats(0, 4000))
def test_where_it_may_a_sequence_over_the_limit_runs_alone(lengths: IntArray, limit: float) -> None:
    slices = slice_batch(lengths, cost_bytes=bytes_of, cost_seconds=seconds_of, limit_bytes=limit, may_exceed_alone=True)
    assert sorted(np.concatenate(slices).tolist()) == list(range(len(lengths)))
    assert all(len(one) == 1 or alone(bytes_of, lengths[one]) <= limit for one in slices)


def test_an_empty_share_has_no_micro_batches() -> None:
    assert sliced(np.zeros(0, np.int64), 1000.0) == []


@given(LENGTHS | PAIRS, st.integers(1, 9))
def test_ranks_get_equally_many_sequences_and_nearly_equal_work(lengths: IntArray, ranks: int) -> None:
    parts = deal(lengths, ranks, seconds_of)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert [len(part) for part in parts] == even_shares(len(lengths), ranks)
    single = seconds_of(np.ones(len(lengths), np.int64), *lengths.reshape(len(lengths), -1).T)
    loads = [single[part].sum() for part in parts if len(part) == max(map(len, parts))]
    # Of ranks with equally many sequences, none has more to do than another by more than the costliest one.
    assert max(loads) - min(loads) <= single.max() + 1e-9


def test_dealt_and_sliced_ranks_finish_together() -> None:
    random = np.random.default_rng(3)
    late = []
    for _batch in range(20):
        lengths = np.clip(random.lognormal(5, 0.8, 64), 4, 1024).astype(np.int64)
        shares = [lengths[part] for part in deal(lengths, 4, seconds_of)]
        seconds = [sum(alone(seconds_of, share[one]) for one in sliced(share, 1e12)) for share in shares]
        late.append(max(seconds) / np.mean(seconds))
    assert np.mean(late) < 1.1


def test_shares_may_be_said() -> None:
    parts = deal(np.arange(1, 11), 3, seconds_of, shares=(5, 5, 0))
    assert [len(part) for part in parts] == [5, 5, 0]


def test_the_order_is_the_same_everywhere_and_for_ever() -> None:
    # Written down once: if this changes, runs cannot be resumed.
    assert order_of(10, seed=42, epoch=0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]
    assert order_of(10, seed=42, epoch=1).tolist() == [1, 2, 8, 5, 3, 9, 6, 0, 4, 7]
    assert order_of(0, seed=42, epoch=0).tolist() == []


@given(st.integers(0, 600), st.integers(0, 2**40), st.integers(0, 5))
def test_an_order_holds_every_sequence_once(n: int, seed: int, epoch: int) -> None:
    order = order_of(n, seed, epoch)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(n))


def test_orders_are_even_shuffles_and_no_two_are_alike() -> None:
    # Where the first sequence lands over many seeds: each tenth of the places about as often as another.
    places = [order_of(1000, seed, 0).tolist().index(0) // 100 for seed in range(1000)]
    assert np.bincount(places, minlength=10).min() > 60
    assert len({tuple(order_of(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}) == 16


STACKS = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 2), st.integers(0, 2**32)).map(
    lambda of: list(np.random.default_rng(of[3]).integers(1, 40, (of[2], of[0], of[1])))
)


@settings(deadline=None)
@given(STACKS, st.integers(1, 5), st.floats(0, 3000))
def test_a_stack_of_shares_is_sorted_dealt_and_cut_as_each_of_them_alone(
    columns: list[IntArray], ranks: int, limit: float
) -> None:
    def alone_in(stack: list[IntArray], row: int) -> list[IntArray]:
        return [column[row : row + 1] for column in stack]

    shares = even_shares(columns[0].shape[1], ranks)
    orders = sort_stack(columns)
    dealt = deal_stack(columns, shares, seconds_of)
    ordered = [np.take_along_axis(column, orders, axis=1) for column in columns]
    cuts = cut_stack(ordered, bytes_of, seconds_of, limit)
    for row in range(len(columns[0])):
        assert orders[row].tolist() == sort_stack(alone_in(columns, row))[0].tolist()
        assert dealt[row].tolist() == deal_stack(alone_in(columns, row), shares, seconds_of)[0].tolist()
        single = cut_stack(alone_in(ordered, row), bytes_of, seconds_of, limit)
        assert cuts.first[cuts.share == row].tolist() == single.first.tolist()
        assert cuts.size[cuts.share == row].tolist() == single.size.tolist()
