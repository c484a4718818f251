"""Rows of token ids, as a loader gives them: the lengths are the data's own, the ids are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from brim.workload.lengths import IntArray

if TYPE_CHECKING:
    from collections.abc import Sequence


_IGNORED = -100


@dataclass(frozen=True)
class TokenRows:
    """A data set that is already tokenised: what `brim train` reads from its memory-mapped file."""

    tokens: IntArray
    targets: IntArray
    vocabulary: int

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(int(self.tokens[index])).remainder_(self.vocabulary)
        target = int(self.targets[index])
        labels = torch.arange(target).remainder_(self.vocabulary) if target else ids.clone()
        return {"input_ids": ids, "labels": labels}

    @staticmethod
    def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Padded to the longest, with a mask."""
        padded = {
            name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
            for name, fill in (("input_ids", 0), ("labels", _IGNORED))
        }
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        mask = torch.arange(padded["input_ids"].shape[1])[None, :] < lengths[:, None]
        return {**padded, "attention_mask": mask.long()}
