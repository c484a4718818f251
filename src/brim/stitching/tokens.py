"""Rows of tokens, looked at once before anything runs: one that the model cannot take is told by its number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from brim.errors import UsageError
from brim.locale import _
from brim.step.micro import IGNORED

Numbers = npt.NDArray[Any]
_AT_ONCE: Final = 1000
_COLUMNS: Final = ("input_ids", "labels", "attention_mask", "position_ids")


def checked_lengths(dataset: Any, vocabulary: int) -> tuple[Numbers, Numbers]:
    """How long each row is, with the padding that it brings along and without; an error that names the first row that cannot be."""
    found = [_checked(row, place, vocabulary) for place, row in enumerate(_rows(dataset))]
    lengths = np.array(found)
    return lengths[:, 0], lengths[:, 1]


def packed_rows() -> UsageError:
    """Why rows with positions of their own are not taken."""
    return UsageError(
        _("Rows with position_ids hold several sequences each, and padding them into batches would lose the borders."),
        hint=_("Give each sequence as a row of its own: brim sorts them into batches with little padding."),
    )


def _rows(dataset: Any) -> Iterator[Any]:
    """Row after row; of a table only the columns that matter, many rows at once."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or "input_ids" not in columns:
        yield from (dataset[place] for place in range(len(dataset)))
        return
    names = [name for name in _COLUMNS if name in columns]
    for table in dataset.select_columns(names).with_format("arrow").iter(batch_size=_AT_ONCE):
        for values in zip(*(table[name].to_numpy() for name in names), strict=True):
            yield dict(zip(names, values, strict=True))


def _checked(row: Any, place: int, vocabulary: int) -> tuple[int, int]:
    if not isinstance(row, Mapping) or row.get("input_ids") is None:
        raise UsageError(
            _("Row {place} of the training data has no input_ids.").format(place=place),
            hint=_("All rows must be of one kind: tokens, or texts."),
        )
    if row.get("position_ids") is not None:
        raise packed_rows()
    ids = _numbers(row, "input_ids", place)
    if not len(ids):
        raise UsageError(_("Row {place} of the training data has no tokens.").format(place=place), hint=_("Leave it out."))
    _refuse_others(ids, (ids < 0) | (ids >= vocabulary), "input_ids", place, vocabulary)
    if row.get("labels") is not None:
        labels = _numbers(row, "labels", place, length=len(ids))
        _refuse_others(labels, (labels != IGNORED) & ((labels < 0) | (labels >= vocabulary)), "labels", place, vocabulary)
    if row.get("attention_mask") is None:
        return len(ids), len(ids)
    mask = _numbers(row, "attention_mask", place, length=len(ids))
    return len(ids), int((mask != 0).sum())


def _numbers(row: Mapping[str, Any], name: str, place: int, length: int | None = None) -> Numbers:
    """One of a row's columns, as whole numbers in a line."""
    value = row[name]
    try:
        found = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError:  # lists of different lengths within it
        found = np.asarray(None)
    if found.size == 0 and found.ndim == 1:
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iub":
        text = _("Row {place} of the training data: {name} is no line of whole numbers (its shape is {shape}, its type {kind}).")
        raise UsageError(
            text.format(place=place, name=name, shape=found.shape, kind=found.dtype),
            hint=_("One row is one sequence: take the batch dimension away, ids[0] instead of ids.") if found.ndim > 1 else None,
        )
    if length is not None and len(found) != length:
        text = _("Row {place} of the training data has {length} input_ids and {count} {name}.")
        raise UsageError(text.format(place=place, length=length, count=len(found), name=name))
    return found


def _refuse_others(values: Numbers, is_foreign: Numbers, name: str, place: int, vocabulary: int) -> None:
    if not is_foreign.any():
        return
    text = _("Row {place} of the training data has the number {number} in {name}, and the tokens of the model are 0 to {last}.")
    raise UsageError(
        text.format(place=place, number=int(values[is_foreign][0]), name=name, last=vocabulary - 1),
        hint=_("Take the tokenizer of the first donor. A label that is not to be learned is {ignored}.").format(ignored=IGNORED),
    )
