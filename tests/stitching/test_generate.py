"""Generating with the cache gives what generating without it gives: one row or many, padded or not, searched or sampled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from brim.errors import UnsupportedError, UsageError
from brim.stitching.assembling import assemble
from brim.stitching.caching import new_cache, views
from tests.stitching.small import (
    CONFIGS,
    DEPTH,
    FEW,
    SLOW,
    attentions,
    donor,
    fresh_donor,
    from_recipe,
    padded,
    piece,
    recipe,
    some,
    stitched,
    tokens,
)

NEW = 9
"""More than the sliding window of the donors, so that its cache has to forget."""


def generate(model: Any, ids: Tensor | None, **more: Any) -> Tensor:
    found: Tensor = model.generate(ids, **{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **more})
    return found


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=SLOW)])
@pytest.mark.parametrize("name", some("three-donors", "back-to-the-first-head"))
def test_the_cache_changes_no_word(name: str, attention: str) -> None:
    model = stitched(name, attention)
    ids, mask = padded([tokens(1, length, seed=length)[0] for length in (8, 5, 2)], left=True)
    with_cache = generate(model, ids, attention_mask=mask)
    assert torch.equal(with_cache, generate(model, ids, attention_mask=mask, use_cache=False))
    for row in range(len(ids)):
        alone = generate(model, ids[row : row + 1][mask[row : row + 1].bool()][None])
        assert torch.equal(with_cache[row, -NEW:], alone[0, -NEW:])


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(family, attention, marks=() if family in FEW and attention == attentions(family)[0] else SLOW)
        for family in sorted(CONFIGS)
        for attention in attentions(family)
    ],
)
def test_a_model_that_is_stitched_with_itself_says_the_same(family: str, attention: str) -> None:
    model = from_recipe(recipe(piece(family, 0), piece(family, 1), piece(family, 2)), attention)
    ids, mask = padded([tokens(1, length, seed=length)[0] for length in (8, 3)], left=True)
    expected = generate(donor(family, attention), ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, attention_mask=mask), expected)


@pytest.mark.parametrize("name", some("three-donors", of=("three-donors", "gemma-mistral-low-rank")))
def test_beams_and_samples_are_the_same_with_and_without_a_cache(name: str) -> None:
    model = stitched(name)
    ids, mask = padded([tokens(1, length, seed=length)[0] for length in (7, 4)], left=True)
    ways: list[dict[str, Any]] = [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
    ]
    for way in ways:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            found.append(generate(model, ids, attention_mask=mask, use_cache=use_cache, **way))
        assert torch.equal(*found)


@pytest.mark.parametrize("name", some("three-donors", of=("three-donors", "back-to-the-first-head")))
def test_words_that_were_guessed_ahead_are_taken_back_where_they_are_wrong(name: str) -> None:
    model = stitched(name)
    ids = tokens(1, 6).repeat(1, 3)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(generate(model, ids, assistant_model=stitched(name)), expected)


@pytest.mark.parametrize("name", some("three-donors", "gpt2-llama-mlp"))
def test_a_prompt_in_several_bites_gives_the_logits_of_one(name: str) -> None:
    model = stitched(name)
    ids = tokens(2, 12)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, found = None, []
        for first, last in ((0, 5), (5, 6), (6, 11), (11, 12)):
            output = model(ids[:, first:last], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits)
    assert cache is not None
    assert cache.get_seq_length() == 12
    torch.testing.assert_close(torch.cat(found, dim=1), whole, atol=2e-5, rtol=1e-5)


def phi3_with_a_border() -> Any:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "rope_theta": 100.0}
    rope["original_max_position_embeddings"] = 12
    return fresh_donor("phi3", rope_parameters=rope, original_max_position_embeddings=12, sliding_window=None)


def test_keys_that_longer_sequences_turn_by_other_angles_are_made_anew() -> None:
    original = phi3_with_a_border()
    model = assemble(recipe(piece("phi3", 0), piece("phi3", 1, 2)), {"phi3": original})
    for length in (5, 11, 12, 13):
        expected = generate(original, tokens(1, length), use_cache=True)
        assert torch.equal(generate(model, tokens(1, length)), expected)
        assert torch.equal(generate(model, tokens(1, length), use_cache=False), expected)
        hidden = model.get_input_embeddings()(tokens(1, length))
        assert torch.equal(generate(model, None, inputs_embeds=hidden), expected[:, length:])
        ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens(1, length)], dim=1)
        mask = (torch.arange(length + 5) >= 5).long()[None]
        assert torch.equal(generate(model, ids, attention_mask=mask)[:, 5:], expected)
    with pytest.raises(UnsupportedError, match="cannot read its prompt in chunks"):
        generate(model, tokens(1, 20), prefill_chunk_size=4)


def test_hidden_states_can_be_generated_from() -> None:
    model = stitched("three-donors")
    ids, mask = padded([tokens(1, length, seed=length)[0] for length in (8, 5)], left=True)
    expected = generate(model, ids, attention_mask=mask)[:, 8:]
    hidden = model.get_input_embeddings()(ids)
    assert torch.equal(generate(model, None, inputs_embeds=hidden, attention_mask=mask), expected)


def test_packed_rows_share_no_cache_and_a_mask_is_2_d() -> None:
    model = stitched("three-donors")
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(UsageError, match="cannot share a cache"):
        model(tokens(1, 5), position_ids=positions, past_key_values=DynamicCache())
    for mask in (torch.ones(1, 1, 5, 5), {"full_attention": None}):
        with pytest.raises(UnsupportedError, match="makes the masks of its layers itself, of a 2-D mask"):
            model(tokens(1, 5), attention_mask=mask)


def test_only_the_logits_that_are_asked_for_are_made() -> None:
    model = stitched("llama-qwen2-linear")
    whole = model(tokens(2, 9)).logits
    torch.testing.assert_close(model(tokens(2, 9), logits_to_keep=2).logits, whole[:, -2:])


def test_each_part_sees_its_own_layers_of_one_cache() -> None:
    model = stitched("gemma-mistral-low-rank")
    configs = [part.config for part in model.parts]
    cache = new_cache(configs)
    assert [layer.is_sliding for layer in cache.layers] == [False, False, True, True]
    first, second = views(cache, configs)
    assert [*first.layers, *second.layers] == cache.layers
    model(tokens(2, 6), past_key_values=cache)
    assert (first.get_seq_length(), second.get_seq_length()) == (6, 6)


@pytest.mark.parametrize("name", ["three-donors", "back-to-the-first-head"])
def test_a_cache_can_be_brought_along_kept_and_copied(name: str) -> None:
    model = stitched(name)
    ids = tokens(1, 10)
    expected = generate(model, ids)
    brought = DynamicCache()
    with torch.no_grad():
        model(ids[:, :6], past_key_values=brought, use_cache=True)
    assert len(brought.layers) == model.config.num_hidden_layers
    for cache in (copy.deepcopy(brought), brought):
        assert torch.equal(generate(model, ids, past_key_values=cache), expected)
    assert torch.equal(generate(model, ids, past_key_values=DynamicCache(config=model.config)), expected)


def test_caches_that_one_config_sizes_are_refused_in_words() -> None:
    model = stitched("llama-qwen2-linear")
    for kind in ("static", "offloaded", "quantized"):
        with pytest.raises(UnsupportedError, match=f"cannot use the cache '{kind}'"):
            generate(model, tokens(1, 4), cache_implementation=kind)
    assert generate(model, tokens(1, 4), cache_implementation="dynamic").shape == (1, 4 + NEW)
    for cache in (StaticCache(config=model.config, max_cache_len=32), DynamicCache(config=model.config, offloading=True)):
        with pytest.raises(UnsupportedError, match=f"in a DynamicCache, and not in {type(cache).__name__}"):
            model(tokens(1, 4), past_key_values=cache)


def test_a_cache_of_another_model_is_refused() -> None:
    cache = DynamicCache(config=donor("llama").config)
    donor("llama")(tokens(1, 4), past_key_values=cache)
    with pytest.raises(UsageError, match=f"The cache holds {DEPTH} layers, and this model has 4"):
        stitched("same-family")(tokens(1, 4), past_key_values=cache)
