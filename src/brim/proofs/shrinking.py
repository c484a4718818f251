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
from brim.proofs.shrinking_parts import has_parts, shrink_parts
from brim.proofs.shrinking_rules import (
    DEPTHS,
    EXPERT_COUNTS,
    OTHER_DEPTHS,
    POSITION_COUNTS,
    POSITIONS,
    ROTARY,
    VOCABULARY,
    WIDTHS,
    WINDOWS,
    Changes,
    Facts,
    fewer_experts,
    fewer_layers,
    first_count,
    head_width,
    is_count,
    is_token_key,
    narrower,
    present,
    rotary_leaves,
    smaller_rest,
)

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Shrunk:
    """A config that builds a small model of the same architecture."""

    config: dict[str, Any]
    words: str
    """What was cut, for a person; empty if the model was small already and nothing was."""


def shrink(config: Mapping[str, Any]) -> Shrunk:
    """The same architecture with few narrow layers and a small vocabulary."""
    if has_parts(config):
        return Shrunk(*shrink_parts(config, shrink))
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
    for rule in (fewer_layers, narrower, fewer_experts, smaller_rest, _smaller_vocabulary):
        changes |= rule({**facts, **changes})
    changes |= _fewer_positions(facts, {**facts, **changes})
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
        is_derived = key not in given and isinstance(value, list) and len(set(map(str, [*value, *facts[key]]))) == 1
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
    moved = _moved_tokens({**{("", key): value for key, value in facts.items()}, **apart})
    inside = {name: {**changes[name], **{key: value for (part, key), value in moved.items() if part == name}} for name in readers}
    return {key: value for (part, key), value in moved.items() if not part} | inside


def _fewer_positions(facts: Facts, narrow: Facts) -> Changes:
    """Short tables of positions; stretched rotary positions keep the factor by which they are stretched."""
    most = first_count(facts, POSITION_COUNTS)
    leaves = [leaf for key in ROTARY for leaf in rotary_leaves(facts.get(key))]
    original = first_count(next((one for one in [facts, *leaves] if is_count(one.get(_ORIGINAL))), {}), (_ORIGINAL,))
    if most is None or most <= POSITIONS or (original is not None and original <= POSITIONS):
        new = None
    else:
        new = POSITIONS if original is None or original >= most else POSITIONS * most // original
    made: Changes = {key: new for key in present(facts, POSITION_COUNTS) if new is not None and facts[key] > POSITIONS}
    if is_count(facts.get(_ORIGINAL)):
        made[_ORIGINAL] = min(facts[_ORIGINAL], POSITIONS)
    old_head, new_head = head_width(facts), head_width(narrow)
    for key in ROTARY:
        if isinstance(facts.get(key), Mapping) and old_head and new_head:
            made[key] = _smaller_rotary(facts[key], old_head, new_head)
    return made


def _smaller_rotary(value: Mapping[str, Any], old_head: int, new_head: int) -> Changes:
    changed: Changes = {}
    for key, one in value.items():
        if isinstance(one, Mapping):
            changed[key] = _smaller_rotary(one, old_head, new_head)
        elif key == _ORIGINAL and is_count(one):
            changed[key] = min(one, POSITIONS)
        elif key in {"short_factor", "long_factor"} and isinstance(one, list):
            changed[key] = _evenly(one, max(1, len(one) * new_head // old_head))
        elif key == "mrope_section" and isinstance(one, list) and new_head != old_head:
            changed[key] = _smaller_sections(one, sum(one) * new_head // old_head)
        else:
            changed[key] = one
    return changed


def _evenly(values: list[Any], count: int) -> list[Any]:
    """So many of the values, from the first to the last."""
    if count >= len(values):
        return values
    return [values[place * (len(values) - 1) // max(1, count - 1)] for place in range(count)]


def _smaller_sections(sections: list[int], total: int) -> list[int]:
    """The same shares of a smaller whole."""
    smaller = [max(1, section * total // sum(sections)) for section in sections]
    return [*smaller[:-1], max(1, total - sum(smaller[:-1]))]


def _smaller_vocabulary(facts: Facts) -> Changes:
    """Few tokens; ids beyond the last one move below it, and those that differed still differ."""
    vocabularies = [key for key in facts if "vocab_size" in key and is_count(facts[key])]
    changes: Changes = {key: VOCABULARY for key in vocabularies if facts[key] > VOCABULARY}
    return changes | _moved_tokens(facts) if changes else {}


def _moved_tokens(facts: Mapping[Any, Any]) -> dict[Any, Any]:
    """The ids of special tokens, all of them below the small vocabulary's end. Keys may be names, or tuples that end in a name."""
    names = {key: key[-1] if isinstance(key, tuple) else key for key in facts}
    held = {key: value if isinstance(value, list) else [value] for key, value in facts.items() if is_token_key(names[key])}
    ids = list(dict.fromkeys(one for value in held.values() for one in value if isinstance(one, int)))
    free = iter(sorted(set(range(VOCABULARY)) - set(ids), reverse=True))
    place = {one: next(free, VOCABULARY - 1) if one >= VOCABULARY else one for one in ids}
    moved = {key: [place[one] if isinstance(one, int) else one for one in value] for key, value in held.items()}
    return {key: value if isinstance(facts[key], list) else value[0] for key, value in moved.items()}


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
    return ", ".join(cut) or _("smaller in other sizes")
