"""Small models that are as their makers wrote them: no proof may call one wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from tests.proofs.fault_decoder import VOCABULARY, WIDTH, livened

Build = Callable[[], nn.Module]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Healthy:
    """One model that is right."""

    name: str
    build: Build
    passes_all: bool = False
    """Whether each of the five laws applies to it, and holds."""
    known: tuple[tuple[str, str], ...] = ()
    """What is wrong with it in the library itself: the proof, and its word. A proof that says so is right."""


def library(class_name: str, kind: str, attention: str | None, own: dict[str, Any]) -> nn.Module:
    """An untouched model of transformers with fresh weights."""
    config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **own})
    config._attn_implementation = attention
    model: nn.Module = livened(getattr(transformers, class_name)(config))
    return model


def causal(name: str, kind: str, attention: str | None = None, **own: Any) -> Healthy:
    """A causal language model of the library that keeps all five laws."""
    class_name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return Healthy(name, partial(library, class_name, kind, attention, own), passes_all=True)


def packless(name: str, kind: str, known: tuple[tuple[str, str], ...] = (), attention: str | None = None, **own: Any) -> Healthy:
    """One that cannot be packed: it has no positions to restart, or does not look at them (then that is `known`)."""
    return replace(causal(name, kind, attention, **own), passes_all=False, known=known)


def other(name: str, class_name: str, kind: str, **own: Any) -> Healthy:
    """Not a causal language model. None of the heads here counts the items of the step."""
    return Healthy(name, partial(library, class_name, kind, None, own), known=_OWN_MEAN)


_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
_SEQ2SEQ: dict[str, Any] = {"decoder_start_token_id": 0, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2}

# These heads take `**kwargs`, so the Trainer hands them the count of the step, and they take a mean of their own
# (https://github.com/huggingface/transformers/issues/47688).
_OWN_MEAN = (("accumulation", "loss-never-averaged"),)
# These take positions and build their mask without them: packed documents see each other (transformers 5.22, sdpa and eager).
_ONE_DOCUMENT = (("pack", "pack-no-boundaries"),)


class PlainTransformer(nn.Module):
    """torch alone: takes words, gives logits, and knows no mask, no labels and no config."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(128, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        hidden = self.embedding(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        triangle = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        logits: torch.Tensor = self.head(self.encoder(hidden, mask=triangle, is_causal=True))
        return logits


class PlainRecurrent(nn.Module):
    """No attention at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.memory(self.embedding(input_ids))[0])
        return logits


def plain(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().eval()


def with_lora() -> nn.Module:
    """Llama with adapters that do something: as peft makes them they begin as nothing."""
    import peft

    base = library("LlamaForCausalLM", "llama", None, {})
    model: Any = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    found: nn.Module = model.eval()
    return found


CAUSAL = [
    causal("Llama", "llama"),
    causal("Llama, eager", "llama", attention="eager"),
    causal("Mistral, sliding", "mistral", sliding_window=6),
    causal("Mistral, sliding, eager", "mistral", sliding_window=6, attention="eager"),
    causal("Qwen2", "qwen2"),
    causal("Qwen2, eager", "qwen2", attention="eager"),
    causal("Qwen3", "qwen3", head_dim=16),
    causal("Qwen3-MoE", "qwen3_moe", head_dim=16, **_EXPERTS),
    causal("Mixtral", "mixtral", **_EXPERTS),
    causal("Gemma", "gemma", head_dim=16),
    causal("Gemma 2", "gemma2", head_dim=16, sliding_window=6),
    causal("Gemma 3", "gemma3_text", head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    causal("Phi", "phi"),
    causal("Phi-3", "phi3"),
    causal("GPT-2", "gpt2"),
    causal("GPT-2, eager", "gpt2", attention="eager"),
    causal("GPT-NeoX", "gpt_neox"),
    causal("GPT-J", "gptj", rotary_dim=8),
    causal("GPT-Neo", "gpt_neo", attention_types=[[["global", "local"], 1]], window_size=6),
    packless("OPT", "opt", _ONE_DOCUMENT, ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    packless("BLOOM", "bloom"),
    packless("Falcon", "falcon", _ONE_DOCUMENT),
    packless("Falcon, ALiBi", "falcon", _ONE_DOCUMENT, alibi=True),
    packless("MPT", "mpt", d_model=WIDTH, n_heads=4, n_layers=2),
    causal("StableLM", "stablelm"),
    causal("OLMo 2", "olmo2"),
    causal("Starcoder 2", "starcoder2"),
    causal("SmolLM 3", "smollm3"),
    causal("Granite", "granite"),
    causal("Cohere", "cohere"),
    packless("GPT-OSS", "gpt_oss", _ONE_DOCUMENT, "eager", head_dim=16, sliding_window=6, **_EXPERTS),
    causal("Nemotron", "nemotron"),
    causal("GLM-4", "glm4", head_dim=16),
]

OTHERS = [
    other("T5", "T5ForConditionalGeneration", "t5", d_kv=8, d_ff=64, num_layers=2, num_heads=4, **_SEQ2SEQ),
    other("BART", "BartForConditionalGeneration", "bart", encoder_ffn_dim=64, decoder_ffn_dim=64, **_SEQ2SEQ),
    other("BERT, masked", "BertForMaskedLM", "bert"),
    other("RoBERTa, masked", "RobertaForMaskedLM", "roberta", max_position_embeddings=130),
    other("Llama, classifier", "LlamaForSequenceClassification", "llama", num_labels=3),
    other("BERT, classifier", "BertForSequenceClassification", "bert", num_labels=3),
    Healthy("Llama with LoRA", with_lora, passes_all=True),
    Healthy("Transformer in plain torch", partial(plain, PlainTransformer)),
    Healthy("GRU in plain torch", partial(plain, PlainRecurrent)),
]

HEALTHY = [*CAUSAL, *OTHERS]
