"""The model catalogue: architecture facts of popular models, so that planning needs neither the Hub nor a token for gated ones.

The facts stand in `catalogue/*.toml`, each with its source. A model is named by its short name (`llama-3.1-8b`), its Hub id
(`meta-llama/Llama-3.1-8B`), or the Hub id of a sibling that has exactly the same architecture (an instruct variant).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from brim.printing import Printable

CardTask = Literal["causal-lm", "seq2seq", "masked-lm", "encoder"]


@dataclass(frozen=True, kw_only=True)
class ModelCard(Printable):
    """One model of the catalogue."""

    name: str
    hub_id: str
    class_name: str
    """The transformers class of the model's own task: what its Hub config.json names."""
    task: CardTask
    parameters: int
    """Parameters of that class, tied weights counted once, buffers not counted."""
    published: str
    """The figure as its authors or the Hub publish it."""
    published_source: str
    note: str = ""
    """Why `published` differs from `parameters`, where it does."""
    dtype: str = "float32"
    """Dtype of the published weights."""
    config: dict[str, Any]
    """What its config.json holds of the architecture."""
    aliases: tuple[str, ...] = ()
    same_architecture: tuple[str, ...] = ()
    """Hub ids of other models with exactly these parameters."""
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By Hub id: what a sibling's config.json says otherwise (context, rotary base, dtype); none of it shapes a parameter."""

    @property
    def model_type(self) -> str:
        """The family, as transformers names it."""
        return str(self.config["model_type"])


@cache
def cards() -> tuple[ModelCard, ...]:
    """All models of the catalogue: decoders, then encoder-decoders, then encoders."""
    folder = files("brim.workload").joinpath("catalogue")
    entries: list[dict[str, Any]] = []
    for name in ("decoders.toml", "seq2seq.toml", "encoders.toml"):
        entries += tomllib.loads(folder.joinpath(name).read_text(encoding="utf-8"))["model"]
    return tuple(_card(entry) for entry in entries)


def find_card(name: str) -> ModelCard | None:
    """The catalogue's model of this short name or Hub id, in any case, with the facts of that very sibling; None if unknown."""
    card = _index().get(_key(name))
    if card is None:
        return None
    key = _key(name)
    for hub_id in card.same_architecture:
        if key in {_key(hub_id), _key(hub_id.rpartition("/")[2])} and key not in {_key(card.name), *map(_key, card.aliases)}:
            own = dict(card.differences.get(hub_id, {}))
            return replace(card, hub_id=hub_id, dtype=own.pop("dtype", card.dtype), config={**card.config, **own})
    return card


def nearest_models(name: str) -> tuple[str, ...]:
    """The short names closest to a name that nobody knows, best first."""
    key = _key(name)
    last = key.rpartition("/")[2]
    inside = [known for known in _index() if last and len(last) > 2 and last in known]
    close = get_close_matches(key, _index(), n=6, cutoff=0.55) + get_close_matches(last, _index(), n=6, cutoff=0.55)
    return tuple(dict.fromkeys(_index()[known].name for known in (*close[:3], *inside[:4], *close)))[:5]


@cache
def _index() -> dict[str, ModelCard]:
    index: dict[str, ModelCard] = {}
    for card in cards():
        for name in (card.name, card.hub_id, *card.aliases, *card.same_architecture):
            index.setdefault(_key(name), card)
    # The last part of a Hub id, as people abbreviate it: "Llama-3.1-8B". A short name of another model goes first.
    for card in cards():
        for hub_id in (card.hub_id, *card.same_architecture):
            index.setdefault(_key(hub_id.rpartition("/")[2]), card)
    return index


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _card(entry: dict[str, Any]) -> ModelCard:
    fields = dict(entry)
    fields["class_name"] = fields.pop("class")
    for name in ("aliases", "same_architecture"):
        fields[name] = tuple(fields.get(name, ()))
    return ModelCard(**fields)
