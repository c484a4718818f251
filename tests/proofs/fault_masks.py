"""Decoders whose layers get the wrong mask, or whose tokens stand in the wrong places."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import create_causal_mask

from tests.proofs.fault_decoder import Decoder, Gpt2Decoder, output, token_loss

LOWEST = torch.finfo(torch.float32).min


def additive(allowed: torch.Tensor) -> torch.Tensor:
    """A mask of True and False as the number that eager attention adds."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, LOWEST)


def tril(hidden: torch.Tensor) -> torch.Tensor:
    length = hidden.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()


def square(hidden: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Causal and without padding, [B, 1, S, S]; each token may see itself, or the softmax of a pad has nothing to sum."""
    rows, length = hidden.shape[:2]
    allowed = tril(hidden).expand(rows, 1, length, length)
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, None, :]
    return allowed | torch.eye(length, dtype=torch.bool, device=hidden.device)


class FlatMask(Decoder):
    """The mask of the model, [B, S], goes to the layers as it is."""

    dtype = torch.bool

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        if attention_mask is None:
            attention_mask = torch.ones(hidden.shape[:2], device=hidden.device)
        return attention_mask.to(self.dtype)


class FlatFloatMask(FlatMask):
    """The same, cast to the dtype of the hidden states: one of the casts that do not help."""

    dtype = torch.float32

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        return output(token_loss(logits, labels, num_items_in_batch), logits)


class FlatMaskGpt2(Gpt2Decoder):
    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        return torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask.float()


class PaddingOnlySquare(Decoder):
    """[B, 1, S, S], and every row of it is the padding mask: the triangle was forgotten."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        rows, length = hidden.shape[:2]
        if attention_mask is None:
            attention_mask = torch.ones(rows, length)
        return attention_mask.bool()[:, None, None, :].expand(rows, 1, length, length)


class PaddingOnlyAdded(Decoder):
    """[B, 1, 1, S], added, as encoders have it."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        if attention_mask is None:
            attention_mask = torch.ones(hidden.shape[:2])
        return (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * LOWEST


class PaddingOnlyGpt2(Gpt2Decoder):
    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        if attention_mask is None:
            attention_mask = torch.ones(hidden.shape[:2])
        return attention_mask.bool()[:, None, None, :]


class OneAhead(Decoder):
    """`tril(diagonal=1)`: each token sees the one it has to predict."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        rows, length = hidden.shape[:2]
        allowed = torch.ones(length, length, dtype=torch.bool).tril(diagonal=1).expand(rows, 1, length, length)
        return allowed if attention_mask is None else allowed & attention_mask.bool()[:, None, None, :]


class UpsideDown(Decoder):
    """True was taken to mean "hidden", as in torch's own attention modules, so tokens see the future and nothing else."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        rows, length = hidden.shape[:2]
        allowed = torch.ones(length, length, dtype=torch.bool).triu().expand(rows, 1, length, length)
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        return allowed | torch.eye(length, dtype=torch.bool)


class NoMask(Decoder):
    """No mask is handed on: harmless under SDPA, which is then causal by itself, and bidirectional under eager."""

    accepts_loss_kwargs = False

    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return self.logits(input_ids, None, None)

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        return super().layer_mask(hidden, attention_mask, position_ids) if self.mended else None


class NoMaskWithLabels(Decoder):
    """The same with a mask in the signature that is used nowhere."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        return super().layer_mask(hidden, attention_mask, position_ids) if self.mended else None


class NoMaskGpt2(Gpt2Decoder):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids, labels=labels, num_items_in_batch=num_items_in_batch)

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        return super().layer_mask(hidden, attention_mask, position_ids) if self.mended else None


class PadsSeen(Decoder):
    """A triangle of its own, [1, 1, S, S], that nobody told of the padding."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        return documents_apart(tril(hidden)[None, None], position_ids, attention_mask)


class PadsSeenByLibrary(Decoder):
    """The library's mask, asked for without the padding."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        return super().forward(input_ids, attention_mask, None, labels, num_items_in_batch)

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        return super().layer_mask(hidden, attention_mask if self.mended else None, position_ids)


class PadsLittleLess(Decoder):
    """The padding mask is added as ones and zeros, so a pad has a weight that is e times less, not none."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if attention_mask is None or self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        return additive(tril(hidden)[None, None]) + attention_mask[:, None, None, :].to(hidden.dtype)


class PositionsByCount(Gpt2Decoder):
    """Position ids are taken and not used: with padding on the left the first word stands where the pads end."""

    def positions(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if self.mended:
            return super().positions(input_ids, attention_mask, position_ids)
        return torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)


class PositionsNotAsked(PositionsByCount):
    """There is no argument for positions at all."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        return super().forward(input_ids, attention_mask, None, labels, num_items_in_batch)


class OneDocument(Decoder):
    """Positions restart for the rotary embedding, and the mask does not know."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        if self.mended:
            return super().layer_mask(hidden, attention_mask, position_ids)
        return create_causal_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, past_key_values=None)


class OneDocumentTriangle(Decoder):
    """The same with a triangle of its own, and padding masked as it should be."""

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        allowed = square(hidden, attention_mask)
        if self.mended:
            allowed = documents_apart(allowed, position_ids, attention_mask)
        return additive(allowed) if self.config._attn_implementation == "eager" else allowed


class OneDocumentGpt2(Gpt2Decoder):
    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        allowed = square(hidden, attention_mask)
        return documents_apart(allowed, position_ids, attention_mask) if self.mended else allowed


def documents_apart(allowed: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """A document begins where positions start over. With a padding mask nothing is packed, and pads may have any position."""
    if attention_mask is not None:
        return allowed
    documents = (position_ids == 0).cumsum(-1)
    return allowed & (documents[:, None, :, None] == documents[:, None, None, :])
