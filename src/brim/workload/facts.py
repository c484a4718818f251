"""A config.json read by name: the same fact has several names in the wild, and one here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Mapping

# The width of a head in these families where config.json is silent; all others divide the width by the heads.
_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "glm": 128, "glm4": 128, "gpt_oss": 64, "qwen3": 128}

_KV_HEADS_OF_THEIR_OWN = frozenset({"mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "starcoder2", "gpt_oss"})


class Facts:
    """A config.json, read by name. The same fact has several names in the wild (`hidden_size`, `d_model`, `n_embd`)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def size(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """The first of these names that the config holds. A key set to null counts as absent, as in transformers."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(
                    _("The config's {name} should be a whole number, and is {value!r}.").format(name=name, value=value)
                )
            return value
        if default is None:
            text = _("The config of a {model_type!r} model needs {name!r} to count its parameters.")
            raise UsageError(text.format(model_type=self.model_type, name=names[0]))
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """Whether the config says so; `default` where it is silent."""
        value = self._config.get(name)
        if value is not None and not isinstance(value, bool):
            raise UsageError(_("The config's {name} should be true or false, and is {value!r}.").format(name=name, value=value))
        return default if value is None else value

    def words(self, name: str) -> list[str]:
        """A list of words; DeBERTa's config files write it as "c2p|p2c" too."""
        value = self._config.get(name) or []
        return [word.strip().lower() for word in (value.split("|") if isinstance(value, str) else value)]

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers, empty where the config is silent."""
        return list(self._config.get(name) or [])

    @property
    def model_type(self) -> str:
        """The architecture, by transformers' name."""
        return str(self._config.get("model_type"))

    @property
    def width(self) -> int:
        """The width of the hidden state."""
        return self.size("hidden_size", "d_model", "n_embd", "n_embed", "dim")

    @property
    def inner(self) -> int:
        """The width inside the MLP."""
        return self.size("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim")

    @property
    def layers(self) -> int:
        """How many blocks."""
        return self.size("num_hidden_layers", "n_layer", "n_layers", "num_layers")

    @property
    def heads(self) -> int:
        """How many heads ask."""
        heads = self.size("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
        if heads == 0:
            raise UsageError(_("The config says that the model has no attention heads."))
        return heads

    @property
    def kv_heads(self) -> int:
        """How many heads answer: fewer than `heads` where groups of them share keys and values."""
        # In these families transformers has a number of its own for a config.json that is silent; then no formula guesses.
        silent = None if self.model_type in _KV_HEADS_OF_THEIR_OWN else self.heads
        return self.size("num_key_value_heads", default=silent)

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.size("head_dim", default=_HEAD_DIM.get(self.model_type, self.width // self.heads))

    @property
    def vocabulary(self) -> int:
        """How many words the embedding knows."""
        return self.size("vocab_size")

    @property
    def positions(self) -> int:
        """The longest sequence that the model takes."""
        return self.size("max_position_embeddings", "n_positions", "n_ctx")

    @property
    def labels(self) -> int:
        """Classes of a classifier: `num_labels`, or as many as config.json names, or transformers' default."""
        labels = self._config.get("id2label") or {}
        if not isinstance(labels, dict | list):
            raise UsageError(
                _("The config's {name} should be a mapping, and is {value!r}.").format(name="id2label", value=labels)
            )
        named = len(labels)
        return self.size("num_labels", default=named or (3 if self.model_type == "bart" else 2))
