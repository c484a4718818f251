"""Temporary memory of CUDA kernels whose size is not a product of tensor sizes. torch is not imported here.

Some kernels need an amount that depends on the card (how many blocks run at once) and changes in jumps with the shape, so one traced step
cannot record it for all shapes and cards. The trace records *numbers* instead: births whose operator begins with `scratch:` and whose size
is a count of elements, which changes with the shape like any other size. `resolve` converts them to bytes for one card, or drops them if
the kernel needs no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from brim.machine.capability import multiprocessor
from brim.memory.stream import LOADED_COPY, LOADED_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from brim.memory.stream import Birth, Trace

PREFIX = "scratch:"


@dataclass(frozen=True)
class Card:
    """Properties of a card that kernels query."""

    multiprocessors: int
    threads: int
    """Resident threads of a multiprocessor."""
    capability: tuple[int, int] = (8, 0)
    block_shared_bytes: int = 163 << 10
    """Maximum shared memory of one block."""

    @classmethod
    def of(cls, capability: tuple[int, int], multiprocessors: int | None) -> Card:
        """The limits of a compute capability. Without a count of multiprocessors, that of a mid-range card is used."""
        limits = multiprocessor(capability)
        return cls(multiprocessors or _USUAL_MULTIPROCESSORS, limits.threads, capability, limits.block_shared_bytes)


_USUAL_MULTIPROCESSORS = 80


def scratch_name(rule: str, *facts: int) -> str:
    """The operator name of numbers that `rule` converts to bytes. `facts` are arguments that do not depend on the shape."""
    return f"{PREFIX}{rule}:" + ",".join(map(str, facts))


def resolve(trace: Trace, card: Card) -> Trace:
    """The trace with bytes in place of numbers."""
    births = list(trace.births)
    dropped: set[int] = set()
    first = 0
    while first < len(births):
        operator = births[first].operator
        if not operator.startswith(PREFIX):
            first += 1
            continue
        rule, _colon, facts = operator.removeprefix(PREFIX).partition(":")
        count, compute = _RULES[rule]
        numbers = [birth.size for birth in births[first : first + count]]
        if rule == "foreach_norm":
            numbers.append(_count_norms(trace, births[first]))
        if rule == "warmup":
            numbers = [_bytes_of(births, LOADED_COPY), _bytes_of(births, LOADED_WEIGHT)]
        sizes = compute(numbers, [int(fact) for fact in facts.split(",") if fact], card)
        for index, size in enumerate(sizes, start=first):
            births[index] = replace(births[index], size=size, operator=rule)
            if not size:
                dropped.add(index)
        first += count
    if births == trace.births:
        return trace
    kept = [
        (event, place) for event, place in zip(trace.events, trace.event_places, strict=True) if max(event, ~event) not in dropped
    ]
    return replace(trace, births=births, events=[event for event, _ in kept], event_places=[place for _, place in kept])


def _bytes_of(births: Sequence[Birth], operator: str) -> int:
    return sum(birth.size for birth in births if birth.operator == operator)


def _count_norms(trace: Trace, birth: Birth) -> int:
    """The number of norms in the clipping phase that contains `birth`."""
    place = trace.places[birth.place]
    return sum(
        other.operator == _NORM and trace.places[other.place][:2] == place[:2] and trace.places[other.place].phase == "clip"
        for other in trace.births
    )


_NORM = "aten::linalg_vector_norm"


def reduction_bytes(
    outputs: int, inputs: int, card: Card, *, along_rows: bool, input_vector: int, output_vector: int, item_bytes: int
) -> tuple[int, int]:
    """Bytes of the buffer and of the semaphores of a reduction that is split over several blocks; zeros if it is not split.

    As `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh: `outputs` results of `inputs` elements each. `along_rows`: the elements of
    one result are contiguous in memory. A thread reads `input_vector` elements of one result, or of `output_vector` results, at once.
    """
    most_threads = 512 // output_vector
    first, second = (
        (inputs // (input_vector if inputs >= 128 else 1), outputs) if along_rows else (outputs // output_vector, inputs)
    )
    wide, tall = min(_power_of_two(first), most_threads), min(_power_of_two(second), most_threads)
    width = min(wide, 32)
    height = min(tall, most_threads // width)
    width = min(wide, most_threads // height)
    step_input, step_output = (width, 1) if along_rows else (1, width)
    if -(-inputs // step_input) < min(height * 16, 256):
        return 0, 0
    step_input *= height
    values = -(-inputs // step_input)
    grid = -(-(outputs // output_vector) // step_output)
    wanted = card.multiprocessors * (card.threads // (width * height))
    if values < 256 or grid > wanted:
        return 0, 0
    blocks = max(min(-(-wanted // grid), -(-values // 16)), -(-values // 256))
    if blocks <= 1:
        return 0, 0
    buffer = item_bytes * outputs * blocks * (1 if along_rows else width * output_vector)
    return buffer, 4 * grid


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1) if number > 0 else 1


def _reduction(numbers: Sequence[int], facts: Sequence[int], card: Card) -> tuple[int, ...]:
    along_rows, input_vector, output_vector, item_bytes = facts
    return reduction_bytes(
        numbers[0], numbers[1], card,
        along_rows=bool(along_rows), input_vector=input_vector, output_vector=output_vector, item_bytes=item_bytes,
    )  # fmt: skip


_EMBEDDING_WITHOUT_SORTING = 3072
_EMBEDDING_ROWS = 10


def _embedding(numbers: Sequence[int], facts: Sequence[int], card: Card) -> tuple[int, ...]:
    """One buffer of an embedding's gradient, which sorts the tokens if there are more than 3,072 (aten/src/ATen/native/cuda/Embedding.cu).

    Facts: number of the buffer, rows of the table, elements of a row.
    """
    (tokens,) = numbers
    buffer, rows, width = facts
    if tokens <= _EMBEDDING_WITHOUT_SORTING:
        return (0,)
    segments = min(tokens, rows)
    parts = tokens // _EMBEDDING_ROWS + segments
    # A small table with many tokens uses another kernel, which accumulates in place.
    is_small = parts > 4 * rows and rows < 4 * card.multiprocessors
    return ((8 * tokens, 8 * segments, 8 * parts, 8 * parts if is_small else 4 * width * parts)[buffer],)


def _flash_forward(numbers: Sequence[int], facts: Sequence[int], card: Card) -> tuple[int, ...]:
    """Partial results, if the keys are split over several blocks because there are few rows of queries (flash_api.cpp)."""
    heads, queries, keys = numbers
    (size,) = facts
    splits = _key_splits(
        heads * -(-queries // 64), 2 * card.multiprocessors, -(-keys // (256 if size <= 64 else 128 if size <= 128 else 64))
    )
    if splits == 1:
        return 0, 0, 0
    rows = splits * heads * queries
    return 4 * rows, 4 * rows * -(-size // 32) * 32, 0


def _key_splits(rows: int, blocks: int, columns: int) -> int:
    """As `num_splits_heuristic` in flash_api.cpp: the fewest splits with at least 85 percent of the best occupancy."""
    if rows >= 0.8 * blocks:
        return 1
    busy: dict[int, float] = {}
    for splits in range(1, min(128, blocks, columns) + 1):
        if splits == 1 or -(-columns // splits) != -(-columns // (splits - 1)):
            waves = rows * splits / blocks
            busy[splits] = waves / -(-rows * splits // blocks)
    return next((splits for splits, share in busy.items() if share >= 0.85 * max(busy.values())), 1)


def _efficient_backward(numbers: Sequence[int], facts: Sequence[int], card: Card) -> tuple[int, ...]:
    """Buffers in which blocks of keys accumulate their parts of the gradients (mem_eff_attention/kernel_backward.h, `workspace_size`)."""
    heads, queries, keys = numbers
    size, value_size, is_half = facts
    tall, wide, keeps = _efficient_tile(max(size, value_size), bool(is_half), card)
    elements = -(-queries // tall) * -(-size // wide) * (4 + tall * wide)
    if is_half and not keeps:
        splits = -(-keys // wide)
        if heads >= 256 and keys <= 2 * wide:
            splits = 1
        splits = max(1, min(splits, 200 // heads))
        elements += splits * wide * (-(-size // tall) + -(-value_size // tall)) * tall
    return 4 * heads * -(-elements // 4) * 4, 0, 0


def _efficient_tile(size: int, is_half: bool, card: Card) -> tuple[int, int, bool]:
    """Queries and keys of a block, and whether the gradients of keys and values stay in registers (kernels/cutlassB.h)."""
    has_room = card.block_shared_bytes >= _LARGE_BLOCK_BYTES
    if size <= 64:
        return 64, 64, True
    if not is_half:
        return (128, 64, True) if has_room and card.capability >= (8, 0) else (64, 64, True)
    if size > 128:
        return 128, 64, False
    if card.capability < (8, 0):
        return 128, 64, True
    if has_room:
        return 128, 128, True
    return (128, 64, True) if size <= 96 and card.capability in {(8, 6), (8, 9)} else (64, 64, False)


_LARGE_BLOCK_BYTES = 140 << 10


def _foreach_norm(numbers: Sequence[int], _facts: Sequence[int], _card: Card) -> tuple[int, ...]:
    """One float per chunk, for every tensor as many chunks as the largest has (ForeachReduceOp.cu). The last norm is that of all norms."""
    largest, norms = numbers
    return (4 * max(0, norms - 1) * -(-largest // _FOREACH_CHUNK),)


_FOREACH_CHUNK = 1 << 16


def _warmup(numbers: Sequence[int], facts: Sequence[int], _card: Card) -> tuple[int, ...]:
    """The memory of the whole quantised base, allocated and freed before loading. The fact is the factor by which weights shrink."""
    copies, weights = numbers
    return (copies + weights // facts[0],)


_RULES: dict[str, tuple[int, Callable[[Sequence[int], Sequence[int], Card], tuple[int, ...]]]] = {
    "reduction": (2, _reduction),
    "embedding": (1, _embedding),
    "foreach_norm": (1, _foreach_norm),
    "warmup": (1, _warmup),
    "flash_forward": (3, _flash_forward),
    "efficient_backward": (3, _efficient_backward),
}
"""For each rule, how many numbers it takes. It returns as many sizes."""
