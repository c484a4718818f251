"""The classes of a classifier: their names as rows bring them, and their numbers, which are known only after the last row."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from brim.errors import UsageError
from brim.locale import _
from brim.trainer.data.pieces import plain_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MOST: Final = 10_000
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.0+)?")
_NAMELESS: Final = re.compile(r"LABEL_[0-9]+")
"""What transformers calls classes that were given no name."""


def labels_of(names: object) -> tuple[str, ...]:
    """The classes that a model tells apart, by the `id2label` of its config; empty where they have no names."""
    if not isinstance(names, Mapping):
        return ()
    try:
        found = tuple(str(names[key]) for key in sorted(names, key=int))
    except (TypeError, ValueError):
        return ()
    is_named = len(set(found)) == len(found) and not all(map(_NAMELESS.fullmatch, found))
    return found if is_named else ()


def are_numbers(names: Iterable[str]) -> bool:
    """Whether all classes are whole numbers, be it that a table wrote them with a point: 1.0."""
    return all(map(_NUMBER.fullmatch, names))


class Classes:
    """Names of classes, numbered as they come; or those that are given, and no others."""

    def __init__(self, given: Sequence[str] = (), model_labels: Sequence[str] = ()) -> None:
        """`model_labels`: what the model calls its classes. Where these are the data's, they keep the numbers that they have there."""
        self._given = tuple(given)
        self._of_model = {plain_name(name): name for name in model_labels}
        self._numbers = {plain_name(name): number for number, name in enumerate(given)}

    def number(self, name: str) -> int | None:
        """Of this class, for the time being; None where it is none of those that were given."""
        if self._given:
            return self._numbers.get(name, self._numbers.get(_whole(name)))
        return self._numbers.setdefault(name, len(self._numbers))

    def check_size(self, path: str, column: str) -> None:
        """Refuse a column that cannot hold classes."""
        if len(self._numbers) > _MOST and not self._given:
            text = _("The column {column} of {path} has more than {most:,} different values, so it holds no classes.")
            hint = _("Name the right one: --columns text=review,label=stars.")
            raise UsageError(text.format(column=column, path=path, most=_MOST), hint=hint)

    def check_number(self, path: str) -> None:
        """One class alone is nothing to learn."""
        if len(self.names) == 1 and not self._given:
            text = _("All rows of {path} are of one class, {name}: there is nothing to tell apart.")
            raise UsageError(text.format(path=path, name=self.names[0]))

    @property
    def names(self) -> tuple[str, ...]:
        """By their final number: as given; as the model has them; else sorted, and numbers by their value, so that 0, 1, 2 stay."""
        if self._given:
            return self._given
        found = {self._final_name(name) for name in self._numbers}
        if found == set(self._of_model):
            return tuple(self._of_model.values())
        # Not int(): Python refuses numbers of more than some thousand digits.
        return tuple(sorted(found, key=lambda name: (Decimal(name), name)) if self._are_numbers else sorted(found))

    def final(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Final numbers for those that were given out before."""
        if self._given:
            return numbers
        final = {plain_name(name): number for number, name in enumerate(self.names)}
        table = np.array([final[self._final_name(name)] for name in self._numbers], np.int32)
        return table[numbers]

    @functools.cached_property
    def _are_numbers(self) -> bool:
        """Asked when all rows are read."""
        return are_numbers(self._numbers)

    def _final_name(self, name: str) -> str:
        return _whole(name) if self._are_numbers else name

    def describe_unknown(self, name: str) -> str:
        """Why a row is bad whose class is none of those that were given."""
        known = ", ".join(self._given[:10])
        return _("the class {name} is none of the training data's: {known}").format(name=name, known=known)


def _whole(name: str) -> str:
    return name.partition(".")[0] if _NUMBER.fullmatch(name) else name
