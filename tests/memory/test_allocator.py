"""The allocator takes from the device what the real one takes, byte for byte."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.memory.allocator import (
    EMPTY_CACHE_BYTES,
    Block,
    CachingAllocator,
    LimitReachedError,
    Replay,
    replay,
    segment_bytes,
    smallest_surviving_limit,
)
from tests.conftest import SHARED

TRACES = sorted((SHARED / "data" / "allocator").glob("*.json.gz"))
NO_TRACES = pytest.mark.skip(reason="the recorded GPU traces are not beside this clone")
MIB = 1 << 20


@pytest.mark.parametrize(
    "path", TRACES or [pytest.param(None, marks=NO_TRACES)], ids=lambda path: path and path.name.partition(".")[0]
)
def test_a_real_trace_replays_to_the_same_segments_in_the_same_order(path: Path) -> None:
    with gzip.open(path) as stream:
        trace: dict[str, Any] = json.load(stream)
    result = replay(trace["events"])
    assert list(result.segments_bytes) == trace["segments_bytes"]
    assert result.peak_reserved_bytes == trace["peak_reserved_bytes"]
    for share in (None, 0.99, 0.9, 0.7):
        limit = None if share is None else int(share * result.peak_reserved_bytes)
        assert replay(trace["events"], limit_bytes=limit) == _block_by_block(trace["events"], limit)
    assert smallest_surviving_limit(trace["events"]) == _bisected(trace["events"])


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments_come_in_three_kinds(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment


def test_a_large_block_whose_rest_is_small_is_handed_out_whole() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(12 * MIB)
    allocator.release(first)
    again = allocator.allocate(11 * MIB + 1)
    assert (again.size, allocator.allocated_bytes) == (12 * MIB, 12 * MIB)


def test_cached_segments_are_given_back_before_it_fails() -> None:
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(32 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 32 * MIB)
    with pytest.raises(LimitReachedError):
        allocator.allocate(10 * MIB)


Events = list[tuple[int, ...]]


@st.composite
def streams(draw: st.DrawFn) -> Events:
    """Requests and frees in any order, sizes around every threshold."""
    sizes = st.one_of(
        st.integers(1, 4096), st.integers(MIB - 600, MIB + 600), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 60 * MIB)
    )
    events: Events = []
    live: list[int] = []
    for number in range(draw(st.integers(1, 60))):
        events.append((number, draw(sizes)))
        live.append(number)
        deaths = draw(st.integers(0, len(live))) if draw(st.booleans()) else 0
        for _death in range(deaths):
            events.append((-1 - live.pop(draw(st.integers(0, len(live) - 1))),))
    return events


def _block_by_block(events: Sequence[Sequence[int]], limit: int | None) -> Replay:
    """A replay by `CachingAllocator`, which says the rules in the plainest way."""
    allocator = CachingAllocator(limit_bytes=limit)
    live: dict[int, Block] = {}
    failed = None
    for index, event in enumerate(events):
        if event[0] < 0:
            if -1 - event[0] in live:
                allocator.release(live.pop(-1 - event[0]))
            continue
        if event[1] == EMPTY_CACHE_BYTES:
            allocator.give_back()
            continue
        try:
            live[event[0]] = allocator.allocate(*event[1:])
        except LimitReachedError:
            failed = index
            break
    peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    return Replay(failed is None, *peaks, allocator.retries, tuple(allocator.segments_bytes), failed)


def _bisected(events: Sequence[Sequence[int]]) -> int:
    """The smallest surviving limit, every probe replayed."""
    free_run = replay(events)
    low, high = max(1, free_run.peak_allocated_bytes // (2 * MIB)) - 1, free_run.peak_reserved_bytes // (2 * MIB)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if replay(events, limit_bytes=middle * 2 * MIB).survived else (middle, high)
    return high * 2 * MIB


@given(streams(), st.floats(0.3, 1.1))
def test_a_fast_replay_is_the_plain_one(events: Events, share: float) -> None:
    streamed = [(*event, event[0] % 3 // 2) if event[0] >= 0 else event for event in events]
    free_run = replay(streamed)
    assert free_run == _block_by_block(streamed, None)
    limit = int(share * free_run.peak_reserved_bytes)
    assert replay(streamed, limit_bytes=limit) == _block_by_block(streamed, limit)
    assert smallest_surviving_limit(streamed) == _bisected(streamed)


@given(streams(), st.integers(0, 200), st.floats(0.3, 1.1))
def test_emptying_the_cache_is_the_same_in_both_replays(events: Events, position: int, share: float) -> None:
    number = max((event[0] for event in events), default=0) + 1
    emptied = [*events[:position], (number, EMPTY_CACHE_BYTES), (-1 - number,), *events[position:]]
    free_run = replay(emptied)
    assert free_run == _block_by_block(emptied, None)
    limit = int(share * free_run.peak_reserved_bytes)
    assert replay(emptied, limit_bytes=limit) == _block_by_block(emptied, limit)


def test_an_emptied_cache_takes_its_segments_anew() -> None:
    kept = [(0, 30 * MIB), (-1,), (1, 40 * MIB)]
    emptied = [*kept[:2], (2, EMPTY_CACHE_BYTES), (-3,), kept[2]]
    assert [replay(events).peak_reserved_bytes for events in (kept, emptied)] == [70 * MIB, 40 * MIB]


@given(streams())
def test_allocated_is_at_most_reserved_and_at_least_what_lives(events: Events) -> None:
    sizes = {event[0]: event[1] for event in events if event[0] >= 0}
    live = peak = 0
    for event in events:
        live += event[1] if event[0] >= 0 else -sizes[-1 - event[0]]
        peak = max(peak, live)
    result = replay(events)
    assert peak <= result.peak_allocated_bytes <= result.peak_reserved_bytes == sum(result.segments_bytes)
    assert result.survived


@given(streams())
def test_blocks_never_overlap_and_free_neighbours_are_always_merged(events: Events) -> None:
    allocator = CachingAllocator()
    live = {}
    for event in events:
        if event[0] >= 0:
            live[event[0]] = allocator.allocate(event[1])
        else:
            allocator.release(live.pop(-1 - event[0]))
        spans = sorted((block.address, block.address + block.size) for block in live.values())
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block in live.values())
        for pools in allocator._pools.values():
            for pool in pools:
                for _size, _address, block in pool.free:
                    assert block.after is None or not block.after.is_free
    for block in list(live.values()):
        allocator.release(block)
    allocator.give_back()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@settings(max_examples=50)
@given(streams())
def test_a_run_survives_at_its_smallest_limit_and_not_a_step_below(events: Events) -> None:
    limit = smallest_surviving_limit(events)
    assert replay(events, limit_bytes=limit).survived
    assert not replay(events, limit_bytes=limit - 2 * MIB).survived
