"""Decoders whose logits are right and whose loss is not: alone it looks well, and in accumulation the gradient is another."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tests.proofs.fault_decoder import Decoder, output, shifted_losses, token_loss


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What most heads written by hand have: the mean over the labels that are here."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class OwnMeanAnyArguments(Decoder):
    """`**kwargs` promises the trainer a loss over the whole step; what comes is a mean over the micro-batch."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        if labels is None:
            return {"logits": logits}
        if self.mended:
            return {"loss": token_loss(logits, labels, kwargs.get("num_items_in_batch")), "logits": logits}
        return {"loss": mean_loss(logits, labels), "logits": logits}


class OwnMeanNamed(Decoder):
    """`num_items_in_batch` is in the signature and not in the loss."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        if labels is None:
            return logits
        return (token_loss(logits, labels, num_items_in_batch) if self.mended else mean_loss(logits, labels)), logits


class OwnMeanLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A head of one's own on a library model: the forward of the parent, and a loss that was written before the trainer counted."""

    def __init__(self, config: LlamaConfig, mended: bool) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.mended = mended

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        count = kwargs.pop("num_items_in_batch", None)
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        if labels is not None:
            out.loss = token_loss(out.logits, labels, count) if self.mended else mean_loss(out.logits, labels)
        return out


class AveragedTwice(Decoder):
    """A mean, divided once more by the number of items of the step."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        if labels is None or self.mended:
            return output(token_loss(logits, labels, num_items_in_batch), logits)
        loss = mean_loss(logits, labels)
        return output(loss if num_items_in_batch is None else loss / num_items_in_batch, logits)


class Uncounted(Decoder):
    """Takes no number of items, so nobody can tell it how many there are in the step: its twin is the plain `Decoder`, which does."""

    accepts_loss_kwargs = False

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        if labels is None:
            return (logits,)
        return self.reduced(*shifted_losses(logits, labels)), logits

    def reduced(self, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Summed(Uncounted):
    """The sum over the tokens, and nobody divides."""

    def reduced(self, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses.sum()


class RowMeans(Uncounted):
    """Each row has the same weight, however few labels it has."""

    def reduced(self, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (losses.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()


class MeanOverEverything(Uncounted):
    """Positions without a label count as zeros, so a batch with much padding teaches less."""

    def reduced(self, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses.mean()
