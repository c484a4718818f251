"""A shrunk copy is small, runs, and is the same architecture."""

from __future__ import annotations

import copy
import json
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

from brim.proofs.shrinking import shrink
from brim.proofs.shrinking_rules import DEPTHS, HEADS, LATENT_WIDTHS, PERIODS, WIDTHS, WINDOWS, fewer_heads
from brim.workload.cards import cards
from brim.workload.resolve import Model, find_model

if TYPE_CHECKING:
    from collections.abc import Iterator

Config = dict[str, Any]

CATALOGUE = {
    class_name: [card.name for card in cards() if card.class_name == class_name]
    for class_name in dict.fromkeys(card.class_name for card in cards())
}
MOST_PARAMETERS = 2_000_000

# Families beyond the catalogue, each as its class makes it without being told anything: latent attention, linear attention, state
# spaces, layers with settings of their own, keys shared between layers, chunks, experts in groups, patterns of every notation.
OTHERS = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "jamba": "JambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "mpt": "MptForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers remarks on configs that leave things out."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    torch.set_num_threads(1)
    yield
    transformers.logging.set_verbosity(before)


def config_of(name: str) -> Config:
    return copy.deepcopy(dict(find_model(name).config or {}))


def in_force(config: Config) -> Config:
    """All that the class makes of a config."""
    made: Config = transformers.AutoConfig.for_model(**copy.deepcopy(config)).to_dict()
    return made


def first(facts: Config, *keys: str) -> Any:
    return next((facts[key] for key in keys if facts.get(key) is not None), None)


