"""How the numbers of a config are made small without becoming another architecture.

Every rule takes the facts of the whole model and gives the values that change. A rule goes by the names of the keys: families name
the same thing in few ways, and a family that nobody has seen yet mostly uses one of them. What is small already stays as it is, so
shrinking twice is shrinking once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

Facts = Mapping[str, Any]
Changes = dict[str, Any]

WIDEST = 128
"""A hidden width up to this stays."""
NARROWEST = 32
WIDEST_HEAD = 32
WIDEST_INNER = 256
DEEPEST = 4
VOCABULARY = 256
WINDOW = 8
"""Short enough that a proof's few tokens reach past it."""
POSITIONS = 128
EXPERTS = 4
ACTIVE_EXPERTS = 2

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
OTHER_DEPTHS = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim", "dim", "model_dim")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
    "encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "dim_head", "d_head")
INNER_WIDTHS = (
    "intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "n_inner", "d_ff", "dff", "dim_ff", "d_inner",
    "encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size", "dense_intermediate_size", "feed_forward_size",
)  # fmt: skip
# Widths that equal the hidden one in most models and are narrower in a few (OPT-350m, ALBERT, ELECTRA small).
WIDTHS_BESIDE = (
    "word_embed_proj_dim", "embedding_size", "input_embedding_size", "output_embedding_size", "pooler_hidden_size",
    "attention_hidden_size", "hidden_size_per_layer_input", "lru_width", "d_embed",
)  # fmt: skip
PARTIAL = ("partial_rotary_factor", "rotary_pct")
POSITION_COUNTS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length", "model_max_length",
    "max_encoder_position_embeddings", "max_decoder_position_embeddings",
)  # fmt: skip
WINDOWS = (
    "sliding_window", "sliding_window_size", "window_size", "local_attention", "attention_window", "attention_window_size",
    "attention_chunk_size",
)  # fmt: skip
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_COUNTS = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "num_selected_experts",
)  # fmt: skip
# Latent attention (DeepSeek): the widths are independent of each other and of the heads.
LATENT_WIDTHS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
# What has no relation to anything else that is cut.
CAPS = {
    "position_buckets": 16, "num_hidden_groups": 2, "num_nextn_predict_layers": 1, "n_shared_experts": 2, "num_shared_experts": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8,
    "mamba_d_head": 8, "mamba_head_dim": 8, "n_groups": 1, "mamba_n_groups": 1, "mamba_chunk_size": 8, "chunk_size": 8,
    "mamba_dt_rank": 8, "time_step_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "laurel_rank": 8, "zero_expert_num": 2,
    "linear_head_dim": 16, "linear_num_heads": 4, "o_lora_rank": 16,
}  # fmt: skip
# The first so many layers are of one kind and the rest of another.
LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
# Every so many layers one is of another kind; where an offset says which, it is the second name.
PERIODS = {
    "decoder_sparse_step": "", "sliding_window_pattern": "", "global_attn_every_n_layers": "", "no_rope_layer_interval": "",
    "interleave_moe_layer_step": "", "moe_layer_interval": "", "full_attention_interval": "", "layer_group_size": "",
    "attn_layer_period": "attn_layer_offset", "expert_layer_period": "expert_layer_offset",
}  # fmt: skip
ROTARY = ("rope_scaling", "rope_parameters")


