"""A recipe that cannot be is refused before a weight is read, in one sentence that names the donor and the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import LoraConfig, get_peft_model

from brim.errors import BrimError, RunError, UnsupportedError, UsageError
from brim.stitching.assembling import assemble, stitch
from brim.stitching.blueprint import Donor, draw
from brim.stitching.recipe import Adapter, Piece, Recipe
from tests.stitching.small import CONFIGS, donor, fresh_donor, from_recipe, piece, recipe


def drawn(*pieces: Piece, **more: Any) -> Any:
    """The config of a stitch, from configs alone."""
    given = recipe(*pieces, **more)
    return draw(given, {name: Donor(name=name, config=CONFIGS[name](), class_name=None) for name in given.donors})


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ((), "The recipe has no pieces"),
        ((piece("llama", 0, 3),), "Donor llama has no layer 3: it has 3 layers, 0 to 2"),
        ((piece("llama", -1),), "Donor llama has no layer -1: it has 3 layers, 0 to 2"),
        ((piece("llama", 0), piece("mistral", 1)), "llama is 32 wide and mistral 64, and no adapter stands between them"),
        ((piece("llama", 0), piece("mistral", 1, by="identity")), "llama is 32 wide and mistral 64: an identity cannot join"),
        ((piece("llama", 0), piece("llama"), piece("llama", 1)), "A piece of llama in the middle has no layers"),
        ((piece("llama"), piece("llama")), "No piece of the recipe has a layer"),
        ((piece("llama", 0, by="linear"), piece("llama", 1)), "An adapter stands before the first piece"),
        ((piece("llama", 0), piece("llama", 1, by=Adapter(kind="linear", rank=4))), "rank belongs to the adapter low-rank"),
        ((piece("llama", 0), piece("llama", 1, by=Adapter(kind="low-rank", rank=33))), "rank of an adapter is 33, more than"),
        ((piece("llama", 0), piece("llama", 1, by=Adapter(kind="mlp", width=0))), "width of an adapter is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_recipe_that_cannot_be_gets_one_clear_message(pieces: tuple[Piece, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        drawn(*pieces, donors=("llama", "mistral"))


def test_the_ways_to_join_different_widths_are_named() -> None:
    with pytest.raises(UsageError) as refused:
        drawn(piece("llama", 0), piece("mistral", 1))
    assert refused.value.hint == "These adapters change the width: linear, low-rank, mlp."


def test_a_piece_of_nobody_is_refused_with_the_donors_there_are() -> None:
    with pytest.raises(UsageError, match="taken from 'lama'") as refused:
        drawn(piece("lama", 0), donors=("llama", "mistral"))
    assert refused.value.hint == "Its donors: llama, mistral."
    with pytest.raises(UsageError, match="cannot be called 'head'"):
        assemble(Recipe(donors={"head": "x"}, pieces=(piece("head", 0),)), {"head": donor("llama")})
    with pytest.raises(UsageError, match="Donor llama is NoneType, and a model of transformers is needed"):
        assemble(recipe(piece("llama", 0)), {})


def test_what_is_no_causal_decoder_is_refused() -> None:
    def refuse(config: Any, class_name: str | None, said: str) -> None:
        with pytest.raises(UnsupportedError, match=said):
            draw(recipe(piece("a", 0)), {"a": Donor(name="a", config=config, class_name=class_name)})

    refuse(transformers.T5Config(), "T5ForConditionalGeneration", r"Donor a \(t5\) has an encoder and a decoder")
    refuse(transformers.BertConfig(), "BertForMaskedLM", "Donor a is a bert model, and layers of that family cannot be stitched")
    refuse(transformers.MixtralConfig(), "MixtralForCausalLM", "Donor a is a mixtral model")
    refuse(CONFIGS["llama"](), "LlamaForSequenceClassification", "predicts no next token; a LlamaForCausalLM is needed")
    numbered = transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True)
    refuse(numbered, "GPT2LMHeadModel", "Donor a: its config has scale_attn_by_inverse_layer_idx")
    both = transformers.Gemma3TextConfig(use_bidirectional_attention=True)
    refuse(both, "Gemma3ForCausalLM", "its config has use_bidirectional_attention")
    quantized = CONFIGS["llama"]()
    quantized.quantization_config = {"quant_method": "bitsandbytes"}
    refuse(quantized, "LlamaForCausalLM", "its config has quantization_config")


def test_a_donor_that_peft_has_changed_is_refused() -> None:
    changed = fresh_donor("llama")
    get_peft_model(changed, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(UsageError, match=r"Donor llama is not what its config says: layers.0.self_attn.q_proj.+ is missing"):
        assemble(recipe(piece("llama", 0), piece("llama", 1)), {"llama": changed})


def test_a_stitch_is_no_donor() -> None:
    model = from_recipe(recipe(piece("llama", 0), piece("llama", 1)))
    with pytest.raises(UnsupportedError, match="Donor a is a brim_stitched model"):
        assemble(recipe(piece("a", 0)), {"a": model})


def test_the_defaults_of_adapters_follow_the_widths() -> None:
    config = drawn(piece("llama", 0), piece("mistral", 1, by="low-rank"), piece("llama", 2, by="mlp"))
    assert config.adapters == [
        {"kind": "low-rank", "from": 32, "to": 64, "rank": 8},
        {"kind": "mlp", "from": 64, "to": 32, "width": 64},
    ]


def test_folders_that_are_no_donors_are_refused(tmp_path: Path) -> None:
    def refuse(folder: Path, said: str, kind: type[BrimError] = UsageError) -> None:
        with pytest.raises(kind, match=said):
            stitch(Recipe(donors={"a": str(folder)}, pieces=(piece("a", 0),)))

    refuse(tmp_path / "nowhere", "There is no file or folder")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "is not a model folder")
    fresh_donor("llama").save_pretrained(tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"nonsense")
    refuse(tmp_path / "broken", "The weights of donor a cannot be read", RunError)
    small = fresh_donor("llama")
    state = {name: tensor for name, tensor in small.state_dict().items() if "layers.1." not in name}
    small.save_pretrained(tmp_path / "partial", state_dict=state)
    refuse(tmp_path / "partial", "are not complete: 9 are missing, model.layers.1.input_layernorm.weight among them", RunError)
