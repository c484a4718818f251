"""Slices add up to the effective batch, always, and are as equal as they can be."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from brim.step.cuts import Cut, cut, cut_into, cuts
from brim.workload.records import Configuration

RANKS = (1, 2, 3, 8)
TARGETS = st.integers(1, 1024)
SOME_RANKS = st.sampled_from(RANKS)


def _sizes(found: Cut, ranks: int) -> tuple[int, ...]:
    return found.slices or (found.micro_batch,) * (found.accumulation * ranks)


def _check(found: Cut, effective_batch: int, ranks: int) -> None:
    sizes = _sizes(found, ranks)
    assert sum(sizes) == effective_batch
    assert len(sizes) == found.accumulation * ranks
    assert max(sizes) == found.micro_batch
    assert max(sizes) - min(sizes) <= 1
    assert found.is_even == (min(sizes) == max(sizes))
    Configuration(
        micro_batch=found.micro_batch,
        accumulation=found.accumulation,
        world_size=ranks,
        effective_batch=effective_batch,
        slices=found.slices,
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_every_target_up_to_1024_is_exact(ranks: int) -> None:
    for target in range(1, 1025):
        for micro_batch in (1, 7, 8, 48, 2048):
            found = cut(target, micro_batch, ranks)
            _check(found, target, ranks)
            assert found.micro_batch <= micro_batch


@given(TARGETS, st.integers(1, 1100), SOME_RANKS)
def test_any_target_and_micro_batch_is_exact(target: int, micro_batch: int, ranks: int) -> None:
    found = cut(target, micro_batch, ranks)
    _check(found, target, ranks)
    assert found.micro_batch <= micro_batch
    # The fewest: one micro-batch less on each rank would need larger slices than allowed.
    share = -(-target // ranks)
    assert found.accumulation == -(-share // min(micro_batch, share))


@given(TARGETS, SOME_RANKS)
def test_all_ways_of_cutting_are_exact_and_differ(target: int, ranks: int) -> None:
    found = cuts(target, ranks)
    sizes = [each.micro_batch for each in found]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == -(-target // ranks)
    for each in found:
        _check(each, target, ranks)


@given(TARGETS, SOME_RANKS, st.integers(1, 1100))
def test_the_list_of_ways_holds_the_best_for_every_limit(target: int, ranks: int, limit: int) -> None:
    within = [each for each in cuts(target, ranks) if each.micro_batch <= limit]
    assert within[-1] == cut(target, limit, ranks)


@given(TARGETS, SOME_RANKS, st.data())
def test_a_number_of_micro_batches_is_kept(target: int, ranks: int, data: st.DataObject) -> None:
    accumulation = data.draw(st.integers(1, -(-target // ranks)))
    found = cut_into(target, accumulation, ranks)
    assert found.accumulation == accumulation
    assert sum(_sizes(found, ranks)) == target


def test_more_ranks_than_sequences_leave_some_an_empty_slice() -> None:
    assert cut(3, 4, ranks=8) == Cut(1, 1, (1, 1, 1, 0, 0, 0, 0, 0))


def test_an_even_cut_lists_no_slices() -> None:
    found = cut(64, 8, ranks=2)
    assert found == Cut(8, 4, ())
    assert found.is_even


def test_many_sequences_are_cut_at_once() -> None:
    found = cuts(100_000, 3)
    assert [cut.micro_batch for cut in found] == sorted({cut.micro_batch for cut in found})
    assert found[-1].accumulation == 1
    assert len(found) < 1000