def is_count(value: object) -> bool:
    """A number of things, of which there is at least one."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def first_count(facts: Facts, keys: Iterable[str]) -> int | None:
    """The first of these keys that holds a number."""
    return next((int(facts[key]) for key in keys if is_count(facts.get(key))), None)


def present(facts: Facts, keys: Iterable[str]) -> list[str]:
    """Those of the keys that hold a number."""
    return [key for key in keys if is_count(facts.get(key))]


def is_token_key(key: str) -> bool:
    """A key that holds ids of tokens."""
    return key.endswith(("token_id", "token_ids", "token_index", "suppress_tokens"))


def fewer_layers(facts: Facts) -> Changes:
    """As many layers as show every kind at least once, and two at the least."""
    changes: Changes = {key: 2 for key in present(facts, OTHER_DEPTHS) if facts[key] > DEEPEST}
    depth = first_count(facts, DEPTHS)
    if depth is None or depth <= DEEPEST:
        return changes
    lists = {key: value for key, value in facts.items() if _is_per_layer(key, value, depth)}
    indices = {key: value for key, value in facts.items() if _is_index_list(key, value, depth)}
    exceptions = {key: _by_number(value) for key, value in facts.items() if _is_by_layer_number(value)}
    leading = {key: facts[key] for key in present(facts, LEADING) if facts[key] < depth}
    pattern = _spelt_out(facts.get("attention_types"))
    features = [value for value in lists.values() if len(set(map(str, value))) <= DEEPEST]
    features += [[layer in value for layer in range(depth)] for value in indices.values()]
    features += [[value.get(layer) for layer in range(depth)] for value in exceptions.values()]
    features += [[layer < value for layer in range(depth)] for value in leading.values()]
    features += [pattern] if len(pattern) == depth else []
    kept = _kept_layers(facts, depth, features)

    changes |= {key: len(kept) for key in present(facts, DEPTHS) if facts[key] == depth}
    changes |= {key: [value[layer] for layer in kept] for key, value in lists.items()}
    changes |= {key: [new for new, layer in enumerate(kept) if layer in value] for key, value in indices.items()}
    changes |= {key: sum(layer < value for layer in kept) for key, value in leading.items()}
    for key, own in exceptions.items():
        changes[key] = {str(new): own[layer] for new, layer in enumerate(kept) if layer in own}
    if len(pattern) == depth:
        changes["attention_types"] = [[[pattern[layer] for layer in kept], 1]]
    if is_count(facts.get("num_kv_shared_layers")):
        changes["num_kv_shared_layers"] = len(kept) // 2
    if is_count(facts.get("moe_layer_end_index")):
        changes["moe_layer_end_index"] = len(kept) - 1
    return changes | _periods(facts)


def _kept_layers(facts: Facts, depth: int, features: list[list[Any]]) -> list[int]:
    """The first layer of every kind, in their order."""
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(str([feature[layer] for feature in features]), layer)
    kept = list(kinds.values())
    if is_count(facts.get("num_kv_shared_layers")):
        # The last layers take the keys of earlier ones of their kind, so every kind comes twice.
        return kept * 2
    least = max([2, *(value for key, value in _periods(facts).items() if key in PERIODS)])
    missing = [layer for layer in range(depth) if layer not in kept][: max(0, least - len(kept))]
    return sorted(kept + missing)


def _periods(facts: Facts) -> Changes:
    changes: Changes = {}
    for key, offset in PERIODS.items():
        if not is_count(facts.get(key)) or facts[key] == 1:
            continue
        has_offset = isinstance(facts.get(offset), int)
        changes[key] = min(facts[key], DEEPEST) if has_offset else 2
        if has_offset:
            changes[offset] = facts[offset] % changes[key]
    return changes


def _is_per_layer(key: str, value: object, depth: int) -> bool:
    return (
        isinstance(value, list) and len(value) == depth
        and not _is_index_list(key, value, depth) and not is_token_key(key) and not any(isinstance(one, dict) for one in value)
    )  # fmt: skip


def _is_index_list(key: str, value: object, depth: int) -> bool:
    """Layers named by their numbers: `mlp_only_layers: [0, 4]`."""
    if not isinstance(value, list) or not key.endswith(("layers", "layer_ids", "_idxs", "_indices")):
        return False
    return all(isinstance(one, int) and 0 <= one < depth for one in value) and value == sorted(set(value))


def _is_by_layer_number(value: object) -> bool:
    """What single layers have of their own: `per_layer_config: {"05": {"head_dim": 512}}`."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(str(key).isdigit() and isinstance(one, Mapping) for key, one in value.items())
    )


def _by_number(value: Mapping[Any, Any]) -> dict[int, Any]:
    return {int(key): one for key, one in value.items()}


def _spelt_out(attention_types: object) -> list[str]:
    """GPT-Neo writes its pattern as [[[kinds], times], ...]."""
    is_known = isinstance(attention_types, list) and all(
        isinstance(one, list | tuple) and [type(part) for part in one] == [list, int] for one in attention_types
    )
    if not isinstance(attention_types, list) or not is_known:
        return []
    return [kind for kinds, times in attention_types for _ in range(times) for kind in kinds]


def fewer_heads(heads: int, key_heads: int) -> tuple[int, int]:
    """The smallest pair in the same ratio that still has several of each, if there were several."""
    if heads == key_heads:
        return min(heads, 4), min(heads, 4)
    common = gcd(heads, key_heads)
    least = 2 if common > 1 and key_heads == common else 1
    return least * heads // common, least * key_heads // common


