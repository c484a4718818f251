"""A folder or a donor that is not whole is refused in words: nothing is drawn at random, and nothing is cut unasked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from brim.errors import BrimError, ConfigError, RunError, UsageError
from brim.stitching.assembling import assemble
from brim.stitching.export import export
from brim.stitching.front import StitchLLM
from brim.stitching.model import StitchedModel
from brim.stitching.vocabulary import refuse_other_tokens
from tests.stitching.small import donor, fresh_donor, padded, piece, recipe, stitched, tokens

QUERY = "parts.0.layers.0.self_attn.q_proj.weight"
Change = Callable[[dict[str, Any]], Any]


def saved(folder: Path, change: Change) -> Path:
    """A stitched model whose weights were changed in the file."""
    stitched("llama-qwen2-linear").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop(QUERY), f"are not complete: 1 are missing, {QUERY} among them"),
        (lambda weights: weights.update({QUERY: torch.zeros(3, 3)}), "cannot be loaded|have other shapes"),
        (lambda weights: weights.update({"parts.7.weight": torch.zeros(3)}), "holds weights that it does not have: 1, parts.7.weight"),
    ],
    ids=["missing", "another shape", "too many"],
)  # fmt: skip
def test_a_folder_with_other_weights_is_not_loaded(change: Change, says: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", change)
    with pytest.raises(RunError, match=says):
        StitchLLM(folder)
    with pytest.raises((BrimError, RuntimeError)):
        AutoModelForCausalLM.from_pretrained(folder)


def test_who_asks_for_it_gets_a_model_with_other_shapes(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", lambda weights: weights.update({QUERY: torch.zeros(3, 3)}))
    model, told = StitchedModel.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    assert type(model) is StitchedModel
    assert told["mismatched_keys"]


def _part(name: str, value: Any, index: int = 0) -> Change:
    return lambda facts: facts["parts"][index]["config"].update({name: value})


def _adapter(**changes: Any) -> Change:
    return lambda facts: facts["adapters"][0].update(changes)


TAMPERED: list[tuple[str, Change, str]] = [
    ("no parts", lambda facts: facts.pop("parts"), "it has no parts"),
    ("half a part", lambda facts: facts["parts"][1].pop("config"), r"parts\[1\] has no donor, no layers or no config"),
    ("no adapters", lambda facts: facts.pop("adapters"), "its 2 parts need 1 adapters"),
    ("two adapters", lambda facts: facts["adapters"].append(facts["adapters"][0]), "its 2 parts need 1 adapters"),
    ("an unknown kind", _adapter(kind="evil"), r"adapters\[0\] is of the kind 'evil'"),
    ("another width", _adapter(to=10**12), r"adapters\[0\] does not lead from the width 32 to the width 48"),
    ("an identity", _adapter(kind="identity"), r"adapters\[0\] does not lead"),
    ("a rank of nothing", _adapter(kind="low-rank", rank=0), r"adapters\[0\].rank is 0"),
    ("an encoder", _part("model_type", "bert"), r"parts\[0\] is of the family 'bert'"),
    ("an unknown family", _part("model_type", "nosuch", 1), r"parts\[1\] is of the family 'nosuch'"),
    ("a depth below zero", _part("num_hidden_layers", -1), r"parts\[0\] lists 2 layers, and its config has -1"),
    ("a vocabulary below zero", _part("vocab_size", -1, 1), "vocab_size is 97, and its parts say -1"),
    ("a vocabulary of more", lambda facts: facts.update(vocab_size=10**6), "vocab_size is 1000000, and its parts say 97"),
    ("a depth of more", lambda facts: facts.update(num_hidden_layers=77), "num_hidden_layers is 77, and its parts say 4"),
    ("nothing trains", lambda facts: facts.pop("trains"), "trains is None"),
    ("a word that trains", lambda facts: facts.update(trains="all"), "trains is 'all'"),
]


def test_a_config_that_brim_did_not_write_gets_one_clear_message(tmp_path: Path) -> None:
    stitched("llama-qwen2-linear").save_pretrained(tmp_path)
    whole = (tmp_path / "config.json").read_text()
    for _name, change, says in TAMPERED:
        facts = json.loads(whole)
        change(facts)
        (tmp_path / "config.json").write_text(json.dumps(facts))
        with pytest.raises(ConfigError, match=says):
            StitchLLM(tmp_path)


def test_weights_that_contradict_the_config_are_not_cut_to_it() -> None:
    heads = fresh_donor("llama")
    heads.config.num_key_value_heads = 1
    with pytest.raises(UsageError, match=r"k_proj.weight has the shape \[16, 32\], and \[8, 32\] is expected"):
        assemble(recipe(piece("llama", 0, 1, 2)), {"llama": heads})
    tables = fresh_donor("llama")
    tables.model.embed_tokens = torch.nn.Embedding(120, 32)
    tables.lm_head = torch.nn.Linear(32, 120, bias=False)
    for vocabulary in ("same", "cut"):
        with pytest.raises(UsageError, match=r"embed_tokens.weight has the shape \[120, 32\], and \[97, 32\] is expected"):
            assemble(recipe(piece("llama", 0, 1, 2), vocabulary=vocabulary), {"llama": tables})


def test_special_tokens_beyond_a_cut_are_none_and_said(capfd: pytest.CaptureFixture[str]) -> None:
    longer = fresh_donor("llama", vocab_size=100, pad_token_id=99, eos_token_id=[98, 2])
    longer.generation_config.pad_token_id, longer.generation_config.eos_token_id = 99, [98, 2]
    given = recipe(piece("a", 0, 1), piece("llama", 2), vocabulary="cut")
    model = assemble(given, {"a": longer, "llama": donor("llama")})
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id, config.bos_token_id) == (None, [2], 1)
    said = capfd.readouterr().err
    assert "pad_token_id is 99 in the first donor, beyond the 97 tokens that are left: here it is none." in said
    assert "eos_token_id is [98, 2] in the first donor" in said
    ids, mask = padded([tokens(1, length, seed=length)[0] for length in (6, 3)], left=True)
    first = int(model.generate(ids, attention_mask=mask, max_new_tokens=1)[0, -1])
    spoken = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=first)
    assert int(spoken.max()) < 97
    torch.testing.assert_close(export(model)(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


def test_tokenizers_are_compared_without_a_tokenizer_json(tmp_path: Path) -> None:
    def write(name: str, step: int, kind: str = "GPT2Tokenizer") -> tuple[str, Path]:
        folder = tmp_path / name
        folder.mkdir()
        words = {f"w{number * step % 97}": number for number in range(97)}
        (folder / "vocab.json").write_text(json.dumps(words))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        return name, folder

    one, same, other = write("one", 1), write("same", 1), write("other", 5)
    refuse_other_tokens(one, same, 97)
    with pytest.raises(UsageError, match="number 1 is 'w1' in one and 'w5' in the other"):
        refuse_other_tokens(one, other, 97)
    for _name, folder in (one, other):
        (folder / "merges.txt").unlink()
        (folder / "vocab.json").rename(folder / "spiece.model")  # which nobody can read
    with pytest.raises(UsageError, match="Donors one and other have different tokenizers: their spiece.model is not the same"):
        refuse_other_tokens(one, other, 97)
