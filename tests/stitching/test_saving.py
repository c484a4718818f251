"""A stitched model is saved and loaded without its donors, and comes back bit for bit, frozen as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from brim.errors import UsageError
from brim.stitching.assembling import stitch
from brim.stitching.config import StitchedConfig
from brim.stitching.model import StitchedModel, register
from brim.stitching.recipe import Recipe
from brim.stitching.saving import save
from tests.stitching.small import fresh_donor, from_recipe, piece, recipe, some, stitched, tokens


def assert_same(one: Any, other: Any) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [name for name, parameter in one.named_parameters() if parameter.requires_grad] == [
        name for name, parameter in other.named_parameters() if parameter.requires_grad
    ]
    ids = tokens(3, 9)
    with torch.no_grad():
        assert torch.equal(one(ids).logits, other(ids).logits)
    assert torch.equal(
        one.generate(ids, max_new_tokens=6, do_sample=False), other.generate(ids, max_new_tokens=6, do_sample=False)
    )


@pytest.mark.parametrize("name", some("three-donors", "back-to-the-first-head"))
def test_save_load_and_generate_agree_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = stitched(name)
    folder = save(model, tmp_path / "stitch")
    assert_same(model, StitchedModel.from_pretrained(folder))
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert type(found) is StitchedModel
    assert_same(model, found)
    save(found, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_what_was_frozen_is_frozen_again(tmp_path: Path) -> None:
    model = from_recipe(recipe(piece("llama", 0, 1), piece("qwen2", 1, by="linear"), trains=("adapters", "qwen2", "norm")))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"adapters.0.projection.weight", "parts.1.model.norm.weight"} < names
    assert all(name.startswith(("adapters.", "parts.1.model.norm", "parts.1.model.layers.")) for name in names)
    folder = save(model, tmp_path / "stitch")
    for kind in (StitchedModel, AutoModelForCausalLM):
        found: Any = kind.from_pretrained(folder)
        assert {name for name, parameter in found.named_parameters() if parameter.requires_grad} == names
        assert found.trainable_parameters == model.trainable_parameters > 0


def test_head_and_embedding_are_one_only_if_they_were(tmp_path: Path) -> None:
    tied = from_recipe(recipe(piece("qwen3", 0), piece("llama", 1, by="linear"), piece("qwen3", 2, by="linear")))
    assert tied.config.tie_word_embeddings
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    folder = save(tied, tmp_path / "tied")
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == len(tied.state_dict()) - 1
    found = StitchedModel.from_pretrained(folder)
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert_same(tied, found)
    for pieces in ((piece("qwen3", 0), piece("gpt2", 2)), (piece("llama", 0), piece("llama", 2))):
        untied = from_recipe(recipe(*pieces))
        assert not untied.config.tie_word_embeddings
        found = StitchedModel.from_pretrained(save(untied, tmp_path / f"untied-{pieces[0].donor}"))
        assert found.get_output_embeddings().weight is not found.get_input_embeddings().weight
        assert_same(untied, found)


def test_a_donor_whose_file_holds_two_tables_is_not_tied_whatever_its_config_says() -> None:
    from brim.stitching.assembling import assemble

    loose = fresh_donor("qwen3")
    loose.lm_head.weight = torch.nn.Parameter(loose.lm_head.weight.detach() * 2)
    model = assemble(recipe(piece("qwen3", 0), piece("qwen3", 1, 2)), {"qwen3": loose})
    assert not model.config.tie_word_embeddings
    ids = tokens(2, 6)
    torch.testing.assert_close(model(ids).logits, loose(ids).logits, atol=1e-5, rtol=0)


def test_the_precision_is_kept_or_chosen(tmp_path: Path) -> None:
    model = stitched("gpt2-llama-mlp", dtype="bfloat16")
    folder = save(model, tmp_path / "half")
    assert StitchedModel.from_pretrained(folder).dtype == torch.bfloat16
    assert StitchedModel.from_pretrained(folder, dtype=torch.float32).dtype == torch.float32
    assert StitchedModel.from_pretrained(folder, attn_implementation="eager").parts[0].config._attn_implementation == "eager"


def test_the_config_is_plain_and_found_by_its_type(tmp_path: Path) -> None:
    model = stitched("three-donors")
    folder = save(model, tmp_path / "stitch")
    facts = json.loads((folder / "config.json").read_text())
    assert facts["model_type"] == "brim_stitched"
    assert [(part["donor"], part["class_name"], part["layers"]) for part in facts["parts"]] == [
        ("qwen3", "Qwen3ForCausalLM", [0]), ("mistral", "MistralForCausalLM", [1]), ("gemma3_text", "Gemma3ForCausalLM", [0, 1]),
    ]  # fmt: skip
    register()
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, StitchedConfig)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.eos_token_id) == (97, 32, 4, 2)
    assert config.max_position_embeddings == 128
    automatic: Any = AutoModelForCausalLM
    fresh = automatic.from_config(config)
    assert {name: tensor.shape for name, tensor in fresh.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert fresh(tokens(2, 5)).logits.isfinite().all()


def test_saving_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stitched("same-family")
    (tmp_path / "empty").mkdir()
    assert save(model, tmp_path / "empty") == tmp_path / "empty"
    with pytest.raises(UsageError, match="exists already and is not empty"):
        save(model, tmp_path / "empty")

    def fail(folder: Path, *_arguments: object) -> None:
        (Path(folder) / "config.json").write_text("{")
        raise OSError("No space left on device")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        save(model, tmp_path / "half")
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


def tokenizer_folder(folder: Path, words: dict[str, int]) -> None:
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[0]")), unk_token="[0]")
    tokenizer.save_pretrained(folder)


def donors_on_disk(folder: Path, *families: str, **settings: Any) -> dict[str, str]:
    words = {f"[{number}]": number for number in range(97)}
    for family in families:
        fresh_donor(family, **settings).save_pretrained(folder / family)
        tokenizer_folder(folder / family, words)
    return {family: str(folder / family) for family in families}


def test_folders_are_stitched_one_after_another_and_speak_like_the_first(tmp_path: Path) -> None:
    donors = donors_on_disk(tmp_path, "llama", "qwen2", "qwen3")
    pieces = (piece("llama", 0, 1), piece("qwen2", 1, by="linear"), piece("qwen3", 2, by="mlp"))
    made = stitch(Recipe(donors=donors, pieces=pieces))
    expected = from_recipe(recipe(*pieces))
    for name, tensor in expected.state_dict().items():
        assert name.startswith("adapters.1.down") or torch.equal(tensor, made.state_dict()[name]), name
    folder = save(made, tmp_path / "made", tokenizer_from=donors["llama"])
    assert AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens([5]) == ["[5]"]
    assert_same(made, StitchedModel.from_pretrained(folder))


def test_without_weights_a_stitch_takes_no_memory(tmp_path: Path) -> None:
    pieces = (piece("a", 0, 1), piece("b", 3, 4, by="linear"))
    names = {"a": "meta-llama/Llama-3.1-8B", "b": "meta-llama/Llama-3.2-1B"}
    made = stitch(Recipe(donors=names, pieces=pieces, dtype="bfloat16"), with_weights=False, device="meta")
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
    assert made.trainable_parameters == 4096 * 2048 + 2048
    with pytest.raises(
        UsageError, match=r"Donor a \(meta-llama/Llama-3.1-8B\) is an entry of the catalogue, which has no weights"
    ):
        stitch(Recipe(donors=names, pieces=pieces))
    fresh_donor("llama").config.save_pretrained(tmp_path / "bare")
    bare = Recipe(donors={"a": str(tmp_path / "bare/config.json")}, pieces=(piece("a", 0, 1),))
    assert stitch(bare, with_weights=False)(tokens(1, 4)).logits.isfinite().all()
    with pytest.raises(UsageError, match="has no weights beside its config"):
        stitch(bare)


def test_donors_with_other_tokens_are_refused_before_their_weights_are_read(tmp_path: Path) -> None:
    donors = donors_on_disk(tmp_path, "llama", "qwen2")
    (tmp_path / "qwen2/model.safetensors").write_bytes(b"not read")
    tokenizer_folder(tmp_path / "qwen2", {"other" if number == 41 else f"[{number}]": number for number in range(97)})
    pieces = (piece("llama", 0, 1), piece("qwen2", 1, by="linear"))
    with pytest.raises(UsageError, match=r"number 41 is '\[41\]' in one and 'other' in the other"):
        stitch(Recipe(donors=donors, pieces=pieces))
    back = stitch(Recipe(donors=donors, pieces=(*pieces, piece("llama", by="linear"))), with_weights=False)
    assert back.config.vocab_size == 97
    short = Recipe(
        donors={**donors, "qwen2": donors_on_disk(tmp_path / "s", "qwen2", vocab_size=90)["qwen2"]},
        pieces=pieces,
        vocabulary="cut",
    )
    with pytest.raises(UsageError, match=r"has a token 96 \('\[96\]'\), and the stitch has only 90 rows"):
        stitch(short)
