"""A number that cannot be meant is refused in words, on the command line and in the config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from brim import locale
from brim.cli._numbers import Number, WholeNumber
from tests.conftest import Cli


@pytest.mark.parametrize(("value", "number"), [("1", 1), (" 7 ", 7), (3, 3), (4.0, 4), ("1_000", 1000)])
def test_a_whole_number_is_read(value: Any, number: int) -> None:
    found = WholeNumber(1).convert(value, None, None)
    assert (found, type(found)) == (number, int)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (WholeNumber(1), "x", "'x' is not a whole number."),
        (WholeNumber(1), "1e3", "'1e3' is not a whole number."),
        (WholeNumber(1), 2.5, "2.5 is not a whole number."),
        (WholeNumber(1), True, "True is not a whole number."),
        (WholeNumber(1), float("inf"), "inf is not a whole number."),
        (WholeNumber(1), "0", "0 is less than 1."),
        (WholeNumber(0), -2, "-2 is less than 0."),
        (Number(0), "abc", "'abc' is not a number."),
        (Number(0), "nan", "'nan' is not a number."),
        (Number(0), True, "True is not a number."),
        (Number(0), "-0.5", "-0.5 is less than 0."),
        (Number(above=0), "0", "0 is not above 0."),
        (Number(0.1), "0.09999999", "0.09999999 is less than 0.1."),
        (WholeNumber(1), "99999999999999999999", "99999999999999999999 is too large."),
    ],
)
def test_what_cannot_be_meant_is_told(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        kind.convert(value, None, None)
    assert caught.value.message == said


def test_numbers_are_read() -> None:
    assert [Number(above=0).convert(value, None, None) for value in ("1e-4", 3, "inf")] == [1e-4, 3.0, float("inf")]


def test_the_flag_is_named_in_both_languages(cli: Cli) -> None:
    ended = cli("train", "m", "--data", "d", "--micro-batch", "0")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("brim: Invalid value for '--micro-batch': 0 is less than 1.\n")
    ended = cli("--lang", "zh", "train", "m", "--data", "d", "--epochs", "abc")
    assert ended.err.startswith("brim: '--epochs' 的值无效：'abc' 不是数。\n")
    locale.activate("en")


def test_the_config_file_is_held_to_the_same(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "brim.yaml").write_text("micro_batch: 2.5\n")
    ended = cli("estimate", "tinyllama-1.1b", "--config", str(tmp_path / "brim.yaml"))
    assert ended.code == 2
    assert "micro_batch: 2.5 is not a whole number." in ended.err


def test_help_tells_the_bounds(cli: Cli) -> None:
    assert "[x>=12]" in cli("verify", "--help").out
    assert "[x>=0.1]" in cli("watch", "--help").out
    assert "[x>0]" in cli("train", "--help").out
