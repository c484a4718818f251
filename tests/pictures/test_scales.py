"""Places on axes, round numbers, and series made shorter without losing what matters."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from brim.pictures.histogram import bins_of, middle
from brim.pictures.scales import Scale, byte_ticks, bytes_short, plain, spanning, whole_ticks
from brim.pictures.thinning import highest, known, smooth, spread, thin

NUMBERS = st.floats(-1e12, 1e12, allow_nan=False)
ANY = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), NUMBERS)


@given(st.lists(NUMBERS, min_size=1), st.booleans())
def test_every_number_has_a_place_on_an_axis_that_spans_them(values: list[float], from_zero: bool) -> None:
    scale = spanning(values, from_zero=from_zero)
    assert scale.high > scale.low
    places = [scale.place(value) for value in sorted(values)]
    assert all(0 <= place <= 1 for place in places)
    assert places == sorted(places)


@given(st.lists(NUMBERS, min_size=2))
def test_ticks_are_few_and_lie_within_the_axis(values: list[float]) -> None:
    scale = spanning(values)
    ticks = scale.ticks()
    room = (scale.high - scale.low) * 1e-6
    assert len(ticks) <= 8
    assert all(scale.low - room <= tick <= scale.high + room for tick in ticks)


def test_an_axis_of_nothing_and_of_one_value_can_be_drawn() -> None:
    for values in ([], [0.0], [5.0], [-3.0, -3.0], [math.nan, math.inf]):
        for from_zero in (True, False):
            assert spanning(values, from_zero=from_zero).ticks()


def test_a_logarithmic_axis_shows_powers_of_ten() -> None:
    assert Scale(0.5, 2000.0, is_log=True).ticks() == [1.0, 10.0, 100.0, 1000.0]
    assert Scale(1.0, 30.0, is_log=True).ticks() == [1.0, 2.0, 5.0, 10.0, 20.0]
    assert Scale(1.0, 100.0, is_log=True).place(10.0) == pytest.approx(0.5)


def test_bytes_are_ticked_in_their_own_unit() -> None:
    assert [bytes_short(tick) for tick in byte_ticks(Scale(0, 600 * 1024**2))] == ["0 B", "200 MiB", "400 MiB", "600 MiB"]
    assert [bytes_short(tick) for tick in byte_ticks(Scale(0, 15 * 1024**3), 3)] == ["0 B", "5 GiB", "10 GiB", "15 GiB"]


def test_steps_are_never_halved() -> None:
    assert whole_ticks(Scale(0, 3), 5) == [0.0, 1.0, 2.0, 3.0]
    assert all(tick == int(tick) for tick in whole_ticks(Scale(1, 2), 5))


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (3e-4, "0.0003"), (2.5e-6, "2.5e-06"), (1.25, "1.25"), (12500.0, "12,500"), (math.nan, "NaN"), (math.inf, "∞"), (1e12, "1e+12")],
)  # fmt: skip
def test_numbers_of_any_size_are_short(value: float, said: str) -> None:
    assert plain(value) == said


@given(st.lists(ANY, max_size=400), st.integers(4, 60))
def test_thinning_keeps_the_ends_and_the_extremes_and_stays_below_its_limit(values: list[float | None], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 4)
    numbers = known(values)
    if values:
        assert kept[0] == 0
        assert kept[-1] == len(values) - 1
    if numbers:
        left = known([values[place] for place in kept])
        assert (min(left), max(left)) == (min(numbers), max(numbers))


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300), st.integers(1, 50))
def test_the_peak_of_a_timeline_survives(values: list[int], most: int) -> None:
    kept = highest(values, most)
    assert len(kept) <= max(most, 1)
    assert max(values[place] for place in kept) == max(values)


@given(st.integers(0, 10**6), st.integers(2, 80))
def test_rows_of_a_table_are_spread_evenly(count: int, most: int) -> None:
    places = spread(count, most)
    assert len(places) == min(count, most)
    assert not count or (places[0], places[-1]) == (0, count - 1)
    gaps = {after - before for before, after in pairwise(places)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.lists(ANY, max_size=200))
def test_a_smoothed_line_stays_between_the_values(values: list[float | None]) -> None:
    found = smooth(values)
    numbers = known(values)
    assert len(found) == len(values)
    if numbers and max(map(abs, numbers)) < 1e12:
        room = 1e-3 + 1e-6 * max(map(abs, numbers)) * len(numbers)
        assert all(value is None or min(numbers) - room <= value <= max(numbers) + room for value in found)


def test_what_is_not_a_number_does_not_stop_a_smoothed_line() -> None:
    assert smooth([1.0, math.nan, 1.0, None, 1.0]) == [1.0] * 5
    assert smooth([None, math.nan]) == [None, None]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=100))
def test_a_histogram_loses_no_sequence(lengths: list[tuple[int, int]]) -> None:
    bins = bins_of(lengths)
    assert len(bins) <= 40
    assert sum(count for _low, _high, count in bins) == sum(count for _length, count in lengths)
    assert all(high + 1 == low for (_low, high, _count), (low, _high, _more) in pairwise(bins))
    assert bins[0][0] <= min(length for length, _count in lengths)
    assert bins[-1][1] >= max(length for length, _count in lengths)


def test_half_of_the_sequences_are_below_the_median() -> None:
    lengths = [(10, 5), (20, 4), (1000, 1)]
    assert (middle(lengths, 0.5), middle(lengths, 0.95)) == (10, 1000)
