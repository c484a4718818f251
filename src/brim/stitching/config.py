"""The config of a stitched model: everything that its donors knew of themselves, so that it loads without them."""

from __future__ import annotations

from typing import Any, Final

from transformers import PretrainedConfig

# Typed as of one release of transformers; several are supported.
_Config: Any = PretrainedConfig

MODEL_TYPE: Final = "brim_stitched"


class StitchedConfig(_Config):  # type: ignore[misc]
    """Parts, adapters and what trains, as plain data; besides them what tools look for in any config."""

    model_type = MODEL_TYPE

    parts: Any = None
    """Of each piece: `donor` (its name in the recipe), `class_name`, `layers` (their numbers there), `config` (cut to them)."""
    adapters: Any = None
    """Between each part and the next: `kind`, `from` and `to` (widths), and `rank` or `width`."""
    trains: Any = None
    vocabulary: str = "same"

    vocab_size: int = 0
    hidden_size: int = 0
    """Of the last part: that of the hidden states which meet the head."""
    num_hidden_layers: int = 0
    """Of all parts together."""
    num_attention_heads: int = 0
    """Of the last part."""
    max_position_embeddings: int | None = None
    """The fewest that any part knows."""
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
