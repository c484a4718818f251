"""A size is written and read the same way everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from brim.errors import UsageError
from brim.sizes import GIB, MIB, format_bytes, format_count, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("600MiB", 600 * MIB), ("2GiB", 2 * GIB), ("1.5GB", 1_500_000_000), ("123", 123), ("2 gib", 2 * GIB), (" 1KB ", 1000),
        ("1_000_000", 1_000_000), ("0.5KiB", 512), (".5MiB", MIB // 2), ("3TB", 3 * 10**12), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "x", "24G", "1.5", "-1GiB", "0", "0MiB", "1e9", "nanGiB", "1..5GB", "GiB", "٣GiB", "2GiBs", "0.1B"]
)
def test_what_is_not_a_size_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.hint is not None
    assert "600MiB" in caught.value.hint


@given(st.integers(min_value=1, max_value=2**62))
def test_an_integer_is_bytes_exactly(count: int) -> None:
    assert parse_size(count) == parse_size(str(count)) == parse_size(f"{count}B") == count


@given(st.integers(min_value=0, max_value=2**55))
def test_a_printed_size_is_near_and_short(count: int) -> None:
    text = format_bytes(count)
    assert len(text) <= len("32768.0 TiB")
    if count >= 1024:
        assert abs(parse_size(text) - count) <= count * 0.006


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (12133000000, "11.3 GiB"), (1023 * MIB, "1.00 GiB"), (-GIB, "-1.00 GiB")],
)
def test_sizes_are_printed_with_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(8_030_261_248, "8.03B"), (124_439_808, "124M"), (999_950_000, "1.00B"), (7, "7"), (1_500, "1.50K")]
)
def test_counts_are_printed_with_three_digits(count: int, text: str) -> None:
    assert format_count(count) == text
