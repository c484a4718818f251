"""Numbers on the command line, and what is said of one that cannot be meant."""

from __future__ import annotations

import math
from typing import Any, Final

import click

from brim.locale import _

_MOST: Final = 1 << 53
"""Beyond this a float does not tell whole numbers apart, and nothing that is counted here comes near it."""


class WholeNumber(click.IntRange):
    """`WholeNumber(1)`: 1, 2, 3, ..."""

    name = "integer"

    def __init__(self, least: int) -> None:
        super().__init__(min=least)
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; one click.BadParameter where it is none, or too small."""
        try:
            number = int(value)
            is_whole = not isinstance(value, bool) and (isinstance(value, str) or number == value)
        except (TypeError, ValueError, OverflowError):
            number, is_whole = 0, False
        if not is_whole:
            self.fail(_("{value} is not a whole number.").format(value=repr(value)), param, ctx)
        if number < self.least:
            self.fail(_("{value} is less than {least}.").format(value=number, least=self.least), param, ctx)
        if number > _MOST:
            self.fail(_("{value} is too large.").format(value=number), param, ctx)
        return number


class Number(click.FloatRange):
    """`Number(0)`: 0 and above. `Number(above=0)`: above 0. `Number(0, below=1)`: a share of less than 1."""

    name = "float"

    def __init__(self, least: float | None = None, *, above: float | None = None, below: float | None = None) -> None:
        super().__init__(min=least if above is None else above, min_open=above is not None, max=below, max_open=below is not None)
        self.least, self.above, self.below = least, above, below

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; one click.BadParameter where it is none, too small or too large."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            self.fail(_("{value} is not a number.").format(value=repr(value)), param, ctx)
        if self.above is not None and number <= self.above:
            self.fail(_("{value} is not above {bound:g}.").format(value=value, bound=self.above), param, ctx)
        if self.least is not None and number < self.least:
            self.fail(_("{value} is less than {least}.").format(value=value, least=f"{self.least:g}"), param, ctx)
        if self.below is not None and number >= self.below:
            self.fail(_("{value} is not below {bound:g}.").format(value=value, bound=self.below), param, ctx)
        return number


POSITIVE: Final[dict[str, Any]] = {"type": WholeNumber(1), "metavar": "N"}
COUNT: Final[dict[str, Any]] = {"type": WholeNumber(0), "metavar": "N"}
ABOVE_ZERO: Final[dict[str, Any]] = {"type": Number(above=0), "metavar": "X"}