def head_ratio(facts: Config) -> float:
    heads = first(facts, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
    return float(heads / first({**facts, "all": heads}, "num_key_value_heads", "num_kv_heads", "all"))


def tokens(facts: Config) -> list[int]:
    held = [value for key, value in facts.items() if key.endswith(("token_id", "token_index")) and value is not None]
    return [one for value in held for one in (value if isinstance(value, list) else [value])]


def build(class_name: str, config: Config) -> Any:
    torch.manual_seed(0)
    return Model(given="small", origin="config", name="small", config=config, class_name=class_name).build("cpu").eval()


@cache
def run(class_name: str, config: str) -> tuple[int, tuple[int, ...]]:
    """Parameters, and the shape that comes out; models of one family mostly have the same small copy, which is run once."""
    model = build(class_name, json.loads(config))
    ids = torch.randint(0, model.config.vocab_size, (2, 20))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model(input_ids=ids, **more)[0]
    assert torch.isfinite(out).all()
    return sum(parameter.numel() for parameter in model.parameters()), tuple(out.shape)


@pytest.mark.parametrize("class_name", CATALOGUE)
def test_the_small_copy_builds_and_runs(class_name: str) -> None:
    for name in CATALOGUE[class_name]:
        small = shrink(config_of(name)).config
        parameters, shape = run(class_name, json.dumps({**small, "architectures": [class_name]}, sort_keys=True))
        assert parameters < MOST_PARAMETERS, name
        assert shape[:2] == (2, 20), name


@pytest.mark.parametrize("class_name", CATALOGUE)
def test_the_small_copy_is_the_same_architecture(class_name: str) -> None:
    for name in CATALOGUE[class_name]:
        before, after = in_force(config_of(name)), in_force(shrink(config_of(name)).config)
        assert after["vocab_size"] == 256, name
        assert before.keys() == after.keys(), name
        assert head_ratio(before) == head_ratio(after), name
        # Switches, names, rates and what is left out: all that is not a size.
        fixed = {key for key, value in before.items() if value is None or isinstance(value, bool | str | float)}
        assert {key for key in fixed if before[key] != after[key]} <= {"attention_multiplier"}, name
        for key in ("layer_types", "no_rope_layers", "attention_layers", "pos_att_type"):
            assert set(before.get(key) or ()) == set(after.get(key) or ()), (name, key)


@pytest.mark.parametrize("class_name", CATALOGUE)
def test_special_tokens_stay_apart_and_inside_the_vocabulary(class_name: str) -> None:
    for name in CATALOGUE[class_name]:
        before, after = tokens(in_force(config_of(name))), tokens(in_force(shrink(config_of(name)).config))
        assert all(one < 256 for one in after), name
        assert len(set(zip(before, after, strict=True))) == len(set(before)) == len(set(after)), name


@pytest.mark.parametrize("class_name", CATALOGUE)
def test_shrinking_twice_is_shrinking_once(class_name: str) -> None:
    for name in CATALOGUE[class_name]:
        config = config_of(name)
        once = shrink(config)
        assert once.words, name
        assert config == config_of(name), name
        twice = shrink(once.config)
        assert (twice.config, twice.words) == (once.config, ""), name


@pytest.mark.parametrize("model_type", OTHERS)
def test_families_beyond_the_catalogue_shrink_by_the_same_rules(model_type: str) -> None:
    small = shrink({"model_type": model_type})
    assert shrink(small.config).config == small.config
    before, after = in_force({"model_type": model_type}), in_force(small.config)
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        assert set(before.get(key) or ()) == set(after.get(key) or ()), key
    parameters, _shape = run(OTHERS[model_type], json.dumps(small.config))
    assert parameters < MOST_PARAMETERS


def test_the_words_say_what_was_cut() -> None:
    def words(name: str) -> str:
        return shrink(config_of(name)).words

    assert words("llama-3.1-70b") == "80 to 2 layers, width 8192 to 128, vocabulary 128256 to 256"
    assert words("byt5-small") == "12 + 4 to 2 + 4 layers, width 1472 to 128, vocabulary 384 to 256"
    assert words("gpt-oss-20b").endswith("vocabulary 201088 to 256, 32 to 4 experts, window 128 to 8")


def test_heads_experts_and_groups_of_a_latent_model_fit_together() -> None:
    small = shrink({"model_type": "deepseek_v3"}).config
    assert small["first_k_dense_replace"] == 1
    assert small["num_hidden_layers"] == 2
    assert small["qk_head_dim"] == small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    assert small["n_routed_experts"] // small["n_group"] * small["topk_group"] >= small["num_experts_per_tok"] == 2


def test_a_window_is_so_short_that_few_tokens_reach_past_it() -> None:
    """Two layers with a window of 8 see 14 tokens back: the last of 20 tokens does not know the first."""
    model = build("MistralForCausalLM", shrink(config_of("mistral-7b-v0.1")).config)
    ids = torch.randint(0, 256, (1, 20))
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 256
    with torch.no_grad():
        change = (model(input_ids=ids).logits - model(input_ids=other).logits).abs().amax(-1)[0]
    assert change[:15].min() > 0
    assert change[15:].max() == 0


def test_scaled_rotary_positions_keep_their_kind_and_their_factor() -> None:
    llama = shrink(config_of("llama-3.1-8b")).config
    assert llama["rope_scaling"]["factor"] == 8.0
    assert llama["max_position_embeddings"] // llama["rope_scaling"]["original_max_position_embeddings"] == 131072 // 8192
    phi = shrink(config_of("phi-3.5-mini")).config
    head = phi["hidden_size"] // phi["num_attention_heads"]
    assert len(phi["rope_scaling"]["long_factor"]) == len(phi["rope_scaling"]["short_factor"]) == head // 2
    sections = shrink({"hidden_size": 4096, "num_attention_heads": 32, "rope_scaling": {"mrope_section": [16, 24, 24]}}).config
    assert sections["rope_scaling"] == {"mrope_section": [2, 3, 3]}


def test_a_model_that_is_small_already_is_left_alone() -> None:
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128, "eos_token_id": 99,
    }  # fmt: skip
    small = shrink(config)
    assert (small.config, small.words) == (config, "")


def test_an_unknown_family_shrinks_by_the_names_of_its_keys() -> None:
    small = shrink(
        {
            "model_type": "never-heard-of", "n_embed": 4096, "n_head": 64, "num_kv_heads": 8, "n_layer": 40, "vocab_size": 99_000,
            "d_ff": 11_000, "layer_types": ["a", "a", "b", "a"] * 10, "special": {"x": 4096}, "eos_token_id": [98_000, 2],
            "bos_token_id": 97_000, "mlp_only_layers": [5], "sliding_window": 1024,
        }
    )  # fmt: skip
    assert small.config == {
        "model_type": "never-heard-of", "n_embed": 128, "n_head": 16, "num_kv_heads": 2, "n_layer": 3, "vocab_size": 256,
        "d_ff": 192, "layer_types": ["a", "b", "a"], "special": {"x": 4096}, "eos_token_id": [255, 2],
        "bos_token_id": 254, "mlp_only_layers": [2], "sliding_window": 8,
    }  # fmt: skip
    assert small.words == "40 to 3 layers, width 4096 to 128, vocabulary 99000 to 256, window 1024 to 8"


