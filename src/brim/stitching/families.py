"""Where a family of models keeps its layers, its final norm and its positions, and what of its config belongs to single layers.

A family stands in this table once a stitch of one of its models with itself has given the logits of the original; whatever else there
is in transformers is refused, because a layer may depend on things that only its own model knows: its number, a router shared with
other layers, an embedding that enters every layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from brim.errors import UnsupportedError
from brim.locale import _

_PER_LAYER: Final = ("layer_types", "no_rope_layers")
"""What a config says of each layer, in a list."""
_OF_A_CHECKPOINT: Final = (
    "architectures",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
)
"""What a config says of the file that it came from, and not of the model."""

TOKEN_IDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names that one family gives to its parts, below its backbone."""

    layers: str = "layers"
    norm: str = "norm"
    positions: str | None = None
    """A table of positions that is added to the embedding."""
    dropout: str | None = None
    """The dropout between the embedding and the first layer."""
    not_again: Mapping[str, float] = field(default_factory=dict)
    """What the config does to an embedding inside the backbone, and the value with which it does nothing."""
    forbidden: tuple[str, ...] = ()
    """Settings that make a layer depend on more than it is handed: its own number, an encoder."""


FAMILIES: Final[Mapping[str, Family]] = {
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(),
    "glm": Family(),
    "gpt2": Family(
        layers="h", norm="ln_f", positions="wpe", dropout="drop",
        forbidden=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    ),
    "gpt_neox": Family(norm="final_layer_norm", dropout="emb_dropout"),
    "granite": Family(not_again={"embedding_multiplier": 1.0}),
    "llama": Family(),
    "mistral": Family(),
    "olmo": Family(),
    "olmo2": Family(),
    "phi": Family(norm="final_layernorm", dropout="embed_dropout"),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "smollm3": Family(),
    "stablelm": Family(),
    "starcoder2": Family(not_again={"embedding_dropout": 0.0}),
}  # fmt: skip


def family_of(config: Any, donor: str) -> Family:
    """The family of a donor's config; an error in words where its layers cannot be taken out of it."""
    kind = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            _("Donor {donor} ({kind}) has an encoder and a decoder; only decoders can be stitched.").format(
                donor=donor, kind=kind
            )
        )
    if kind not in FAMILIES:
        raise UnsupportedError(
            _("Donor {donor} is a {kind} model, and layers of that family cannot be stitched yet.").format(
                donor=donor, kind=kind
            ),
            hint=_("These families can: {names}.").format(names=", ".join(sorted(FAMILIES))),
        )
    family = FAMILIES[kind]
    for setting in _hindrances(config, family):
        text = _("Donor {donor}: its config has {setting}, so its layers do not do elsewhere what they do there.")
        raise UnsupportedError(text.format(donor=donor, setting=setting))
    return family


def _hindrances(config: Any, family: Family) -> list[str]:
    """Settings under which a layer is not what it was once it is moved, or is no causal layer at all."""
    settings = [name for name in (*family.forbidden, "use_bidirectional_attention") if getattr(config, name, False)]
    if getattr(config, "is_causal", True) is False:
        settings.append("is_causal: false")
    if getattr(config, "quantization_config", None):
        settings.append("quantization_config")
    if getattr(config, "is_heterogeneous", False):
        settings.append("per_layer_config")
    return settings


def cut_config(config: Any, family: Family, layers: Sequence[int], *, is_first: bool, vocab_size: int) -> dict[str, Any]:
    """The config of a piece: that of its donor with the chosen layers only, numbered from 0.

    It never ties head and embedding: whether those of the whole are one is said by the whole.
    """
    facts: dict[str, Any] = copy.deepcopy(config.to_dict())
    depth = int(config.num_hidden_layers)
    for name in _OF_A_CHECKPOINT:
        facts.pop(name, None)
    for name in _PER_LAYER:
        values = facts.get(name)
        if isinstance(values, list) and len(values) == depth:
            facts[name] = [values[number] for number in layers]
    if not is_first:
        facts.update({name: nothing for name, nothing in family.not_again.items() if name in facts})
    facts[depth_key(config)] = len(layers)
    facts["vocab_size"] = vocab_size
    facts["tie_word_embeddings"] = False
    for name in TOKEN_IDS:
        if name in facts:
            facts[name] = token_within(facts[name], vocab_size)
    return facts


def token_within(token: Any, rows: int) -> Any:
    """A special token, or several, as far as they have a row in a table of this length: an embedding would look for others in vain."""
    if isinstance(token, list):
        return [one for one in token if 0 <= one < rows] or None
    return token if token is not None and 0 <= token < rows else None


def depth_key(config: Any) -> str:
    """What this config calls the number of its layers."""
    return str(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))


def join_per_layer(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The per-layer lists of several pieces, one after the other."""
    names = [name for name in _PER_LAYER if all(isinstance(one.get(name), list) for one in configs)]
    return {name: [value for one in configs for value in one[name]] for name in names}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], family: Family) -> list[str]:
    """The settings in which two pieces of a family differ, besides which layers they have and whether they embed."""
    ignored = {*_PER_LAYER, *family.not_again, "num_hidden_layers", "n_layer", "vocab_size", *TOKEN_IDS}
    names = sorted((one.keys() | other.keys()) - ignored)
    return [name for name in names if one.get(name) != other.get(name)]
