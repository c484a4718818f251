"""What the scripts share: a small model of tokens, and rows that are the same every time."""

# mypy: ignore-errors

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 40
torch.set_num_threads(1)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.dropout(self.embedding(input_ids))
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return self.head(hidden)


def rows(count: int, length: int = 6) -> torch.Tensor:
    return torch.arange(count * length).reshape(count, length) % VOCABULARY


def loss_of(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), input_ids[:, 1:].reshape(-1))
