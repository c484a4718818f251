"""Bad rows: counted, the first of them kept, and told together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.errors import UsageError
from brim.locale import _, sentences
from brim.records.runs import BadRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.workload.formats import Found
    from brim.workload.reading import Rows

MOST_SHOWN: Final = 10
_MOST_KEPT: Final = 20
_MOST_COUNTED: Final = 10_000
"""Beyond what is allowed: nobody mends so many by hand."""


class BadRows:
    """The bad rows of one file or folder."""

    def __init__(self, rows: Rows, max_bad: int) -> None:
        self._rows = rows
        self._max_bad = max_bad
        self._hint = ""
        self.count = 0
        self.first: list[BadRow] = []

    def add(self, found: Found, reason: str) -> None:
        """One more. Raises when there are so many that counting on tells nothing."""
        self.count += 1
        if len(self.first) < _MOST_KEPT:
            self.first.append(BadRow(place=self._rows.place_of(found), reason=reason))
            self._hint = self._hint or found.hint or ""
        if self.count >= self._max_bad + _MOST_COUNTED:
            self.check(is_all=False)

    @property
    def are_too_many(self) -> bool:
        """More than are allowed."""
        return self.count > self._max_bad

    def check(self, *, is_all: bool = True) -> None:
        """Raise if there are more than are allowed. `is_all`: whether the data were read to the end."""
        if self.are_too_many:
            raise too_many(self._rows.name, self.first, self.count, self._max_bad, is_all=is_all, hint=self._hint)


def too_many(path: str, first: Sequence[BadRow], count: int, max_bad: int, *, is_all: bool = True, hint: str = "") -> UsageError:
    """All that is wrong with the data, in one error."""
    text = (
        _("Bad rows in {path}: {count:,}, and {allowed:,} are allowed.")
        if is_all
        else _("Bad rows in {path}: {count:,} or more, and {allowed:,} are allowed.")
    )
    lines = [text.format(path=path, count=count, allowed=max_bad), *listed(first, count)]
    advice = _("Mend them, or leave them out with --max-bad {count}.").format(count=count)
    return UsageError("\n".join(lines), hint=sentences(hint, advice))


def nothing_left(path: str, first: Sequence[BadRow], count: int) -> UsageError:
    """All rows are bad."""
    text = _("Every row of {path} is bad, so there is nothing to train on.").format(path=path)
    return UsageError("\n".join([text, *listed(first, count)]))


def listed(first: Sequence[BadRow], count: int) -> list[str]:
    """A line for each of the first, and how many more there are."""
    shown = first[:MOST_SHOWN]
    lines = [_("{place}: {fault}.").format(place=row.place, fault=row.reason) for row in shown]
    if count > len(shown):
        lines.append(_("and {count:,} more").format(count=count - len(shown)))
    return [f"  {line}" for line in lines]
