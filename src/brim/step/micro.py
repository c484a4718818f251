"""One micro-batch as the collator made it: its rows, how to take some of them, and what it holds.

When a micro-batch does not fit, its rows go into two smaller ones. They are taken from the collated batch itself, so that what a collator
drew at random (masked words) stays as it was drawn. Columns that are padding in every row that is left are cut off again, where it
is certain which columns belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from brim.step.slicing import IntArray

IGNORED = -100
"""The label of a token that the loss does not count, in torch and transformers."""
_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
_TARGETS = {"labels", "decoder_input_ids", "decoder_attention_mask"}

Counting = Literal["next-token", "token", "sequence"]
"""What a loss is the mean of: labels after the first of a row, labels, or rows. Ignored labels never count."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model together."""

    ids: IntArray
    """Their places in the data set, in the order of the rows."""
    lengths: IntArray
    """Tokens of each, as planned: `[n]`, or `[n, 2]` with the targets'."""
    batch: Any
    features: Sequence[Any] | None = None
    """What the collator was given; kept only where the batch has no rows to take (padding-free batches)."""
    is_filler: bool = False
    """Whether it holds no sequence of the step: a batch that runs only because other ranks run one, and that teaches nothing."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def padded(self) -> tuple[int, ...]:
        """Tokens of its longest sequence, by plan; of its longest target beside it. None in a filler."""
        if self.is_filler:
            return (0,) * self.lengths.ndim
        return tuple(np.atleast_2d(self.lengths.T).max(axis=1).tolist())

    def split(self, collate: Callable[[Sequence[Any]], Any] | None) -> tuple[MicroBatch, MicroBatch]:
        """The first and the second half of its sequences: they are sorted, so the second is the shorter one."""
        middle = (len(self) + 1) // 2
        first, second = (self._take(rows, collate) for rows in (slice(0, middle), slice(middle, None)))
        return first, second

    def _take(self, rows: slice, collate: Callable[[Sequence[Any]], Any] | None) -> MicroBatch:
        part = replace(self, ids=self.ids[rows], lengths=self.lengths[rows])
        if self.features is None:
            return replace(part, batch=trimmed(_rows(self.batch, rows), has_targets=self.lengths.ndim == 2))
        assert collate is not None
        return replace(part, batch=collate(copies(self.features[rows])), features=self.features[rows])

    @property
    def tokens(self) -> int:
        """Real tokens: those that the mask shows, or as many as were planned, as far as the collator kept them."""
        mask = _get(self.batch, "attention_mask")
        if not _is_matrix(mask):
            return min(int(self.lengths.sum()), self.padded_tokens)
        targets = int(self.lengths[:, 1].sum()) if self.lengths.ndim == 2 else 0
        return min(int((mask != 0).sum()) + targets, self.padded_tokens)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the shape that the device computes."""
        return sum(len(self) * length for length in self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of a row as it was collated, and of a target's row."""
        planned = self.padded
        ids = _get(self.batch, "input_ids")
        rows = max(1, len(self))
        # A padding-free batch is one long row: what it computes is what it holds.
        source = -(-ids.numel() // rows) if _is_matrix(ids) else planned[0]
        if len(planned) == 1:
            return (max(source, 1),)
        labels = _get(self.batch, "labels")
        return max(source, 1), labels.shape[1] if _is_matrix(labels) else planned[1]

    def items(self, counting: Counting) -> int:
        """How many things its loss is the mean of."""
        labels = _get(self.batch, "shift_labels")
        if labels is None:
            labels = _get(self.batch, "labels")
            if labels is not None and counting == "next-token" and labels.dim() > 1:
                labels = labels[..., 1:]
        if counting == "sequence" or labels is None or labels.is_floating_point():
            return len(self)
        return int((labels != IGNORED).sum())


def filler(like: MicroBatch) -> MicroBatch:
    """A batch of the same shape with nothing to learn from it: no sequences, no tokens, every label ignored."""
    return MicroBatch(like.ids[:0], like.lengths[:0], _with_nothing_to_learn(like.batch), is_filler=True)


def _with_nothing_to_learn(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    labels = {
        name: torch.full_like(value, IGNORED)
        for name in ("labels", "shift_labels")
        if isinstance(value := batch.get(name), torch.Tensor) and not value.is_floating_point()
    }
    return {**batch, **labels}


def copies(features: Sequence[Any]) -> list[Any]:
    """For a collator, which may take features apart (pop labels): what is kept for later must not be what it was given."""
    return [dict(feature) if isinstance(feature, Mapping) else feature for feature in features]


def has_rows(batch: Any, count: int) -> bool:
    """Whether everything in the batch has one row for each sequence, so that rows can be taken."""
    leaves = _leaves(batch)
    return bool(leaves) and all(getattr(leaf, "ndim", 0) > 0 and leaf.shape[0] == count for leaf in leaves)


def trimmed(batch: Any, *, has_targets: bool) -> Any:
    """The batch without columns that are padding in every row; as it is where that cannot be told."""
    mask = _get(batch, "attention_mask")
    if not isinstance(batch, Mapping) or not _is_matrix(mask):
        return batch
    together = _INPUTS if has_targets else _INPUTS | {"labels"}
    matrices = {key for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    if matrices - _INPUTS - _TARGETS:
        return batch
    result = _cut(dict(batch), together & matrices, mask.ne(0))
    labels = batch.get("labels")
    if has_targets and _is_matrix(labels):
        assert labels is not None
        # A target may begin with a prompt that the loss leaves out: only what follows its last label is padding.
        result = _cut(result, _TARGETS & matrices, labels.ne(IGNORED).flip(1).cummax(dim=1).values.flip(1))
    return result


def _cut(batch: dict[str, Any], keys: set[str], used: torch.Tensor) -> dict[str, Any]:
    columns = torch.nonzero(used.any(dim=0)).flatten()
    if not len(columns) or any(batch[key].shape != used.shape for key in keys):
        return batch
    first, last = int(columns[0]), int(columns[-1]) + 1
    labels = batch["labels"] if "labels" in keys else None
    if labels is not None and bool((labels[:, :first] != IGNORED).any() or (labels[:, last:] != IGNORED).any()):
        return batch  # these labels belong to something else
    # Models flatten their labels with `view`, which takes no columns left out.
    return {**batch, **{key: batch[key][:, first:last].contiguous() for key in keys}}


def _rows(batch: Any, rows: slice) -> Any:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[rows]
    if isinstance(batch, Mapping):
        return {key: _rows(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(value, rows) for value in batch))
    if isinstance(batch, list | tuple):
        return batch[rows] if _is_plain(batch) else type(batch)(_rows(value, rows) for value in batch)
    return batch


def _leaves(batch: Any) -> list[Any]:
    """Tensors and arrays, and whatever else rows could not be taken of. A list of words or numbers is a column like them."""
    if isinstance(batch, list | tuple) and _is_plain(batch):
        return [np.empty(len(batch))]
    if isinstance(batch, Mapping | list | tuple):
        values = batch.values() if isinstance(batch, Mapping) else batch
        return [leaf for value in values for leaf in _leaves(value)]
    return [] if batch is None or isinstance(batch, str | int | float | bool) else [batch]


def _is_plain(values: Any) -> bool:
    return all(value is None or isinstance(value, str | int | float | bool) for value in values)


def _get(batch: Any, key: str) -> Any:
    return batch.get(key) if isinstance(batch, Mapping) else None


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2
