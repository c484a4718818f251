"""PyTorch's CUDA caching allocator, replayed: which memory a stream of requests really takes from the device.

Tensors ask for bytes; the allocator hands out *blocks* that it cuts from *segments*, and only segments are taken from the device. Its
rules (c10/cuda/CUDACachingAllocator.cpp) are deterministic, so reserved memory is predictable to the byte once the requests are known:

1. A request is rounded up to a multiple of 512 bytes.
2. Requests of at most 1 MiB live in the small pool, the others in the large pool; each stream has pools of its own.
3. A request takes the smallest free block that holds it; among equal sizes the one at the lowest address.
4. If there is none, a new segment is taken: 2 MiB for small requests, 20 MiB for requests below 10 MiB, else the request rounded up
   to 2 MiB.
5. What is left of a block becomes a free block: always in the small pool (from 512 bytes on), in the large pool only if it is more than
   1 MiB. Otherwise the request gets the whole block, and counts as that large.
6. A freed block merges with free neighbours of its segment; segments are kept.
7. If the device refuses a new segment, all cached segments that are wholly free are given back and the request is tried again; only then
   is it out of memory. So what a run *reserves* without a limit is more than it *needs*: whether it fits is a replay under the limit.
   (`max_split_size_mb` and `garbage_collection_threshold` change rules 3 and 7 and are off by default; so are expandable segments.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
MIDDLE_REQUEST_BYTES = 10 << 20
MIDDLE_SEGMENT_BYTES = 20 << 20
LARGE_ROUND_BYTES = 2 << 20
EMPTY_CACHE_BYTES = -1
"""The size of a request that stands for `torch.cuda.empty_cache()`: it allocates nothing and releases segments without live blocks."""


class LimitReachedError(Exception):
    """The device cannot give another segment, and nothing cached is left to give back."""

    def __init__(self, request_bytes: int, reserved_bytes: int) -> None:
        super().__init__(f"{request_bytes} bytes requested with {reserved_bytes} bytes reserved")
        self.request_bytes = request_bytes
        self.reserved_bytes = reserved_bytes


class Block:
    """A piece of a segment, in use or free, linked with its neighbours."""

    __slots__ = ("address", "after", "before", "is_free", "segment", "size")

    def __init__(self, size: int, address: int, segment: Segment, before: Block | None, after: Block | None) -> None:
        self.size = size
        self.address = address
        self.segment = segment
        self.before = before
        self.after = after
        self.is_free = False


class Segment:
    """Memory taken from the device in one piece."""

    __slots__ = ("pool", "size")

    def __init__(self, size: int, pool: Pool) -> None:
        self.size = size
        self.pool = pool


class Pool:
    """The free blocks of one stream and one size class, smallest first, then lowest address."""

    __slots__ = ("free", "is_small")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []


@dataclass
class CachingAllocator:
    """The allocator's state while requests come in."""

    limit_bytes: int | None = None
    """What the device can give this process; None for as much as it likes."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    """How often cached segments had to be given back before a request could be served."""
    segments_bytes: list[int] = field(default_factory=list)
    """Every segment that was taken, in order."""
    _pools: dict[int, tuple[Pool, Pool]] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, request_bytes: int, stream: int = 0) -> Block:
        """Serve one request."""
        size = (request_bytes + 511) & -512 or MIN_BLOCK_BYTES
        small, large = self._pools.get(stream) or self._new_stream(stream)
        pool = small if size <= SMALL_REQUEST_BYTES else large
        free = pool.free
        position = bisect_left(free, (size, -1))
        block = free.pop(position)[2] if position < len(free) else self._new_segment(size, pool)
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES if pool.is_small else rest > SMALL_REQUEST_BYTES:
            tail = Block(rest, block.address + size, block.segment, block, block.after)
            if block.after is not None:
                block.after.before = tail
            block.after = tail
            block.size = size
            tail.is_free = True
            insort(free, (rest, tail.address, tail))
        block.is_free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: Block) -> None:
        """Take a block back, and merge it with free neighbours."""
        self.allocated_bytes -= block.size
        free = block.segment.pool.free
        before, after = block.before, block.after
        if before is not None and before.is_free:
            _remove(free, before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.is_free:
            _remove(free, after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        block.is_free = True
        insort(free, (block.size, block.address, block))

    def give_back(self) -> int:
        """`empty_cache`: return every wholly free segment to the device; how many bytes that were."""
        given = 0
        for pools in self._pools.values():
            for pool in pools:
                given += sum(self._drop(pool, block) for _size, _address, block in tuple(pool.free))
        return given

    def _new_stream(self, stream: int) -> tuple[Pool, Pool]:
        pools = Pool(is_small=True), Pool(is_small=False)
        self._pools[stream] = pools
        return pools

    def _new_segment(self, size: int, pool: Pool) -> Block:
        wanted = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + wanted > self.limit_bytes:
            self.retries += 1
            self.give_back()
            if self.reserved_bytes + wanted > self.limit_bytes:
                raise LimitReachedError(size, self.reserved_bytes)
        self.reserved_bytes += wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segments_bytes.append(wanted)
        block = Block(wanted, self._next_address, Segment(wanted, pool), None, None)
        self._next_address += wanted
        return block

    def _drop(self, pool: Pool, block: Block) -> int:
        """Give one free block's segment back, if the block is the whole of it."""
        if block.before is not None or block.after is not None:
            return 0
        _remove(pool.free, block)
        self.reserved_bytes -= block.size
        return block.size


