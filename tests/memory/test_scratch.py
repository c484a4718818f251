"""Scratch of CUDA kernels, against what the CUDA build of torch 2.13 asks its allocator for on emulated cards."""

from __future__ import annotations

import pytest

from brim.memory.peaks import with_third_step
from brim.memory.scratch import Card, reduction_bytes, resolve, scratch_name
from brim.memory.stream import Birth, Place, Trace

T4 = Card.of((7, 5), 40)
RTX_3090 = Card.of((8, 6), 82)
A100 = Card.of((8, 0), 108)


def sizes(rule: str, numbers: tuple[int, ...], facts: tuple[int, ...], card: Card) -> list[int]:
    """What a rule's numbers become, without those that are dropped."""
    places = [Place("backward", 0, None)]
    births = [Birth(number, scratch_name(rule, *facts), 0) for number in numbers]
    events = [*range(len(births)), *(~number for number in reversed(range(len(births))))]
    found = resolve(Trace(births, events, [0] * len(events), places), card)
    return [found.births[event].size for event in found.events if event >= 0]


@pytest.mark.parametrize(
    ("card", "rows", "columns", "expected"),
    [
        (T4, 2048, 768, (12_582_912, 24)),
        (T4, 8192, 768, (21_233_664, 24)),
        (T4, 4096, 4096, (20_971_520, 128)),
        (T4, 65536, 100, (4_096_000, 8)),
        (T4, 512, 768, (0, 0)),
        (A100, 8192, 768, (50_331_648, 24)),
        (A100, 4096, 4096, (113_246_208, 128)),
        (A100, 65536, 100, (13_107_200, 8)),
    ],
)
def test_the_gradient_of_a_bias_is_a_reduction_that_is_split_over_blocks(
    card: Card, rows: int, columns: int, expected: tuple[int, int]
) -> None:
    found = reduction_bytes(columns, rows, card, along_rows=False, input_vector=1, output_vector=4, item_bytes=4)
    assert found == expected


@pytest.mark.parametrize(("card", "expected"), [(T4, (320, 4)), (A100, (768, 4))])
def test_the_sum_of_everything_is_split_too(card: Card, expected: tuple[int, int]) -> None:
    assert reduction_bytes(1, 2048 * 768, card, along_rows=True, input_vector=4, output_vector=1, item_bytes=4) == expected


@pytest.mark.parametrize(
    ("card", "size", "is_half", "length", "a_head"),
    [
        (T4, 64, 0, 100, 32_800),
        (T4, 80, 1, 512, 262_272),
        (T4, 160, 1, 100, 360_496),
        (RTX_3090, 96, 1, 100, 65_568),
        (RTX_3090, 128, 1, 512, 786_688),
        (RTX_3090, 256, 0, 512, 524_800),
        (A100, 128, 0, 100, 65_568),
        (A100, 128, 1, 512, 262_208),
    ],
)
def test_the_backward_of_efficient_attention_has_a_workspace(
    card: Card, size: int, is_half: int, length: int, a_head: int
) -> None:
    assert sizes("efficient_backward", (8, length, length), (size, size, is_half), card) == [8 * a_head]


@pytest.mark.parametrize(
    ("card", "length", "size", "expected"),
    [(RTX_3090, 512, 80, [32_768, 3_145_728]), (A100, 512, 256, [49_152, 12_582_912]), (A100, 128, 64, [])],
)
def test_flash_attention_splits_the_keys_of_few_rows(card: Card, length: int, size: int, expected: list[int]) -> None:
    assert sizes("flash_forward", (8, length, length), (size,), card) == expected


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "expected"),
    [
        (3072, 50257, 768, []),
        (3073, 50257, 768, [10_383_360]),
        (8192, 50257, 768, [27_681_792]),
        (32768, 32000, 512, [72_245_248]),
        (8192, 32, 768, [6_808]),
        (8192, 272, 64, [8_728]),
        (8192, 273, 64, [279_552]),
    ],
)
def test_the_gradient_of_an_embedding_sorts_many_tokens(tokens: int, rows: int, width: int, expected: list[int]) -> None:
    assert sizes("embedding", (tokens,), (3, rows, width), A100) == expected


def test_a_third_step_repeats_the_second() -> None:
    places = [Place("build", 0, None), *(Place(phase, step, None) for step in (0, 1) for phase in ("forward", "optimizer"))]
    births = [Birth(8, "build", 0), Birth(1, "a", 1), Birth(2, "state", 2), Birth(1, "a", 3)]
    trace = Trace(births, [0, 1, ~1, 2, 3, ~3, ~0], [0, 1, 1, 2, 3, 3, 4], places)
    found = with_third_step(trace)
    assert found.events == [0, 1, ~1, 2, 3, ~3, 4, ~4, ~0]
    assert found.births[4] == births[3]
