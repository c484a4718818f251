"""What a trace answers where the traced code looks at values: tensors without memory have none.

Each answer is an assumption about an ordinary batch, and the only ones that a trace makes:

- A truth value is asked for to see whether a mask, or positions, are trivial. They are, but for the mask of a padded batch and what is
  computed from it (`deny`). The mask that BART makes for its decoder has no padding, though the batch has.
- Where elements are counted (labels that count, tokens of the experts), all of them count.
- Tokens that equal a given one are end tokens: one a sequence, so all sequences have equally many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_aten = torch.ops.aten
QUESTIONS = frozenset(
    {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.unique_consecutive.default, _aten.index.Tensor}
)
"""Operators whose result may depend on values."""


class DataDependentError(Exception):
    """The module asked for the value of a tensor, and a trace has none."""


class Values:
    """Answers by where a tensor comes from."""

    def __init__(self, identify: Callable[[torch.Tensor], int | None], truth: bool | float | None) -> None:
        """Tell storages apart by `identify`; `truth` is the answer to `.item()`, None forbids the question."""
        self._identify = identify
        self._truth = truth
        self._denied: set[int] = set()
        self._single: set[int] = set()

    def deny(self, tensor: torch.Tensor) -> None:
        """Answer no to questions about this tensor, and about every integer or boolean tensor that is computed from it."""
        number = self._identify(tensor)
        assert number is not None, "only a tensor that is counted can be denied"
        self._denied.add(number)

    def answer(self, func: Any, args: Any) -> Any:
        """The result of an operator whose result depends on values; NotImplemented for every other one."""
        asked = args[0] if args else None
        if not isinstance(asked, torch.Tensor) or not asked.is_meta:
            return NotImplemented
        if func is _aten._local_scalar_dense.default:
            if self._truth is None:
                raise DataDependentError
            return False if self._identify(asked) in self._denied else self._truth
        if func is _aten.nonzero.default:
            return asked.new_empty(asked.numel(), asked.dim(), dtype=torch.long)
        if func is _aten.unique_consecutive.default:
            return asked.new_empty(1), asked.new_empty(0, dtype=torch.long), asked.new_empty(0, dtype=torch.long)
        if func is _aten.index.Tensor and any(_is_choice(index) for index in args[1]):
            return func(asked, [position for index in args[1] for position in self._positions(index)])
        return NotImplemented

    def follow(self, func: Any, result: torch.Tensor, args: Any) -> None:
        """Remember where a result comes from."""
        if result.is_floating_point():
            return
        number = self._identify(result)
        if number is None:
            return
        if func is _aten.eq.Scalar and not args[0].is_floating_point():
            self._single.add(number)
        if self._denied and any(self._identify(source) in self._denied for source in _integers(args)):
            self._denied.add(number)

    def _positions(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """A boolean index as the index per dimension that it stands for."""
        if index is None or not _is_choice(index):
            return [index]
        count = index.shape[0] if self._identify(index) in self._single else index.numel()
        return [index.new_empty(count, dtype=torch.long) for _dimension in range(index.dim())]


def _is_choice(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _integers(args: Any) -> Iterator[torch.Tensor]:
    for argument in args:
        for item in argument if isinstance(argument, tuple | list) else (argument,):
            if isinstance(item, torch.Tensor) and not item.is_floating_point():
                yield item