def test_a_config_without_known_keys_is_left_alone() -> None:
    assert shrink({}).config == {}
    assert shrink({"model_type": "never-heard-of", "colour": "blue", "num_layers": None}).words == ""


def test_a_model_inside_a_model_is_shrunk_where_it_stands() -> None:
    small = shrink({"model_type": "gemma3"})
    text = small.config["text_config"]
    assert (text["vocab_size"], text["num_hidden_layers"], text["layer_types"]) == (
        256,
        2,
        ["sliding_attention", "full_attention"],
    )
    ids = [small.config[key] for key in ("image_token_index", "boi_token_index", "eoi_token_index")]
    assert len({*ids, *tokens(text)}) == len(ids) + len(set(tokens(text)))
    assert max(ids) < 256
    assert shrink(small.config).config == small.config
    built = build("Gemma3ForConditionalGeneration", small.config)
    assert sum(parameter.numel() for parameter in built.parameters()) < MOST_PARAMETERS
    assert "26 to 2 layers" in small.words


@given(st.integers(1, 160), st.integers(1, 16))
def test_heads_keep_their_ratio_and_several_stay_several(key_heads: int, group: int) -> None:
    heads, fewer_keys = fewer_heads(key_heads * group, key_heads)
    assert heads == fewer_keys * group
    assert fewer_keys <= key_heads
    assert (fewer_keys > 1) == (key_heads > 1)
    assert fewer_heads(heads, fewer_keys) == (heads, fewer_keys)


KEYS = [
    *WIDTHS,
    *HEADS,
    *DEPTHS,
    *LATENT_WIDTHS,
    *WINDOWS,
    *PERIODS,
    "vocab_size",
    "eos_token_id",
    "layer_types",
    "attention_types",
]
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 10**6) | st.floats(0, 9) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), NONSENSE, max_size=16))
def test_nonsense_is_for_the_builder_to_refuse(config: Config) -> None:
    assert shrink({"model_type": "never-heard-of", **config}).config["model_type"] == "never-heard-of"


@settings(deadline=None, max_examples=60)
@given(
    key_heads=st.integers(1, 16), group=st.integers(1, 9), head=st.sampled_from([16, 32, 64, 80, 96, 128, 256]),
    share=st.sampled_from([None, 0.5, 0.75, 1, 1.25]), kinds=st.lists(st.sampled_from("abc"), min_size=1, max_size=40),
    vocabulary=st.integers(10, 200_000), seed=st.integers(0, 9), rotated=st.sampled_from([0.25, 0.4, 0.5, 1.0]),
)  # fmt: skip
def test_whatever_the_sizes_are_the_small_copy_hangs_together(
    key_heads: int, group: int, head: int, share: float | None, kinds: list[str], vocabulary: int, seed: int, rotated: float
) -> None:
    heads = key_heads * group
    config: Config = {
        "model_type": "never-heard-of", "num_hidden_layers": len(kinds), "layer_types": kinds, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "hidden_size": heads * int(head * (share or 1)), "vocab_size": vocabulary,
        "bos_token_id": seed % vocabulary, "eos_token_id": vocabulary - 1, "partial_rotary_factor": rotated,
    }  # fmt: skip
    if share is not None:
        config["head_dim"] = head
    small = shrink(config).config
    assert shrink(small).config == small
    assert small["num_hidden_layers"] == len(small["layer_types"]) <= len(kinds)
    assert set(small["layer_types"]) == set(kinds)
    assert small["num_attention_heads"] == group * small["num_key_value_heads"]
    assert small["hidden_size"] % small["num_attention_heads"] == 0
    assert max(small["bos_token_id"], small["eos_token_id"]) < small["vocab_size"] <= 256
    assert (small["bos_token_id"] == small["eos_token_id"]) == (config["bos_token_id"] == config["eos_token_id"])
    if share is None:
        assert int(small["hidden_size"] // small["num_attention_heads"] * rotated) % 2 == 0
