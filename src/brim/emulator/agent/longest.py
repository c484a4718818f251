"""`--longest`: DataLoaders over Hugging Face datasets yield their longest rows first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TOKEN_COLUMNS = ("input_ids", "length", "lengths", "input_features")


def install(torch: Any, note: Callable[..., None]) -> None:
    """Replace the sampler of every DataLoader that has a shuffled order and rows of known length."""
    loader_class = torch.utils.data.DataLoader
    initialize = loader_class.__init__

    class LongestFirst(torch.utils.data.Sampler):  # type: ignore[misc]
        """Row numbers, longest row first."""

        def __init__(self, order: list[int]) -> None:
            self._order = order

        def __iter__(self) -> Iterator[int]:
            return iter(self._order)

        def __len__(self) -> int:
            return len(self._order)

    @functools.wraps(initialize)
    def longest_first(self: Any, dataset: Any, *given: Any, **options: Any) -> None:
        is_shuffled = options.get("shuffle") or options.get("sampler") is not None or (len(given) > 1 and given[1])
        if is_shuffled and len(given) < 3 and options.get("batch_sampler") is None:
            lengths, column = lengths_of(dataset)
            if lengths:
                order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
                options["sampler"], options["shuffle"] = LongestFirst(order), False
                given = given[:1]
                note("longest-first", rows=len(order), column=column, longest=lengths[order[0]])
            else:
                note("longest-unknown", dataset=type(dataset).__name__)
        elif lengths_of(dataset)[0]:
            note("longest-skipped", dataset=type(dataset).__name__)
        initialize(self, dataset, *given, **options)

    loader_class.__init__ = longest_first


def lengths_of(dataset: Any) -> tuple[list[int], str]:
    """Lengths of the rows of a `datasets.Dataset`, from its token column, else from its longest text column."""
    names = list(getattr(dataset, "column_names", None) or [])
    column = next((name for name in _TOKEN_COLUMNS if name in names), None)
    if not names or not hasattr(dataset, "data"):
        return [], ""
    if column is None:
        totals = {name: sum(map(len, values)) for name in names if (values := _strings(dataset, name))}
        if not totals:
            return [], ""
        column = max(totals, key=lambda name: totals[name])
        return [len(text) for text in _strings(dataset, column)], column
    values = dataset.with_format(None)[column]
    return [value if isinstance(value, int) else len(value) for value in values], column


def _strings(dataset: Any, name: str) -> list[str]:
    values = list(dataset.with_format(None)[name])
    return values if values and all(isinstance(value, str) for value in values) else []
