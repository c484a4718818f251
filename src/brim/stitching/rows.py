"""What a stitched model is trained on: rows of tokens, made of texts where a tokenizer is there, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from brim.errors import UsageError
from brim.locale import _
from brim.step.micro import IGNORED
from brim.stitching.tokens import checked_lengths, packed_rows

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rows:
    """Numbered items with `input_ids`, and how long each is."""

    data: Any
    lengths: Any
    real_lengths: Any
    """Without the padding that a row brought along."""


@dataclass(frozen=True)
class Pad:
    """Rows as one batch: filled up on the right, masked there, and with labels that are the tokens where a row has none of its own.

    Padding that a row brings along is no token to learn.
    """

    token: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch."""
        ids = [_tensor(row["input_ids"]) for row in rows]
        given = [row.get("attention_mask") for row in rows]
        masks = [torch.ones_like(own) if mask is None else _tensor(mask) for own, mask in zip(ids, given, strict=True)]
        labels = [
            own.masked_fill(mask == 0, IGNORED) if row.get("labels") is None else _tensor(row["labels"])
            for own, mask, row in zip(ids, masks, rows, strict=True)
        ]
        return {"input_ids": _joined(ids, self.token), "attention_mask": _joined(masks, 0), "labels": _joined(labels, IGNORED)}


def _tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.long)


def _joined(rows: list[torch.Tensor], filler: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)


def rows_of(dataset: Any, tokenizer: Any, *, positions: int | None, vocabulary: int, say: Say) -> Rows:
    """Any of the usual kinds of data: `datasets.Dataset`, a torch Dataset, a list of rows or of texts."""
    if isinstance(dataset, str | bytes | Mapping):
        text = _("The training data is {kind}, and a list of rows or a data set is needed.")
        hint = _("Rows of a file: datasets.load_dataset('json', data_files=...)['train'].")
        raise UsageError(text.format(kind=type(dataset).__name__), hint=hint)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            _("A data set that can only be iterated has no order that could be promised."),
            hint=_("Give a data set with a length and numbered items, such as a datasets.Dataset or a list."),
        )
    if not len(dataset):
        raise UsageError(_("The training data is empty."))
    if _is_text(dataset[0]):
        data = _tokenised(dataset, tokenizer, positions, say)
        _refuse_foreign_tokens(data, vocabulary)
        lengths = np.array([len(row["input_ids"]) for row in data])
        return Rows(data, lengths, lengths)
    lengths, real_lengths = checked_lengths(dataset, vocabulary)
    _refuse_impossible_lengths(lengths, positions)
    return Rows(dataset, lengths, real_lengths)


def _is_text(item: Any) -> bool:
    """Whether rows are texts; an error where they are neither texts nor tokens."""
    if isinstance(item, str):
        return True
    if isinstance(item, Mapping):
        if "position_ids" in item:
            raise packed_rows()
        if "input_ids" in item:
            return False
        if isinstance(item.get("text"), str):
            return True
        found = ", ".join(map(str, item)) or _("nothing")
    else:
        found = type(item).__name__
    raise UsageError(
        _("A row of the training data has neither input_ids nor text; it has: {found}.").format(found=found),
        hint=_("Give rows like {tokens}, or {text} with a tokenizer.").format(
            tokens="{'input_ids': [...], 'labels': [...]}", text="{'text': '...'}"
        ),
    )


def _tokenised(dataset: Any, tokenizer: Any, positions: int | None, say: Say) -> list[dict[str, list[int]]]:
    """Texts as tokens, cut to the positions that the model has; texts without any token are left out."""
    if tokenizer is None:
        text = _("The training data is text, and there is no tokenizer.")
        raise UsageError(text, hint=_("Give one: StitchLLM(model, dataset, tokenizer), or rows with input_ids."))
    found: list[list[int]] = []
    for place in range(len(dataset)):
        item = dataset[place]
        words = item.get("text") if isinstance(item, Mapping) else item
        if not isinstance(words, str):
            raise UsageError(_("Row {place} of the training data has no text.").format(place=place))
        found.append(list(tokenizer(words, verbose=False)["input_ids"]))
    cut = 0 if positions is None else sum(len(ids) > positions for ids in found)
    if cut:
        text = _("{cut} of {count} texts are longer than the {positions} positions of the model, and were cut there.")
        say(text.format(cut=cut, count=len(found), positions=positions))
    filled = [{"input_ids": ids[:positions]} for ids in found if ids]
    if len(filled) < len(found):
        say(
            _("{empty} of {count} texts have no token, and were left out.").format(
                empty=len(found) - len(filled), count=len(found)
            )
        )
    if not filled:
        raise UsageError(_("The training data is empty."))
    return filled


def _refuse_foreign_tokens(rows: list[dict[str, list[int]]], vocabulary: int) -> None:
    highest = max(max(row["input_ids"]) for row in rows)
    if highest >= vocabulary:
        text = _("The tokenizer gives the token {token}, and the model has {count} tokens: it is another model's tokenizer.")
        raise UsageError(text.format(token=highest, count=vocabulary), hint=_("Take the tokenizer of the first donor."))


def _refuse_impossible_lengths(lengths: Any, positions: int | None) -> None:
    if positions is not None and np.max(lengths) > positions:
        text = _("{count} rows are longer than the {positions} positions of the model; the longest has {longest} tokens.")
        raise UsageError(
            text.format(count=int(np.sum(lengths > positions)), positions=positions, longest=int(np.max(lengths))),
            hint=_("Cut them to {positions} tokens.").format(positions=positions),
        )
