"""A small copy of a model that is made of parts, each with a config of its own, joined by adapters (`brim.stitching`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from brim.locale import _
from brim.proofs.shrinking_rules import DEPTHS, POSITION_COUNTS, VOCABULARY, WIDTHS, Facts, first_count, is_count, is_token_key

_MOST_RANK, _MOST_WIDTH = 8, 64


def has_parts(config: Facts) -> bool:
    """Whether this is such a model."""
    parts = config.get("parts")
    return isinstance(parts, list) and bool(parts) and all(isinstance(part, Mapping) and "config" in part for part in parts)


def shrink_parts(config: Facts, shrink: Any) -> tuple[dict[str, Any], str]:
    """Every part on its own, and adapters that meet the new widths; the words are empty if nothing was large."""
    small = copy.deepcopy(dict(config))
    for part in small["parts"]:
        part["config"] = shrink(part["config"]).config
        part["layers"] = part["layers"][: _depth(part["config"])]
    before, after = ([_width(part["config"]) for part in each["parts"]] for each in (config, small))
    if [part["config"] for part in small["parts"]] == [part["config"] for part in config["parts"]]:
        return dict(config), ""
    small["adapters"] = [_fitted(adapter, *widths) for adapter, widths in zip(small["adapters"], _pairs(after), strict=True)]
    small |= _outside(small)
    words = _("{before} to {after} layers, widths {old} to {new}").format(
        before=config["num_hidden_layers"], after=small["num_hidden_layers"], old=_joined(before), new=_joined(after)
    )
    return small, words


def _outside(small: Facts) -> dict[str, Any]:
    """What stands beside the parts and follows from them."""
    configs = [part["config"] for part in small["parts"]]
    last = configs[-1]
    positions = [count for each in configs if (count := first_count(each, POSITION_COUNTS)) is not None]
    facts: dict[str, Any] = {
        "vocab_size": last["vocab_size"],
        "hidden_size": _width(last),
        "num_hidden_layers": sum(_depth(each) for each in configs),
        "num_attention_heads": first_count(last, ("num_attention_heads", "n_head")),
        "max_position_embeddings": min(positions, default=None),
    }
    for key, value in small.items():
        if is_token_key(key) and value is not None:
            facts[key] = [_below(one) for one in value] if isinstance(value, list) else _below(value)
    return facts


def _below(token: Any) -> Any:
    return token % VOCABULARY if is_count(token) else token


def _fitted(adapter: Facts, before: int, after: int) -> dict[str, Any]:
    """The same kind for other widths; where equal widths became different ones, nothing is no longer possible, and linear is next."""
    fitted = {**adapter, "from": before, "to": after}
    if fitted["kind"] == "identity" and before != after:
        fitted["kind"] = "linear"
    for key, most in (("rank", _MOST_RANK), ("width", _MOST_WIDTH)):
        if is_count(fitted.get(key)):
            fitted[key] = min(fitted[key], most)
    return fitted


def _width(config: Facts) -> int:
    return first_count(config, WIDTHS) or 0


def _depth(config: Facts) -> int:
    return next((int(config[key]) for key in DEPTHS if isinstance(config.get(key), int)), 0)


def _pairs(widths: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(widths))


def _joined(widths: list[int]) -> str:
    return ", ".join(map(str, widths))
