"""From indices to data: one item of the loader is this rank's share of one whole optimizer step, already cut and collated.

Nothing is read to slice. A worker is given the number of a step; it slices by the plan and the limit in force, reads its sequences and
collates each micro-batch. So slicing costs the training process nothing, and a resumed run starts at its step at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from brim.errors import UsageError
from brim.locale import _
from brim.step.micro import MicroBatch, copies, filler, has_rows
from brim.step.slicing import IntArray

if TYPE_CHECKING:
    from brim.step.batch import BatchPlan
    from brim.step.budget import Budget
    from brim.step.oom import Guard

Collate = Callable[[Sequence[Any]], Any]
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class StepItem:
    """One rank's share of one optimizer step."""

    step: int
    """Optimizer steps before this one."""
    promised: IntArray
    """The sequences of the whole global batch, of all ranks."""
    micro: tuple[MicroBatch, ...]
    worker: tuple[int, int] | None = None
    """The process that loaded it, and how many such there are; None where the training process loads by itself."""

    def pin_memory(self) -> StepItem:
        """What a DataLoader calls for `pin_memory=True`."""
        from torch.utils.data import _utils as data

        pin_memory: Callable[[Any], Any] = data.pin_memory.pin_memory
        return replace(self, micro=tuple(replace(micro, batch=pin_memory(micro.batch)) for micro in self.micro))


class StepDataset(Dataset[StepItem]):
    """The steps of a run: number in, item out."""

    def __init__(
        self,
        data: Any,
        collate: Collate,
        plan: BatchPlan,
        guard: Guard,
        rank: int = 0,
        *,
        budgets: Sequence[Budget] | None = None,
    ) -> None:
        """`budgets` are those of all ranks where they differ, as agreed at the start; they may be told to the guard as well."""
        assert len(data) == plan.n
        if budgets is not None:
            guard.budgets = tuple(budgets)
        self.data = data
        self.collate = collate
        self.plan = plan
        self.guard = guard
        self.rank = rank

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __getitem__(self, step: int) -> StepItem:
        micro = tuple(self.micro_batch(ids) if len(ids) else self._filler(step) for ids in self._share(step))
        return StepItem(step, self.plan.global_batch(step), micro, _this_worker())

    def _share(self, step: int) -> list[IntArray]:
        """This rank's micro-batches. What it alone has learned about its memory must not change what the others expect of it."""
        agreed = self.guard.budgets
        if self.plan.together:
            return self.plan.slices(step, agreed or self.guard.budget)[self.rank]
        if agreed is None:
            return self.plan.slices(step, self.guard.in_force)[self.rank]
        mine = self.plan.slices(step, agreed)[self.rank]
        if mine and self.guard.limit < agreed[self.rank].limit:
            return self.plan.cut(np.concatenate(mine), agreed[self.rank].with_limit(self.guard.limit))
        return mine

    def _filler(self, step: int) -> MicroBatch:
        """For a round in which nothing is left for this rank: the shortest sequence of the step, with no label of it."""
        ids = self.plan.global_batch(step)
        tokens = self.plan.lengths_of(ids).reshape(len(ids), -1).sum(axis=1)
        shortest = int(tokens.argmin())
        return filler(self.micro_batch(ids[shortest : shortest + 1]))

    def micro_batch(self, ids: IntArray) -> MicroBatch:
        """These sequences, read and collated."""
        features = read(self.data, ids)
        batch = self.collate(copies(features))
        kept = None if has_rows(batch, len(ids)) else features
        return MicroBatch(ids, self.plan.lengths_of(ids), batch, kept)


def _this_worker() -> tuple[int, int] | None:
    worker = get_worker_info()
    return None if worker is None else (os.getpid(), worker.num_workers)


class StepSampler:
    """The numbers of an epoch's steps, each as a batch of one, which is how loaders and their wrappers take it."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.epoch = 0

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        start = self.epoch * self.plan.steps_per_epoch
        return ([step] for step in range(start, start + self.plan.steps_per_epoch))

    def set_epoch(self, epoch: int) -> None:
        """Before each epoch."""
        self.epoch = epoch


def the_only(items: Sequence[StepItem]) -> StepItem:
    """The collator of the loader itself: a batch is one item."""
    return items[0]


def read(data: Any, ids: IntArray) -> list[Any]:
    """Sequences by their places, in one call where the data set has one."""
    places = ids.tolist()
    at_once = getattr(data, "__getitems__", None)
    return list(at_once(places)) if at_once is not None else [data[place] for place in places]


def has_targets(model: Any) -> bool:
    """Whether a model reads one sequence and writes another (T5, BART), so that two lengths are padded."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def lengths_of(data: Any, *, column: str | None = None, has_targets: bool = False) -> npt.NDArray[Any]:
    """Tokens of every sequence: from a column of lengths, from an Arrow table's offsets, or by looking at each once.

    With `has_targets` (seq2seq) the labels' lengths stand beside those of the inputs.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UsageError(
            _("A data set that can only be iterated has no order that could be promised."),
            hint=_("Give a data set with a length and numbered items, such as a datasets.Dataset or a list."),
        )
    if not len(data):
        raise UsageError(_("The training data is empty."))
    columns = getattr(data, "column_names", None)
    if isinstance(columns, list):
        if column in columns and not has_targets:
            found = np.asarray(data[column][:])
            if np.issubdtype(found.dtype, np.integer):  # else a column of that name that is something else
                return found
        if "input_ids" in columns and (not has_targets or "labels" in columns):
            return _arrow_lengths(data, ["input_ids", "labels"] if has_targets else ["input_ids"])
    found = np.array([_length_of(data[place], place, has_targets) for place in range(len(data))])
    return found if has_targets else found[:, 0]


def _arrow_lengths(data: Any, names: list[str]) -> npt.NDArray[Any]:
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    tables = data.select_columns(names).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
    parts = [np.stack([pc.list_value_length(table[name]).to_numpy() for name in names], axis=1) for table in tables]
    found = np.concatenate(parts)
    return found if len(names) > 1 else found[:, 0]


def _length_of(item: Any, place: int, has_targets: bool) -> list[int]:
    names = ["input_ids", "labels"] if has_targets else ["input_ids"]
    if not isinstance(item, Mapping) or any(name not in item for name in names):
        raise UsageError(
            _("Item {place} of the data has no {names}, so its length cannot be seen.").format(
                place=place, names=", ".join(names)
            ),
            hint=_("Give the lengths: lengths=[...], one number of tokens for each sequence."),
        )
    return [_tokens(item[name]) for name in names]


def _tokens(value: Any) -> int:
    return int(value.shape[-1]) if isinstance(value, torch.Tensor | np.ndarray) else len(value)
