"""A model as people stitch them by hand: pretrained layers, called one after another. Broken as they do it, and mended."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask


class StitchedByHand(nn.Module):
    """Layers of a Llama; the mask that the tokenizer gave goes into every one of them, unless the layers' own is built."""

    def __init__(self, *, is_mended: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97,
            max_position_embeddings=64,
        )  # fmt: skip
        donor: Any = LlamaForCausalLM(self.config)  # type: ignore[no-untyped-call]
        self.embed, self.layers, self.norm, self.rotary = (
            donor.model.embed_tokens, donor.model.layers, donor.model.norm, donor.model.rotary_emb,
        )  # fmt: skip
        self.head = donor.lm_head
        self.is_mended = is_mended

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        mask: Any = attention_mask if attention_mask is not None else torch.ones_like(input_ids)
        if self.is_mended:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=position_ids,
            )
        else:
            mask = mask.bool()
        rotary = self.rotary(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=position_ids)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def broken() -> nn.Module:
    return StitchedByHand(is_mended=False)


def mended() -> nn.Module:
    return StitchedByHand(is_mended=True)
