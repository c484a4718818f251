"""The inputs of the proofs: rows of random tokens, alone, in a batch, padded on either side, packed into one row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from brim.proofs.subject import IGNORED, Subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Side = Literal["right", "left"]


def together(rows: Sequence[torch.Tensor], *, masked: bool = False) -> dict[str, Any]:
    """Rows of one length in one batch; `masked` gives a mask of ones, as collators do."""
    ids = torch.stack(list(rows))
    batch: dict[str, Any] = {"input_ids": ids}
    if masked:
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def padded(
    subject: Subject, rows: Sequence[torch.Tensor], side: Side, *, length: int | None = None, filler: int | None = None
) -> dict[str, Any]:
    """Rows of different lengths in one batch, with the mask; positions count real tokens where the model takes them."""
    length = length or max(len(row) for row in rows)
    ids = torch.full((len(rows), length), subject.pad if filler is None else filler, device=subject.device)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        where = real_tokens(len(row), length, side)
        ids[place, where], mask[place, where] = row, 1
    batch: dict[str, Any] = {"input_ids": ids}
    if subject.takes("attention_mask"):
        batch["attention_mask"] = mask
    if subject.takes("position_ids") and side == "left":
        batch["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return batch


def real_tokens(count: int, length: int, side: Side) -> slice:
    """Where the tokens of a padded row are."""
    return slice(0, count) if side == "right" else slice(length - count, length)


def packed(subject: Subject, rows: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Rows one after another in one row: positions that begin anew say where each begins, and there is no mask."""
    positions = torch.cat([torch.arange(len(row), device=subject.device) for row in rows])
    return {"input_ids": torch.cat(list(rows))[None], "position_ids": positions[None]}


def labelled(subject: Subject, rows: Sequence[torch.Tensor], prompts: Iterable[int], classes: int) -> dict[str, Any]:
    """A training batch: rows padded on the right, and nothing is learnt of padding or of prompts. A prompt has one token at least."""
    batch = padded(subject, rows, "right")
    if len({len(row) for row in rows}) == 1:
        batch.pop("attention_mask", None)
    if subject.kind == "classification":
        whole = torch.stack([row.sum() for row in rows])
        batch["labels"] = whole % classes if classes > 1 else whole.float() / subject.vocabulary
        if getattr(subject.config, "problem_type", None) == "multi_label_classification":
            batch["labels"] = torch.nn.functional.one_hot(whole % classes, classes).float()
        return batch
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        labels[place, prompt : len(row)] = row[prompt:] % classes
    batch["labels"] = labels
    return batch


def items_of(subject: Subject, batch: dict[str, Any]) -> int:
    """What the mean of a loss is taken over."""
    labels: torch.Tensor = batch["labels"]
    return len(labels) if subject.kind == "classification" else int((labels != IGNORED).sum())
