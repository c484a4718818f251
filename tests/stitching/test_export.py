"""A stitch within one family leaves as an ordinary checkpoint of that family; where it cannot, the difference is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from brim.errors import UsageError
from brim.stitching.assembling import assemble, stitch
from brim.stitching.export import export
from brim.stitching.recipe import Recipe
from tests.stitching.small import (
    CONFIGS,
    attentions,
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


@pytest.mark.parametrize("family", some("qwen3", "gpt2", of=CONFIGS))
def test_an_export_is_an_ordinary_model_with_the_same_logits(family: str, tmp_path: Path) -> None:
    attention = attentions(family)[0]
    two = {family: fresh_donor(family, attention=attention), "other": fresh_donor(family, attention=attention, seed=9)}
    given = recipe(piece(family, 0, 2), piece("other", 1, 1), piece(family, 1))
    model = assemble(given, two)
    exported = export(model)
    assert sum(one.numel() for one in exported.parameters()) == sum(one.numel() for one in model.parameters())
    exported.save_pretrained(tmp_path)
    ordinary: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
    assert type(ordinary) is type(two[family])
    assert ordinary.config.num_hidden_layers == 5
    ids, mask = padded([tokens(1, length, seed=length)[0] for length in (11, 4)], left=True)
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, position_ids=places(mask)).logits
        theirs = ordinary(ids, attention_mask=mask, position_ids=places(mask)).logits
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=1e-5, rtol=0)
    spoken = [one.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False) for one in (model, ordinary)]
    assert torch.equal(*spoken)


def test_a_head_of_another_donor_is_not_tied_in_the_export() -> None:
    two = {"qwen3": fresh_donor("qwen3"), "other": fresh_donor("qwen3", seed=9)}
    ordinary: Any = export(assemble(recipe(piece("qwen3", 0), piece("other", 1)), two))
    assert not ordinary.config.tie_word_embeddings
    assert torch.equal(ordinary.get_input_embeddings().weight, two["qwen3"].get_input_embeddings().weight)
    assert torch.equal(ordinary.get_output_embeddings().weight, two["other"].get_output_embeddings().weight)


def test_the_precision_goes_along() -> None:
    assert export(stitched("same-family", dtype="bfloat16")).dtype == torch.bfloat16


def test_an_export_can_be_looked_at_without_weights() -> None:
    donors = {"a": "meta-llama/Llama-3.2-1B"}
    given = Recipe(donors=donors, pieces=(piece("a", *range(8)), piece("a", *range(4, 16))))
    ordinary = export(stitch(given, with_weights=False, device="meta"))
    assert ordinary.config.num_hidden_layers == 20
    assert {parameter.device.type for parameter in ordinary.parameters()} == {"meta"}


def test_what_forbids_an_export_is_named() -> None:
    with pytest.raises(UsageError, match="llama is a llama model and qwen2 a qwen2"):
        export(stitched("llama-qwen2-linear"))
    with pytest.raises(UsageError, match="A linear adapter stands before llama, and no llama model has one"):
        export(from_recipe(recipe(piece("llama", 0), piece("llama", 1, by="linear"))))
    other = fresh_donor("llama", rms_norm_eps=1e-3)
    model = assemble(recipe(piece("llama", 0), piece("other", 1)), {"llama": fresh_donor("llama"), "other": other})
    with pytest.raises(UsageError, match=r"llama and other differ in rms_norm_eps: 1e-06 and 0.001"):
        export(model)
