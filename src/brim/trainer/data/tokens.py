"""Prepared tokens as a data set of numbered sequences, and what makes a batch of some of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from brim.errors import UsageError
from brim.locale import _
from brim.step.slicing import order_of
from brim.trainer.data.store import Arrays, arrays_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.records.runs import DataCard

IGNORED: Final = -100
"""The label of a token that the loss does not count, in torch and transformers."""
_SPLIT: Final = 1 << 40
"""In the place of an epoch's number, which never comes so far: what is held out has an order of its own."""

Places = npt.NDArray[np.int64]


class TokenData:
    """The sequences of one card, or some of them. Mapped, not loaded; a copy in another process maps them anew."""

    def __init__(self, card: DataCard, places: Places | None = None) -> None:
        self.card = card
        self._places = places
        """Which sequences of the card; None: all."""
        self._mapped: Arrays | None = None

    @classmethod
    def open(cls, card: DataCard) -> TokenData:
        """What `prepare_data` made."""
        data = cls(card)
        data._arrays  # noqa: B018 (a folder that is gone is told here, not in the middle of a run)
        return data

    def __len__(self) -> int:
        return self.card.sequences if self._places is None else len(self._places)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place = place % len(self)
        number = place if self._places is None else int(self._places[place])
        arrays = self._arrays
        start, end = arrays["offsets"][number : number + 2]
        ids = arrays["ids"][start:end].astype(np.int64)
        if self.card.task == "classification":
            return {"input_ids": ids, "labels": int(arrays["classes"][number])}
        if self.card.task == "seq2seq":
            first, last = arrays["target_offsets"][number : number + 2]
            return {"input_ids": ids, "labels": arrays["targets"][first:last].astype(np.int64)}
        return {"input_ids": ids, "labels": np.where(arrays["supervised"][start:end], ids, IGNORED)}

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence, `[n]`; with targets `[n, 2]`."""
        names = ("offsets", "target_offsets") if self.card.task == "seq2seq" else ("offsets",)
        columns = [np.diff(self._arrays[name]) for name in names]
        found = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        return found if self._places is None else found[self._places]

    def held_out(self, eval_split: float, seed: int) -> tuple[TokenData, TokenData]:
        """Sequences to train on, and others to evaluate with: so many, or this share of all. Which ones follows from the seed alone."""
        n = len(self)
        count = eval_split if isinstance(eval_split, int) else round(n * eval_split)
        if eval_split <= 0 or (isinstance(eval_split, float) and eval_split >= 1):
            text = _("An evaluation cannot hold out {split} of the data.").format(split=eval_split)
            raise UsageError(text, hint=_("Give a share between 0 and 1, or a whole number of sequences."))
        count = max(1, count)
        if count >= n:
            text = _("Of {n:,} sequences, {count:,} cannot be held out: nothing would be left to train on.")
            raise UsageError(text.format(n=n, count=count))
        order = order_of(n, seed, _SPLIT).astype(np.int64)
        train, evaluation = (np.sort(part) for part in (order[count:], order[:count]))
        if self._places is not None:
            train, evaluation = self._places[train], self._places[evaluation]
        return TokenData(self.card, train), TokenData(self.card, evaluation)

    @property
    def _arrays(self) -> Arrays:
        if self._mapped is None:
            folder = Path(self.card.folder)
            self._mapped = arrays_of(folder, self.card)
            if self._mapped is None:
                text = _("The tokens of {source} are no longer in {folder}.").format(source=self.card.source, folder=folder)
                raise UsageError(text, hint=_("Start the command again: they are made anew."))
        return self._mapped

    def __getstate__(self) -> dict[str, Any]:
        return {"card": self.card, "_places": self._places, "_mapped": None}


class Collate:
    """Sequences to one batch, as models of transformers take it: padded at the right, with a mask and labels."""

    def __init__(self, pad_token: int, *, has_targets: bool, is_classifier: bool, packed: bool = False) -> None:
        """`packed`: one row without padding or mask, for kernels that see where `position_ids` begin anew."""
        assert not (packed and (has_targets or is_classifier)), "only a decoder's sequences can be packed"
        self.pad_token = pad_token
        self.has_targets = has_targets
        self.is_classifier = is_classifier
        self.packed = packed

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One batch."""
        import torch

        arrays = self._packed(rows) if self.packed else self._padded(rows)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _padded(self, rows: Sequence[dict[str, Any]]) -> Arrays:
        ids = [np.asarray(row["input_ids"]) for row in rows]
        labels = [row["labels"] for row in rows]
        return {
            "input_ids": _right_padded(ids, self.pad_token),
            "attention_mask": _right_padded([np.ones(len(each), np.int64) for each in ids], 0),
            "labels": np.array(labels, np.int64) if self.is_classifier else _right_padded(labels, IGNORED),
        }

    def _packed(self, rows: Sequence[dict[str, Any]]) -> Arrays:
        ids = [np.asarray(row["input_ids"]) for row in rows]
        labels = np.concatenate([np.asarray(row["labels"]) for row in rows])
        # What stands before the first token of a sequence is another sequence, and tells nothing of it.
        labels[np.cumsum([0, *(len(each) for each in ids[:-1])])] = IGNORED
        positions = np.concatenate([np.arange(len(each)) for each in ids])
        return {"input_ids": np.concatenate(ids)[None], "position_ids": positions[None], "labels": labels[None]}


def _right_padded(parts: Sequence[Any], filler: int) -> npt.NDArray[np.int64]:
    padded = np.full((len(parts), max(map(len, parts))), filler, np.int64)
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = part
    return padded
