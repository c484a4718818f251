import torch
from torch import nn
from transformers import AutoModel


class TruncatedEncoder(nn.Module):
    """The first n layers of a decoder with a pooled output."""

    def __init__(self, name, depth):
        super().__init__()
        base = AutoModel.from_pretrained(name)
        self.embed_tokens = base.embed_tokens
        self.rotary_emb = base.rotary_emb
        self.blocks = base.layers[:depth]
        self.width = base.config.hidden_size

    def forward(self, input_ids, attention_mask):
        h = self.embed_tokens(input_ids)
        position_ids = torch.arange(h.shape[1], device=h.device).unsqueeze(0)
        cos_sin = self.rotary_emb(h, position_ids)
        for block in self.blocks:
            h = block(h, attention_mask, position_ids=position_ids, position_embeddings=cos_sin)  # expect: mask-2d-to-layer
        weights = attention_mask.unsqueeze(-1).to(h.dtype)
        return (h * weights).sum(1) / weights.sum(1)
