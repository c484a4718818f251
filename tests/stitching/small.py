"""Tiny donors of every family, all with the same vocabulary, and what the tests do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from brim.stitching.assembling import assemble
from brim.stitching.model import StitchedModel
from brim.stitching.recipe import Adapter, Piece, Recipe

torch.set_num_threads(1)

VOCABULARY = 97
DEPTH = 3
WINDOW = 4

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "num_hidden_layers": DEPTH, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2,  # so that every layer has a say in tiny models
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _wide(width: int, **more: Any) -> dict[str, Any]:
    return {
        **_COMMON, "hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 2, **more,
    }  # fmt: skip


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_wide(32)),
    "qwen2": lambda: transformers.Qwen2Config(**_wide(48, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "qwen3": lambda: transformers.Qwen3Config(**_wide(32, head_dim=16, tie_word_embeddings=True)),
    "mistral": lambda: transformers.MistralConfig(**_wide(64, sliding_window=WINDOW)),
    "gemma": lambda: transformers.GemmaConfig(**_wide(40, head_dim=16)),
    "gemma2": lambda: transformers.Gemma2Config(
        **_wide(32, head_dim=8, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8)
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**_wide(32, head_dim=8, sliding_window=WINDOW, layer_types=_MIXED)),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_layer=DEPTH, n_embd=32, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2,
    ),
    "glm": lambda: transformers.GlmConfig(**_wide(32, head_dim=8)),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_wide(32)),
    "granite": lambda: transformers.GraniteConfig(
        **_wide(32, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.3)
    ),
    "olmo": lambda: transformers.OlmoConfig(**_wide(32)),
    "olmo2": lambda: transformers.Olmo2Config(**_wide(32)),
    "phi": lambda: transformers.PhiConfig(**_wide(32)),
    "phi3": lambda: transformers.Phi3Config(**_wide(32, sliding_window=WINDOW)),
    "smollm3": lambda: transformers.SmolLM3Config(**_wide(32, no_rope_layers=[1, 0, 1])),
    "stablelm": lambda: transformers.StableLmConfig(**_wide(32)),
    "starcoder2": lambda: transformers.Starcoder2Config(**_wide(32, sliding_window=WINDOW, embedding_dropout=0.1)),
}  # fmt: skip
SLOW = pytest.mark.slow
MAIN = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2")


FEW = ("llama", "qwen2", "gemma2", "gpt2")
"""Those that differ most: sliding layers, capped scores, positions in a table."""


def attentions(family: str) -> tuple[str, ...]:
    """What a family can run on a CPU: transformers gives Gemma 2, whose scores are capped, no sdpa."""
    return ("eager",) if family == "gemma2" else ("sdpa", "eager")


def fresh_donor(family: str, *, attention: str = "sdpa", seed: int = 0, **settings: Any) -> Any:
    """A new model of a family; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    for name, value in settings.items():
        setattr(config, name, value)
    automatic: Any = transformers.AutoModelForCausalLM
    model = automatic.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that are not all ones and zeros
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@cache
def donor(family: str, attention: str = "sdpa") -> Any:
    """A model of a family that is made once; nobody may change it."""
    return fresh_donor(family, attention=attention)


def recipe(*pieces: Piece, donors: tuple[str, ...] = (), **more: Any) -> Recipe:
    names = donors or tuple(dict.fromkeys(piece.donor for piece in pieces))
    return Recipe(donors={name: name for name in names}, pieces=pieces, **more)


def piece(name: str, *layers: int, by: Adapter | str | None = None) -> Piece:
    adapter = Adapter(kind=by) if isinstance(by, str) else by  # type: ignore[arg-type]
    return Piece(donor=name, layers=layers, adapter=adapter)


STITCHES: Mapping[str, Recipe] = {
    "same-family": recipe(piece("llama", 0, 1), piece("llama", 1, 2)),
    "llama-qwen2-linear": recipe(piece("llama", 0, 1), piece("qwen2", 1, 2, by="linear")),
    "gpt2-llama-mlp": recipe(piece("gpt2", 0, 1), piece("llama", 1, by="mlp")),
    "gemma-mistral-low-rank": recipe(piece("gemma", 0, 2), piece("mistral", 0, 2, by="low-rank")),
    "three-donors": recipe(piece("qwen3", 0), piece("mistral", 1, by="mlp"), piece("gemma3_text", 0, 1, by="linear")),
    "back-to-the-first-head": recipe(piece("qwen3", 0), piece("gpt2", 1, by="linear"), piece("qwen3", by="mlp")),
}


def some(*names: str, of: Iterable[str] = STITCHES) -> list[Any]:
    """All of them, of which only these are quick: what one proves, the others prove again."""
    return [pytest.param(name, marks=() if name in names else SLOW) for name in sorted(of)]


def stitched(name: str, attention: str = "sdpa", **more: Any) -> StitchedModel:
    """A new model of one of the stitches, with adapters that have moved a little from where they begin."""
    made = from_recipe(STITCHES[name], attention, **more)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.adapters.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def from_recipe(given: Recipe, attention: str = "sdpa", **more: Any) -> StitchedModel:
    """A new model, of donors that run the same attention."""
    given = replace(given, **{"attention": attention, **more})
    return assemble(given, {name: donor(name, attention) for name in given.donors})


def tokens(rows: int, length: int, seed: int = 3) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(sequences: list[Tensor], *, left: bool) -> tuple[Tensor, Tensor]:
    """Sequences of different length as one batch, and its mask."""
    longest = max(len(one) for one in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(sequences):
        place = slice(longest - len(one), None) if left else slice(len(one))
        ids[row, place], mask[row, place] = one, 1
    return ids, mask


def places(mask: Tensor) -> Tensor:
    """The positions that belong to a mask."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
