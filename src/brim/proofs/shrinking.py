"""A small copy of a big model's config: the same code, the same features, a thousandth of the numbers.

A proof asks whether the code of a model is right, and that does not hang on its size: a 70B model with two narrow layers runs through
the same lines as the whole one, in milliseconds and without its weights. What must stay is what chooses those lines: the kinds of
layers, the ratio of query to key heads, windows that the tokens reach past, scaled rotary positions, experts, tied weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim.locale import _
from brim.proofs.shrinking_rules import (
    DEPTHS,
    EXPERT_COUNTS,
    OTHER_DEPTHS,
    ROTARY,
    WIDTHS,
    WINDOWS,
    Changes,
    Facts,
    fewer_experts,
    fewer_layers,
    fewer_positions,
    first_count,
    is_count,
    is_token_key,
    moved_tokens,
    narrower,
    smaller_rest,
    smaller_vocabulary,
)


@dataclass(frozen=True)
class Shrunk:
    """A config that builds a small model of the same architecture."""

    config: dict[str, Any]
    words: str
    """What was cut, for a person; empty if the model was small already and nothing was."""


def shrink(config: Mapping[str, Any]) -> Shrunk:
    """The same architecture with few narrow layers and a small vocabulary."""
    given = copy.deepcopy(dict(config))
    facts = _facts(given)
    changes = _changes(facts)
    small = _overlaid(given, facts, changes)
    return Shrunk(given, "") if small == given else Shrunk(small, _words(facts, {**facts, **changes}))


def _facts(given: Facts) -> Facts:
    """What the config says, and what its class makes of what it leaves out: defaults are as big as what is written."""
    import transformers

    try:
        whole = transformers.AutoConfig.for_model(**copy.deepcopy(dict(given))).to_dict()
    except Exception:  # noqa: BLE001 (a family that transformers does not have, or does not take like this: what is written counts)
        return given
    return {**whole, **{key: value for key, value in given.items() if value is not None}}


def _changes(facts: Facts) -> Changes:
    changes: Changes = {}
    for rule in (fewer_layers, narrower, fewer_experts, smaller_rest, smaller_vocabulary):
        changes |= rule({**facts, **changes})
    changes |= fewer_positions(facts, {**facts, **changes})
    parts = _parts(facts)
    for name in parts:
        changes[name] = _overlaid(facts[name], facts[name], _changes(facts[name]))
    return changes | _tokens_of_all(facts, changes, parts) if parts else changes


def _parts(facts: Facts) -> list[str]:
    """The models inside the model: `text_config`, the two halves of an encoder-decoder."""
    inner = {name: value for name, value in facts.items() if isinstance(value, Mapping)}
    return [name for name, value in inner.items() if first_count(value, WIDTHS + DEPTHS) is not None or _parts(value)]


def _overlaid(given: Facts, facts: Facts, changes: Facts) -> dict[str, Any]:
    """The config as it was written, with what changed; what its class would derive by itself stays unwritten."""
    small = dict(given)
    for key, value in changes.items():
        if value == facts[key] or key.startswith("_"):
            continue
        is_derived = key not in given and isinstance(value, list) and len(set(map(str, value))) == 1 and not is_token_key(key)
        is_said_otherwise = key in ROTARY and key not in given and any(given.get(other) is not None for other in ROTARY)
        if not is_derived and not is_said_otherwise:
            small[key] = value
    return small


def _tokens_of_all(facts: Facts, changes: Facts, parts: list[str]) -> Changes:
    """Ids of tokens stand beside the part that has the vocabulary and inside it, and mean the same in both places."""
    readers = [name for name in parts if changes[name].get("vocab_size") != facts[name].get("vocab_size")]
    if not readers:
        return {}
    apart = {(name, key): value for name in readers for key, value in facts[name].items()}
    moved = moved_tokens({**{("", key): value for key, value in facts.items()}, **apart})
    inside = {name: {**changes[name], **{key: value for (part, key), value in moved.items() if part == name}} for name in readers}
    return {key: value for (part, key), value in moved.items() if not part} | inside


def _depth(facts: Facts) -> str:
    """Layers; those of an encoder and of a decoder apart."""
    said = {key: facts[key] for key in DEPTHS + OTHER_DEPTHS if is_count(facts.get(key))}
    halves = [str(value) for key, value in said.items() if key in OTHER_DEPTHS]
    alone = [str(value) for key, value in said.items() if key in DEPTHS][:1]
    return " + ".join(halves if len(halves) > 1 else alone + halves)


def _words(before: Facts, after: Facts) -> str:
    if first_count(before, WIDTHS) is None and _parts(before):
        readers = [name for name in _parts(before) if "vocab_size" in before[name]]
        name = (readers or _parts(before))[0]
        return _words(before[name], {**before[name], **after[name]})
    named = (
        (_("{before} to {after} layers"), _depth(before), _depth(after)),
        (_("width {before} to {after}"), first_count(before, WIDTHS), first_count(after, WIDTHS)),
        (_("vocabulary {before} to {after}"), before.get("vocab_size"), after.get("vocab_size")),
        (_("{before} to {after} experts"), first_count(before, EXPERT_COUNTS), first_count(after, EXPERT_COUNTS)),
        (_("window {before} to {after}"), first_count(before, WINDOWS), first_count(after, WINDOWS)),
    )
    cut = [text.format(before=old, after=new) for text, old, new in named if old != new]
    return ", ".join(cut) or _("smaller in sizes that are rarely named")
