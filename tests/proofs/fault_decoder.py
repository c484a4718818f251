"""A decoder written by hand around pretrained layers, right as it stands: each seeded fault changes one of its methods."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

VOCABULARY = 97
WIDTH = 32
SEED = 11

Model = TypeVar("Model", bound=nn.Module)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def livened(model: Model) -> Model:
    """Weights large enough for attention to choose: fresh ones attend to everything alike, and faults hardly show."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.eval()


def donor(kind: str, attention: str, **own: Any) -> Any:
    """A small model of this kind, such as `from_pretrained` gives."""
    config = AutoConfig.for_model(kind, **{**_SIZES, **own})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    return livened(model)


def llama(attention: str) -> Any:
    return donor("llama", attention)


def qwen2(attention: str) -> Any:
    return donor("qwen2", attention)


def mistral(attention: str) -> Any:
    return donor("mistral", attention, sliding_window=None)


def gpt2(attention: str) -> Any:
    return donor("gpt2", attention, bos_token_id=1, eos_token_id=2)


class Decoder(nn.Module):
    """The embedding, layers, norm and head of a donor, called one by one. `mended` says whether the one fault of a subclass is away."""

    # The Trainer gives the count of the step to models that say so or take `**kwargs`; a named argument alone does not count.
    accepts_loss_kwargs = True

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.config = donor.config
        self.embed_tokens = donor.model.embed_tokens
        self.layers = donor.model.layers
        self.norm = donor.model.norm
        self.rotary_emb = donor.model.rotary_emb
        self.lm_head = donor.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        return {"loss": token_loss(logits, labels, num_items_in_batch), "logits": logits}

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        mask = self.layer_mask(hidden, attention_mask, position_ids)
        rope = self.rotary_emb(hidden, position_ids)
        for index in range(len(self.layers)):
            hidden = self.run_layer(index, hidden, mask, position_ids, rope)
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        return create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )

    def run_layer(self, index: int, hidden: torch.Tensor, mask: Any, position_ids: torch.Tensor, rope: Any) -> torch.Tensor:
        out: torch.Tensor = self.layers[index](hidden, attention_mask=mask, position_ids=position_ids, position_embeddings=rope)
        return out


class Gpt2Decoder(nn.Module):
    """The blocks of GPT-2 in a loop: positions are learned and added to the embedding."""

    accepts_loss_kwargs = True

    def __init__(self, donor: Any, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.config = donor.config
        self.wte = donor.transformer.wte
        self.wpe = donor.transformer.wpe
        self.blocks = donor.transformer.h
        self.ln_f = donor.transformer.ln_f
        self.head = donor.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        logits = self.logits(input_ids, attention_mask, position_ids)
        loss = token_loss(logits, labels, num_items_in_batch)
        return logits if loss is None else (loss, logits)

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        positions = self.positions(input_ids, attention_mask, position_ids)
        hidden = self.wte(input_ids) + self.wpe(positions)
        mask = self.layer_mask(hidden, attention_mask, positions)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=mask)
        logits: torch.Tensor = self.head(self.ln_f(hidden))
        return logits

    def positions(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if position_ids is not None:
            return position_ids
        if attention_mask is not None:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)

    def layer_mask(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> Any:
        return create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )


def output(loss: Any, logits: Any) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def token_loss(logits: torch.Tensor, labels: torch.Tensor | None, num_items_in_batch: Any = None) -> torch.Tensor | None:
    """Next-token cross-entropy, over the items of the whole step if their number is said, else over those that are here."""
    if labels is None:
        return None
    losses, targets = shifted_losses(logits, labels)
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / count


def shifted_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each position, zero where there is no label, and the targets: both [rows, positions - 1]."""
    targets = labels[:, 1:]
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    return losses.view(targets.shape), targets