def narrower(facts: Facts) -> Changes:
    """Heads, their width, the hidden width, and what follows from them: one decision, because they must agree."""
    width, heads = first_count(facts, WIDTHS), first_count(facts, HEADS)
    if width is None:
        return {}
    changes: Changes = {}
    if heads is not None and not _is_narrow(facts, width):
        changes = _latent(facts, width, heads) if "kv_lora_rank" in facts else _heads_and_width(facts, width, heads)
    elif heads is None and width > WIDEST:
        changes = dict.fromkeys(present(facts, WIDTHS), 64)
    new_width = first_count({**facts, **changes}, WIDTHS)
    assert new_width is not None
    return changes | _inner_widths(facts, new_width) | _beside(facts, width, new_width)


def head_width(facts: Facts) -> int | None:
    """Numbers of one head: as the config says, or its share of the hidden width."""
    width, heads = first_count(facts, WIDTHS), first_count(facts, HEADS)
    said = first_count(facts, HEAD_WIDTHS)
    return said if said is not None or not width or not heads else max(1, width // heads)


def _is_narrow(facts: Facts, width: int) -> bool:
    latent_is_narrow = all(facts[key] <= most for key, most in LATENT_WIDTHS.items() if is_count(facts.get(key)))
    return width <= WIDEST and (head_width(facts) or 1) <= WIDEST_HEAD and latent_is_narrow


def _heads_and_width(facts: Facts, width: int, heads: int) -> Changes:
    key_heads = first_count(facts, KEY_HEADS) or heads
    old_head = head_width(facts) or 1
    new_heads, new_key_heads = fewer_heads(heads, key_heads)
    new_head = _new_head_width(facts, old_head, 16 if new_heads <= DEEPEST * 2 else 8)
    new_width = _new_width(width, heads * old_head, new_heads, new_heads * new_head)
    changes: Changes = {key: _in_proportion(facts[key], heads, new_heads) for key in present(facts, HEADS)}
    changes |= dict.fromkeys(present(facts, KEY_HEADS), new_key_heads)
    changes |= dict.fromkeys(present(facts, HEAD_WIDTHS), new_head)
    changes |= dict.fromkeys((key for key in present(facts, WIDTHS) if facts[key] == width), new_width)
    changes |= {key: _narrower_layers(facts[key], old_head, new_head) for key in facts if _is_by_layer_number(facts[key])}
    return changes | _by_head_width(facts, old_head, new_head)


def _narrower_layers(layers: Mapping[str, Any], old_head: int, new_head: int) -> Changes:
    return {
        number: {
            **own,
            **{key: own[key] * new_head // old_head for key in present(own, HEAD_WIDTHS)},
            **{key: min(own[key], WINDOW) for key in present(own, WINDOWS)},
        }
        for number, own in layers.items()
    }


def _in_proportion(value: int, old: int, new: int) -> int:
    return max(1, value * new // old) if value * new % old == 0 else new


def _new_head_width(facts: Facts, old: int, wished: int) -> int:
    """Narrow, and such that the part that is rotated stays a part and is even."""
    factors = _partial_factors(facts)

    def is_fitting(wide: int) -> bool:
        rotated = [int(wide * factor) for factor in factors]
        return all(part >= 2 and part % 2 == 0 for part in rotated)

    return next((wide for wide in (wished, 16, 24, 32, 40) if wide <= old and is_fitting(wide)), old)


def _partial_factors(facts: Facts) -> list[float]:
    places = [facts, *(leaf for key in ROTARY for leaf in rotary_leaves(facts.get(key)))]
    return [float(place[key]) for place in places for key in PARTIAL if isinstance(place.get(key), int | float)]


def _new_width(width: int, heads_width: int, new_heads: int, new_heads_width: int) -> int:
    """As wide as all heads together where it was, and otherwise not, by about as much, and in whole heads."""
    if width == heads_width:
        return new_heads_width
    least, most = -(-NARROWEST // new_heads), max(1, WIDEST // new_heads)
    parts = max(least, min(round(new_heads_width * width / heads_width / new_heads), most))
    if parts * new_heads == new_heads_width:
        parts += 1 if width > heads_width and (parts + 1) * new_heads <= WIDEST else -1
    even = parts + parts * new_heads % 2
    return max(even, 2) * new_heads


def _by_head_width(facts: Facts, old: int, new: int) -> Changes:
    """Numbers that are the width of a head in another form."""
    changes: Changes = {}
    if is_count(facts.get("rotary_dim")):
        changes["rotary_dim"] = max(2, facts["rotary_dim"] * new // old // 2 * 2)
    if is_count(facts.get("query_pre_attn_scalar")):
        changes["query_pre_attn_scalar"] = max(1, facts["query_pre_attn_scalar"] * new // old)
    if isinstance(facts.get("attention_multiplier"), float):
        changes["attention_multiplier"] = facts["attention_multiplier"] * old / new
    return changes


def _latent(facts: Facts, width: int, heads: int) -> Changes:
    new_heads, _same = fewer_heads(heads, heads)
    changes: Changes = {key: _in_proportion(facts[key], heads, new_heads) for key in present(facts, HEADS + KEY_HEADS)}
    changes |= {key: min(facts[key], most) for key, most in LATENT_WIDTHS.items() if is_count(facts.get(key))}
    parts = present(facts, ("qk_nope_head_dim", "qk_rope_head_dim"))
    sizes = {facts[key]: changes[key] for key in ("v_head_dim", *parts) if key in changes}
    sizes[sum(facts[key] for key in parts)] = sum(changes[key] for key in parts)
    for key in present(facts, ("qk_head_dim", *HEAD_WIDTHS)):
        changes[key] = sizes.get(facts[key], min(facts[key], 16))
    return changes | dict.fromkeys(present(facts, WIDTHS), min(width, 64))


def _inner_widths(facts: Facts, width: int) -> Changes:
    """The feed-forward layers: half as wide again as the hidden width, so that the two cannot be taken for each other."""
    dense = min(width * 3 // 2 // 8 * 8 or 8, 192)
    changes: Changes = {}
    for key, value in facts.items():
        is_expert = ("moe" in key or "expert" in key) and key.endswith(("intermediate_size", "ffn_hidden_size"))
        # DistilBERT calls the hidden width dim, and its feed-forward layer hidden_dim.
        if not is_expert and key not in INNER_WIDTHS and (key != "hidden_dim" or "dim" not in facts):
            continue
        new = 32 if is_expert else dense
        if isinstance(value, list):
            changes[key] = [new if is_count(one) and one > WIDEST_INNER else one for one in value]
        elif is_count(value) and value > WIDEST_INNER:
            changes[key] = new
    return changes


def _beside(facts: Facts, old: int, new: int) -> Changes:
    return {
        key: new if facts[key] == old else max(min(16, facts[key]), facts[key] * new // old // 8 * 8)
        for key in present(facts, WIDTHS_BESIDE)
        if old != new
    }


def fewer_experts(facts: Facts) -> Changes:
    """Four experts of which at most two answer; groups of experts stay groups."""
    experts = first_count(facts, EXPERT_COUNTS)
    if experts is None or experts <= EXPERTS:
        return {}
    changes: Changes = dict.fromkeys(present(facts, EXPERT_COUNTS), EXPERTS)
    changes |= {key: min(facts[key], ACTIVE_EXPERTS) for key in present(facts, ACTIVE_COUNTS)}
    for groups in present(facts, ("n_group", "num_expert_group")):
        changes[groups] = min(facts[groups], 2)
    # Two experts a group: one group alone has the two that answer.
    return changes | dict.fromkeys(present(facts, ("topk_group",)), 1)


def smaller_rest(facts: Facts) -> Changes:
    """Windows, and sizes that nothing else hangs on."""
    changes: Changes = {key: min(facts[key], most) for key, most in CAPS.items() if is_count(facts.get(key))}
    for key in WINDOWS:
        value = facts.get(key)
        if isinstance(value, list):
            changes[key] = [min(one, WINDOW) if is_count(one) else one for one in value]
        elif is_count(value):
            changes[key] = min(facts[key], WINDOW)
    inner = (first_count(facts, ("mamba_expand",)) or 0) * (first_count(facts, WIDTHS) or 0)
    for heads, wide in (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim")):
        if inner and is_count(facts.get(heads)) and wide in changes:
            changes |= {heads: inner // changes[wide], **dict.fromkeys(present(facts, ("mamba_d_ssm",)), inner)}
    pair = ("linear_num_value_heads", "linear_num_key_heads")
    if all(is_count(facts.get(key)) and facts[key] > DEEPEST for key in pair):
        changes |= dict(zip(pair, fewer_heads(facts[pair[0]], facts[pair[1]]), strict=True))
    return changes


def rotary_leaves(value: object) -> list[Mapping[str, Any]]:
    """The settings of rotary positions; some families have a set for each type of layer."""
    if not isinstance(value, Mapping):
        return []
    inner = [one for one in value.values() if isinstance(one, Mapping)]
    return [leaf for one in inner for leaf in rotary_leaves(one)] if inner else [value]
