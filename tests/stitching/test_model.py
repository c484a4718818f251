"""A stitched model is right by construction: a row is what it is alone, nobody sees the future, and a model cut up is still itself."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from brim.errors import UnsupportedError, UsageError
from brim.stitching.assembling import assemble
from brim.stitching.families import FAMILIES
from brim.stitching.model import StitchedModel
from brim.stitching.recipe import Recipe
from tests.stitching.small import (
    CONFIGS,
    DEPTH,
    FEW,
    MAIN,
    SLOW,
    STITCHES,
    attentions,
    donor,
    fresh_donor,
    from_recipe,
    padded,
    piece,
    places,
    recipe,
    some,
    stitched,
    tokens,
)

BOTH = ["sdpa", "eager"]
MOST = some("three-donors", "gpt2-llama-mlp", "back-to-the-first-head")
FAMILY_AND_ATTENTION = [
    pytest.param(family, attention, marks=() if family in FEW and attention == attentions(family)[0] else SLOW)
    for family in sorted(CONFIGS)
    for attention in attentions(family)
]  # fmt: skip


def logits(model: StitchedModel, ids: Tensor, **more: object) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return found


def test_every_family_that_is_promised_has_a_tiny_donor_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize(("family", "attention"), FAMILY_AND_ATTENTION)
def test_a_model_that_is_stitched_with_itself_is_still_itself(family: str, attention: str) -> None:
    original = donor(family, attention)
    sequences = [tokens(1, length, seed=length)[0] for length in (12, 7, 3)]
    for pieces in ([(0,), (1, 2)], [(0,), (1,), (2,)], [(), (0, 1), (2,)], [(0, 1, 2), ()], [(0, 1, 2)]):
        model = from_recipe(recipe(*(piece(family, *layers) for layers in pieces)), attention)
        ids = tokens(2, 12)
        torch.testing.assert_close(logits(model, ids), logits(original, ids), atol=1e-5, rtol=0)
    model = from_recipe(recipe(piece(family, 0), piece(family, 1, 2, by="identity")), attention)
    for left in (True, False):
        ids, mask = padded(sequences, left=left)
        given = {"attention_mask": mask, "position_ids": places(mask)}
        ours, theirs = logits(model, ids, **given), logits(original, ids, **given)
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("name", MOST)
def test_a_row_alone_is_the_row_in_a_batch_of_any_size(name: str, attention: str) -> None:
    model = stitched(name, attention)
    ids = tokens(8, 11)
    alone = torch.cat([logits(model, ids[row : row + 1]) for row in range(8)])
    for size in (1, 2, 3, 8):
        torch.testing.assert_close(logits(model, ids[:size]), alone[:size], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("name", MOST)
def test_a_later_token_changes_no_earlier_logit(name: str, attention: str) -> None:
    model = stitched(name, attention)
    for size in (1, 2):
        ids = tokens(size, 12)
        changed = ids.clone()
        changed[:, 7] = (changed[:, 7] - 3 + 11) % 90 + 3
        before, after = logits(model, ids), logits(model, changed)
        torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-6, rtol=0)
        assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-3


@pytest.mark.parametrize("with_positions", [True, False], ids=["positions", "no-positions"])
@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("name", MOST)
def test_padding_changes_no_logit_of_a_token(name: str, attention: str, with_positions: bool) -> None:
    model = stitched(name, attention)
    sequences = [tokens(1, length, seed=length)[0] for length in (12, 7, 1)]
    for left in (True, False):
        ids, mask = padded(sequences, left=left)
        given = {"attention_mask": mask, **({"position_ids": places(mask)} if with_positions else {})}
        found = logits(model, ids, **given)
        for row, one in enumerate(sequences):
            expected = logits(model, one[None])[0]
            torch.testing.assert_close(found[row][mask[row].bool()], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [None, pytest.param(True, marks=SLOW), False], ids=["unsaid", "cache", "no-cache"])
@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("name", MOST)
def test_packed_sequences_do_not_see_each_other(name: str, attention: str, use_cache: bool | None) -> None:
    model = stitched(name, attention)
    sequences = [tokens(1, length, seed=length)[0] for length in (6, 9, 2)]
    positions = torch.cat([torch.arange(len(one)) for one in sequences])[None]
    with torch.no_grad():
        found = model(input_ids=torch.cat(sequences)[None], position_ids=positions, use_cache=use_cache).logits[0]
    expected = torch.cat([logits(model, one[None])[0] for one in sequences])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any pieces of the donors, in any order, joined by any adapter that changes the width."""
    count = draw(st.integers(1, 4))
    pieces = []
    for index in range(count):
        fewest = 0 if count - 1 > 0 and index in {0, count - 1} else 1
        layers = draw(st.lists(st.integers(0, DEPTH - 1), min_size=fewest, max_size=3))
        by = draw(st.sampled_from(["linear", "low-rank", "mlp"])) if index else None
        pieces.append(piece(draw(st.sampled_from([name for name in MAIN if name != "gemma2"])), *layers, by=by))
    assume(any(one.layers for one in pieces))
    return recipe(*pieces)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(recipes())
