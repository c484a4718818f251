"""Decoders in which rows of a batch, or calls that follow each other, have something to do with each other; and one that throws dice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from tests.proofs.fault_decoder import VOCABULARY, WIDTH, Decoder, Gpt2Decoder, livened, token_loss


class RowZero(Decoder):
    """`layer(...)[0]`, from the days when a layer returned a tuple, and an `unsqueeze` that made the error go away."""

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        out = super().run_layer(index, hidden, mask, position_ids, rope)
        if self.mended:
            return out
        hidden = out[0]
        return hidden.unsqueeze(0) if hidden.dim() == 2 else hidden


class RowZeroAtTheEnd(Decoder):
    """Only the last layer's answer is unpacked, and the logits have no batch dimension."""

    accepts_loss_kwargs = False

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        out = super().run_layer(index, hidden, mask, position_ids, rope)
        return out if self.mended or index < len(self.layers) - 1 else out[0]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return self.logits(input_ids, attention_mask, None)


class RowZeroSliced(Decoder):
    """`[:1]` keeps the dimension and loses the rows."""

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        out = super().run_layer(index, hidden, mask, position_ids, rope)
        return out if self.mended or index > 0 else out[0:1]


class RowZeroRepeated(Decoder):
    """Row 0, and as many copies of it as there were rows: every shape is right."""

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        out = super().run_layer(index, hidden, mask, position_ids, rope)
        return out if self.mended else out[0].unsqueeze(0).expand(hidden.shape[0], -1, -1)


class RowZeroGpt2(Gpt2Decoder):
    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if self.mended:
            return super().logits(input_ids, attention_mask, position_ids)
        positions = self.positions(input_ids, attention_mask, position_ids)
        hidden = self.wte(input_ids) + self.wpe(positions)
        mask = self.layer_mask(hidden, attention_mask, positions)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=mask)[0][None]
        logits: torch.Tensor = self.head(self.ln_f(hidden))
        return logits


class AlwaysDropout(Decoder):
    """`functional.dropout` is on unless it is told not to be."""

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        hidden = super().run_layer(index, hidden, mask, position_ids, rope)
        return functional.dropout(hidden, 0.1, training=self.training) if self.mended else functional.dropout(hidden, 0.1)


class StubbornDropout(Decoder):
    """A frozen trunk whose adapter was to stay in training mode: `eval()` does not reach its dropout."""

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__(donor, mended)
        self.adapter = livened(nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.eval()

    def train(self, mode: bool = True) -> StubbornDropout:
        super().train(mode)
        if not self.mended:
            self.dropout.train()
        return self

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        hidden = super().run_layer(index, hidden, mask, position_ids, rope)
        adapted: torch.Tensor = hidden + self.adapter(self.dropout(hidden))
        return adapted


class BatchNormBetween(Decoder):
    """BatchNorm over the features between two donors: in training every row and every token moves every other."""

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__(donor, mended)
        self.between: nn.Module = nn.LayerNorm(WIDTH) if mended else nn.BatchNorm1d(WIDTH)

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        hidden = super().run_layer(index, hidden, mask, position_ids, rope)
        if index > 0:
            return hidden
        normed: torch.Tensor = self.between(hidden) if self.mended else self.between(hidden.transpose(1, 2)).transpose(1, 2)
        return normed


class CentredOverRows(Decoder):
    """A normalisation by hand, over dimension 0 where the last was meant."""

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__(donor, mended)
        self.adapter = livened(nn.Linear(WIDTH, WIDTH))

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        hidden = super().run_layer(index, hidden, mask, position_ids, rope)
        over = -1 if self.mended else 0
        centred = hidden - hidden.mean(over, keepdim=True)
        adapted: torch.Tensor = hidden + self.adapter(centred / (centred.pow(2).mean(over, keepdim=True) + 1e-5).sqrt())
        return adapted


class KeptCache(Decoder):
    """One cache for the life of the model: the next call sees the keys of the last."""

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__(donor, mended)
        self.past: Any = None

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if self.mended:
            return super().logits(input_ids, attention_mask, position_ids)
        if self.past is None:
            self.past = DynamicCache(config=self.config)
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            seen = self.past.get_seq_length()
            position_ids = torch.arange(seen, seen + input_ids.shape[1]).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=self.past,
            position_ids=position_ids,
        )
        rope = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rope,
                past_key_values=self.past,
                use_cache=True,
            )
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


class KeptMemory(Decoder):
    """What the last call ended with is remembered and mixed into the next: a memory that nobody resets."""

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__(donor, mended)
        self.memory: torch.Tensor | None = None
        self.recall = livened(nn.Linear(WIDTH, WIDTH))

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if self.mended:
            self.memory = None
        return super().logits(input_ids, attention_mask, position_ids)

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        if index == 0 and self.memory is not None:
            hidden = hidden + self.recall(self.memory)
        hidden = super().run_layer(index, hidden, mask, position_ids, rope)
        if index == 0:
            self.memory = hidden.detach().mean((0, 1))
        return hidden


class SequenceFirst(nn.Module):
    """torch's own encoder without `batch_first`: it takes the rows for the sequence, and its triangle fits, since it is built the same way."""

    def __init__(self, mended: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mended = mended
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=mended)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        length = hidden.shape[1] if self.mended else hidden.shape[0]
        hidden = self.encoder(hidden, mask=nn.Transformer.generate_square_subsequent_mask(length), is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class AdapterAcrossRows(Decoder):
    """An attention adapter between two donors; `batch_first` was forgotten, and no mask was thought to be needed."""

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__(donor, mended)
        self.mixer = livened(nn.MultiheadAttention(WIDTH, 4, batch_first=mended))

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        hidden = super().run_layer(index, hidden, mask, position_ids, rope)
        if index > 0:
            return hidden
        triangle = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1]) if self.mended else None
        mixed: torch.Tensor = self.mixer(hidden, hidden, hidden, attn_mask=triangle, need_weights=False)[0]
        return hidden + mixed

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = None
    ) -> Any:
        logits = self.logits(input_ids, None, None)
        return token_loss(logits, labels, num_items_in_batch), logits


class Experts(nn.Module):
    """Each token goes to one of four experts. With a capacity, tokens that come late in the flattened batch are passed by."""

    def __init__(self, has_capacity: bool) -> None:
        super().__init__()
        self.has_capacity = has_capacity
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        capacity = -(-len(tokens) // len(self.experts)) if self.has_capacity else len(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()[:capacity]
            out = out.index_add(0, mine, weight[mine, None] * expert(tokens[mine]))
        return out.view_as(hidden)


class CrowdedExperts(Decoder):
    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__(donor, mended)
        self.experts = livened(Experts(has_capacity=not mended))

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        hidden = super().run_layer(index, hidden, mask, position_ids, rope)
        mixed: torch.Tensor = hidden + self.experts(hidden)
        return mixed