@dataclass(frozen=True)
class Replay:
    """What a stream of requests took."""

    survived: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    segments_bytes: tuple[int, ...]
    failed_event: int | None = None
    """Index of the request that did not fit."""


def segment_bytes(size: int) -> int:
    """How much is taken from the device for a request of this (rounded) size that no free block holds."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIDDLE_REQUEST_BYTES:
        return MIDDLE_SEGMENT_BYTES
    return (size + LARGE_ROUND_BYTES - 1) // LARGE_ROUND_BYTES * LARGE_ROUND_BYTES


def replay(events: Iterable[Sequence[int]], *, limit_bytes: int | None = None) -> Replay:
    """Run requests through the allocator: `(id, bytes)` or `(id, bytes, stream)` asks, `(-1 - id,)` frees."""
    return Requests.read(events).replay(limit_bytes=limit_bytes)


def smallest_surviving_limit(events: Sequence[Sequence[int]], *, step_bytes: int = LARGE_ROUND_BYTES) -> int:
    """The smallest limit, in steps of 2 MiB, under which the requests are all served. See `Requests.smallest_surviving_limit`."""
    return Requests.read(events).smallest_surviving_limit(step_bytes=step_bytes)


# From here on: the same rules at the speed of plain integers, for streams that are replayed again and again.

_UNIT = MIN_BLOCK_BYTES
_SHIFT = 44
"""A free block is one number, its size (in units of 512 bytes) above its address: numbers sort as rule 3 wants blocks."""
_ADDRESS = (1 << _SHIFT) - 1
_SPLIT_ABOVE = SMALL_REQUEST_BYTES // _UNIT


@dataclass(frozen=True)
class Requests:
    """A stream of requests, ready to be replayed."""

    events: Sequence[int]
    """`k` asks for storage `k`, `~k` frees it."""
    units: Sequence[int]
    """Per storage: its rounded size, in units of 512 bytes; 0: the cache is emptied."""
    pools: Sequence[int]
    """Per storage: twice its stream, and one more for the large pool."""

    @classmethod
    def read(cls, events: Iterable[Sequence[int]]) -> Requests:
        """From `(id, bytes)` or `(id, bytes, stream)` and `(-1 - id,)`; an id may come back once it was freed."""
        numbers: dict[int, int] = {}
        stream: list[int] = []
        sizes: list[int] = []
        streams: list[int] = []
        for event in events:
            if event[0] < 0:
                stream.append(~numbers.pop(-1 - event[0]))
                continue
            numbers[event[0]] = len(sizes)
            stream.append(len(sizes))
            sizes.append(event[1])
            streams.append(event[2] if len(event) > 2 else 0)
        known = {number: index for index, number in enumerate(dict.fromkeys(streams))}
        return cls.of(stream, sizes, [known[number] for number in streams])

    @classmethod
    def of(cls, events: ArrayLike, sizes: ArrayLike, streams: ArrayLike | None = None) -> Requests:
        """From `k` and `~k`, and the bytes of every storage."""
        requested = np.asarray(sizes, dtype=np.int64)
        units = np.where(requested == EMPTY_CACHE_BYTES, 0, np.maximum(1, (requested + _UNIT - 1) // _UNIT))
        pools = (units > _SPLIT_ABOVE) + 2 * (np.zeros_like(units) if streams is None else np.asarray(streams, dtype=np.int64))
        return cls(np.asarray(events, dtype=np.int64).tolist(), units.tolist(), pools.tolist())

    def replay(self, *, limit_bytes: int | None = None) -> Replay:
        """What the requests take."""
        return _run(self, limit_bytes).replay

    def smallest_surviving_limit(self, *, step_bytes: int = LARGE_ROUND_BYTES) -> int:
        """The smallest limit, in steps of 2 MiB, under which the requests are all served.

        Segments are multiples of 2 MiB, so no other limit can make a difference. Surviving is not perfectly monotone in the limit (a
        segment given back may have been the better one to keep), so the answer is confirmed from below: one step less fails.

        A limit only speaks where a segment is wanted. A run under another limit that lies between the most that was let pass and the
        least that was refused is the same run, and need not be made.
        """
        free_run = _run(self, None)
        runs = [free_run]
        high = free_run.replay.peak_reserved_bytes // step_bytes
        low = max(1, free_run.replay.peak_allocated_bytes // step_bytes) - 1
        while high - low > 1:
            middle = (low + high) // 2
            limit = middle * step_bytes
            run = next((run for run in runs if run.passed_bytes <= limit < run.refused_bytes), None)
            if run is None:
                run = _run(self, limit)
                runs.append(run)
            if run.replay.survived:
                high = middle
            else:
                low = middle
        return high * step_bytes


@dataclass(frozen=True)
class _Run:
    replay: Replay
    passed_bytes: int
    """The highest reserved bytes that the limit let pass."""
    refused_bytes: float
    """The lowest that it refused."""


def _run(requests: Requests, limit_bytes: int | None) -> _Run:
    """The rules at the top of this file, with free blocks known by where they begin and where they end.

    Segments have a gap between their addresses, so that blocks of two segments are never neighbours.
    """
    events, units, pools = requests.events, requests.units, requests.pools
    frees: list[list[int]] = [[] for _pool in range(max(pools, default=0) + 2)]
    begins: dict[int, int] = {}
    """Free blocks: address -> size."""
    ends: dict[int, int] = {}
    """Free blocks: address behind -> address."""
    whole: dict[int, int] = {}
    """Segments: address -> size."""
    addresses = [0] * len(units)
    sizes = [0] * len(units)
    allocated = peak_allocated = reserved = peak_reserved = retries = next_address = 0
    limit = float("inf") if limit_bytes is None else limit_bytes // _UNIT
    refused = float("inf")
    segments: list[int] = []
    failed = None
    for index, event in enumerate(events):
        if not units[event if event >= 0 else ~event]:
            reserved -= _give_back(frees, begins, ends, whole) if event >= 0 else 0
        elif event >= 0:
            size = units[event]
            pool = pools[event]
            free = frees[pool]
            position = bisect_left(free, size << _SHIFT)
            if position < len(free):
                block = free.pop(position)
                address = block & _ADDRESS
                rest = (block >> _SHIFT) - size
                del begins[address]
            else:
                wanted = segment_bytes(size * _UNIT) // _UNIT
                if reserved + wanted > limit:
                    retries += 1
                    refused = min(refused, reserved + wanted)
                    reserved -= _give_back(frees, begins, ends, whole)
                    if reserved + wanted > limit:
                        refused = min(refused, reserved + wanted)
                        failed = index
                        break
                reserved += wanted
                if reserved > peak_reserved:
                    peak_reserved = reserved
                segments.append(wanted * _UNIT)
                address = next_address
                next_address += wanted + 1
                whole[address] = wanted
                rest = wanted - size
            if rest and (rest > _SPLIT_ABOVE or not pool & 1):
                tail = address + size
                insort(free, rest << _SHIFT | tail)
                begins[tail] = rest
                ends[tail + rest] = tail
            else:
                size += rest
                ends.pop(address + size, None)
            addresses[event] = address
            sizes[event] = size
            allocated += size
            if allocated > peak_allocated:
                peak_allocated = allocated
        else:
            number = ~event
            address = addresses[number]
            size = sizes[number]
            free = frees[pools[number]]
            allocated -= size
            behind = address + size
            rest = begins.pop(behind, 0)
            if rest:
                del free[bisect_left(free, rest << _SHIFT | behind)]
                size += rest
                behind += rest
            if address in ends:
                before = ends.pop(address)
                rest = address - before
                del free[bisect_left(free, rest << _SHIFT | before)]
                address = before
                size += rest
            begins[address] = size
            ends[behind] = address
            insort(free, size << _SHIFT | address)
    done = Replay(
        survived=failed is None,
        peak_allocated_bytes=peak_allocated * _UNIT,
        peak_reserved_bytes=peak_reserved * _UNIT,
        retries=retries,
        segments_bytes=tuple(segments),
        failed_event=failed,
    )
    return _Run(done, done.peak_reserved_bytes, refused * _UNIT)


def _give_back(frees: list[list[int]], begins: dict[int, int], ends: dict[int, int], whole: dict[int, int]) -> int:
    """Rule 7: wholly free segments leave; how many units that were."""
    given = 0
    for free in frees:
        kept = []
        for block in free:
            address, size = block & _ADDRESS, block >> _SHIFT
            if whole.get(address) != size:
                kept.append(block)
                continue
            given += size
            del begins[address], ends[address + size], whole[address]
        free[:] = kept
    return given


def _remove(free: list[tuple[int, int, Block]], block: Block) -> None:
    position = bisect_left(free, (block.size, block.address))
    assert free[position][2] is block
    del free[position]