def test_whatever_is_stitched_padding_batch_and_cache_change_no_logit(given_recipe: Recipe) -> None:
    model = from_recipe(given_recipe)
    sequences = [tokens(1, length, seed=length)[0] for length in (9, 6, 2)]
    ids, mask = padded(sequences, left=True)
    found = logits(model, ids, attention_mask=mask)
    for row, one in enumerate(sequences):
        alone = logits(model, one[None])[0]
        torch.testing.assert_close(found[row][mask[row].bool()], alone, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(logits(model, one[None, :2])[0], alone[:2], atol=5e-5, rtol=1e-4)
    with torch.no_grad():
        cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
        rest = model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(rest[mask[:, 5:].bool()], found[:, 5:][mask[:, 5:].bool()], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", some("three-donors"))
def test_the_attention_of_all_parts_can_be_changed(name: str) -> None:
    model = stitched(name)
    ids = tokens(2, 10)
    before = logits(model, ids)
    model.set_attn_implementation("eager")
    assert {part.config._attn_implementation for part in model.parts} == {"eager"}
    torch.testing.assert_close(logits(model, ids), before, atol=1e-4, rtol=1e-4)


def test_where_nothing_is_asked_for_each_family_takes_the_attention_that_it_can() -> None:
    model = assemble(recipe(piece("llama", 0), piece("gemma2", 1)), {"llama": donor("llama"), "gemma2": donor("gemma2", "eager")})
    assert [part.config._attn_implementation for part in model.parts] == ["sdpa", "eager"]
    asked = recipe(piece("llama", 0), piece("gemma2", 1), attention="sdpa")
    with pytest.raises(UnsupportedError, match="The attention sdpa cannot be used here: Gemma2"):
        assemble(asked, {"llama": donor("llama"), "gemma2": donor("gemma2", "eager")})


def test_an_adapter_begins_as_the_identity_as_far_as_the_widths_go() -> None:
    plain = from_recipe(recipe(piece("llama", 0, 1), piece("llama", 2)))
    ids = tokens(2, 9)
    for kind in ("linear", "low-rank", "mlp"):
        model = from_recipe(recipe(piece("llama", 0, 1), piece("llama", 2, by=kind)))
        torch.testing.assert_close(logits(model, ids), logits(plain, ids), atol=1e-6, rtol=0)
        for first, second in (("llama", "mistral"), ("mistral", "llama")):
            adapter = from_recipe(recipe(piece(first, 0), piece(second, 0, by=kind))).adapters[0]
            hidden = torch.randn(2, 3, donor(first).config.hidden_size)
            kept = min(donor(first).config.hidden_size, donor(second).config.hidden_size)
            found = adapter(hidden)
            assert torch.equal(found[..., :kept], hidden[..., :kept])
            assert not found[..., kept:].any()


def test_donors_are_left_as_they_were() -> None:
    first, second = fresh_donor("llama"), fresh_donor("qwen2")
    before = [copy.deepcopy(one.state_dict()) for one in (first, second)]
    configs = [one.config.to_dict() for one in (first, second)]
    model = assemble(STITCHES["llama-qwen2-linear"], {"llama": first, "qwen2": second})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for one, state, config in zip((first, second), before, configs, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())
        assert one.config.to_dict() == config


def test_the_same_layer_may_come_twice_and_in_any_order() -> None:
    model = from_recipe(recipe(piece("qwen2", 2, 0), piece("qwen2", 2, 2)))
    assert [part.config.layer_types for part in model.parts] == [
        ["sliding_attention", "full_attention"],
        ["sliding_attention"] * 2,
    ]
    layers = [layer for part in (model.parts[0].layers, model.parts[1].model.layers) for layer in part]
    expected = donor("qwen2").model.layers
    for layer, number in zip(layers, (2, 0, 2, 2), strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, expected[number].mlp.up_proj.weight)
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 0, 1]


def test_positions_are_added_once_and_never_inside() -> None:
    model = from_recipe(recipe(piece("gpt2", 0), piece("gpt2", 1, 2)))
    assert sum("wpe" in name for name, _ in model.named_parameters()) == 1
    inside = from_recipe(recipe(piece("llama", 0), piece("gpt2", 1, 2)))
    assert not any("wpe" in name for name, _ in inside.named_parameters())
    model.train()
    assert [type(part.drop).__name__ for part in (model.parts[0], model.parts[1].transformer)] == ["Dropout", "Identity"]


def test_a_vocabulary_can_be_cut_to_the_shorter_table() -> None:
    longer, shorter = fresh_donor("llama", vocab_size=128), donor("mistral")
    for names in (("llama", "mistral"), ("mistral", "llama")):
        given = recipe(piece(names[0], 0), piece(names[1], 1, by="linear"), vocabulary="cut")
        model = assemble(given, {"llama": longer, "mistral": shorter})
        found = logits(model, tokens(2, 5))
        assert found.shape == (2, 5, 97)
        head = {"llama": longer, "mistral": shorter}[names[1]].lm_head.weight
        assert torch.equal(model.get_output_embeddings().weight, head[:97])
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 97
    with pytest.raises(UsageError, match=r"llama, has 128 tokens, and the last one, mistral, has 97") as refused:
        assemble(recipe(piece("llama", 0), piece("mistral", 1, by="linear")), {"llama": longer, "mistral": shorter})
    assert refused.value.hint is not None
    assert "vocabulary: cut" in refused.value.hint
    assert "a piece of llama that has no layers" in refused.value.hint


def test_a_head_of_the_first_donor_brings_the_first_vocabulary_back() -> None:
    other = fresh_donor("mistral", vocab_size=50)
    given = recipe(piece("llama", 0), piece("mistral", 1, by="linear"), piece("llama", by="linear"))
    assert logits(assemble(given, {"llama": donor("llama"), "mistral": other}), tokens(2, 5)).shape == (2, 5, 97)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_reaches_every_part(dtype: str) -> None:
    for name in ("back-to-the-first-head", "gpt2-llama-mlp", "three-donors"):
        model = stitched(name, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
        assert logits(model, tokens(2, 7)).dtype == getattr(torch, dtype)


def test_hidden_states_and_attentions_of_all_parts_can_be_had() -> None:
    model = stitched("three-donors", "eager")
    output = model(tokens(2, 7), output_hidden_states=True, output_attentions=True)
    assert [state.shape[-1] for state in output.hidden_states] == [32, 32, 64, 64, 32, 32, 32]
    assert len(output.attentions) == model.config.num_hidden_layers == 4
    plain = model(tokens(2, 7), return_dict=False, use_cache=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], output.logits)


def test_tokens_or_hidden_states_are_needed_and_not_both() -> None:
    model = stitched("same-family")
    ids = tokens(2, 5)
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)
    with pytest.raises(UsageError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=embedded)
    with pytest.raises(UsageError, match="either input_ids or inputs_embeds"):
        model()


def test_the_vocabulary_of_a_stitch_is_not_resized() -> None:
    model = stitched("same-family")
    assert model.resize_token_embeddings(97) is model.get_input_embeddings()
    with pytest.raises(UnsupportedError, match="cannot be resized"):
        model.resize_token_embeddings(98)
