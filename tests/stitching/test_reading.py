"""A recipe file says what it means, or one sentence says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.cli._stitch_view import told_layers
from brim.errors import ConfigError
from brim.stitching.reading import read_recipe
from brim.stitching.recipe import Adapter, Piece, Recipe

WHOLE = """
name: llama-qwen
donors:
  small: ./llama-small
  big: qwen2.5-0.5b
layers:
  - donor: small
    layers: 0-5
  - donor: big
    layers: 12:23
    adapter: {kind: low-rank, rank: 64}
  - donor: big
    layers: [0, 2, 5-6]
  - donor: small
    layers: none
    adapter: linear
train: [adapters, head, big]
vocabulary: cut
attention: eager
dtype: bfloat16
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def two(**changes: Any) -> dict[str, Any]:
    """A mapping that is right but for what is changed."""
    layers = [{"donor": "a", "layers": "0-1"}, {"donor": "b", "layers": "2-3", "adapter": "linear"}]
    return {"donors": {"a": "gpt2", "b": "qwen2.5-0.5b"}, "layers": layers, **changes}


def of_layers(value: object) -> tuple[int, ...]:
    return read_recipe(two(layers=[{"donor": "a", "layers": value}])).pieces[0].layers


def test_every_key_is_read(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, WHOLE)) == Recipe(
        donors={"small": str(tmp_path / "llama-small"), "big": "qwen2.5-0.5b"},
        pieces=(
            Piece(donor="small", layers=(0, 1, 2, 3, 4, 5)),
            Piece(donor="big", layers=tuple(range(12, 23)), adapter=Adapter(kind="low-rank", rank=64)),
            Piece(donor="big", layers=(0, 2, 5, 6)),
            Piece(donor="small", layers=(), adapter=Adapter(kind="linear")),
        ),
        trains=("adapters", "head", "big"),
        vocabulary="cut",
        attention="eager",
        dtype="bfloat16",
        name="llama-qwen",
    )


def test_what_is_not_said_is_the_default() -> None:
    recipe = read_recipe(two())
    assert (recipe.trains, recipe.vocabulary, recipe.attention, recipe.dtype, recipe.name) == (
        ("adapters",), "same", None, "float32", "stitched",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0-3", (0, 1, 2, 3)), ("12:15", (12, 13, 14)), ("1:3", (1, 2)), ("4 - 5", (4, 5)), ("7", (7,)), ("[3, 1, 1]", (3, 1, 1)),
        ("[0-1, 5]", (0, 1, 5)), ("none", ()), ("[]", ()), ("all", tuple(range(12))), ("10:60", tuple(range(10, 60))),
    ],
)  # fmt: skip
def test_layers_are_written_in_several_ways(tmp_path: Path, text: str, layers: tuple[int, ...]) -> None:
    """Among them 12:15, which YAML itself takes for 735: twelve minutes and fifteen seconds."""
    recipe = read_recipe(write(tmp_path, f"donors: {{a: gpt2}}\nlayers:\n  - donor: a\n    layers: {text}\n"))
    assert recipe.pieces[0].layers == layers


@given(st.integers(0, 9_000), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_both_kinds_of_ranges_agree_with_each_other_and_with_what_is_shown(first: int, count: int) -> None:
    wanted = tuple(range(first, first + count))
    assert of_layers(f"{first}-{first + count - 1}") == of_layers(f"{first}:{first + count}") == of_layers(list(wanted)) == wanted
    shown = told_layers(wanted)
    assert of_layers(int(shown) if count == 1 else shown) == wanted


def test_donors_are_looked_for_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for name in ("gpt2", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    text = "donors: {a: gpt2, b: mine, c: ../elsewhere, d: org/name, e: /there, f: mine/config.json}\nlayers: [{donor: a, layers: 0}]\n"
    donors = read_recipe(write(tmp_path, text)).donors
    assert donors == {
        "a": "gpt2",  # a folder that merely has the name of a model is not taken for one
        "b": str(tmp_path / "mine"),
        "c": str(tmp_path / ".." / "elsewhere"),
        "d": "org/name",
        "e": "/there",
        "f": str(tmp_path / "mine" / "config.json"),
    }


def test_all_asks_the_donor_how_deep_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 5, "architectures": ["LlamaForCausalLM"]})
    )
    recipe = read_recipe(two(donors={"a": str(tmp_path)}, layers=[{"donor": "a", "layers": "all"}]))
    assert recipe.pieces[0].layers == (0, 1, 2, 3, 4)


def test_a_donor_without_layers_is_mentioned_and_no_error() -> None:
    said: list[str] = []
    read_recipe(two(layers=[{"donor": "a", "layers": 0}]), say=said.append)
    assert said == ["The recipe: no layers are taken of b."]


WRONG_MAPPINGS: list[tuple[str, dict[Any, Any], str]] = [
    ("no donors", {"layers": []}, "it has no 'donors'"),
    ("no layers", {"donors": {"a": "gpt2"}}, "it has no 'layers'"),
    ("unknown key", two(layer=[]), "there is no key 'layer'. Did you mean 'layers'?"),
    ("key that is no text", dict([*two().items(), (5, 1)]), "the name 5 is not text"),
    ("donors of nothing", two(donors=None), "'donors' should hold `name: model` lines, and is nothing"),
    ("empty donors", two(donors={}), "and is an empty mapping"),
    ("donors as a list", two(donors=["gpt2"]), "and is a list"),
    ("donor that is a number", two(donors={"a": 5, "b": "x"}), "'donors: a' should be text, and is 5"),
    ("donor that is nothing", two(donors={"a": None, "b": "x"}), "'donors: a' should be text, and is nothing"),
    ("donor that is blank", two(donors={"a": "  ", "b": "x"}), "'donors: a' should be text"),
    ("donor named yes", two(donors={True: "gpt2"}), "the name True is not text"),
    ("layers as text", two(layers="0-5"), "'layers' should be a list of pieces, and is '0-5'"),
    ("empty layers", two(layers=[]), "and is an empty list"),
    ("layers of nothing", two(layers=None), "and is nothing"),
    ("piece that is text", two(layers=["a"]), "'piece 1' should hold `donor: ...` and `layers: ...`, and is 'a'"),
    ("piece without donor", two(layers=[{"layers": 0}]), "piece 1 has no 'donor'"),
    ("piece without layers", two(layers=[{"donor": "a"}]), "piece 1 has no 'layers'"),
    ("piece with an unknown key", two(layers=[{"donor": "a", "layers": 0, "adaptor": "mlp"}]), "piece 1: there is no key 'adaptor'. Did you mean 'adapter'?"),
    ("donor nobody named", two(layers=[{"donor": "c", "layers": 0}]), "piece 1 takes layers of 'c', and no donor has that name. Donors: a, b."),
    ("donor misspelt", two(donors={"small": "gpt2"}, layers=[{"donor": "smal", "layers": 0}]), "Did you mean 'small'?"),
    ("backward range", two(layers=[{"donor": "a", "layers": "5-2"}]), "piece 1: the range '5-2' is empty. Write 0-5"),
    ("empty range", two(layers=[{"donor": "a", "layers": "5:5"}]), "piece 1: the range '5:5' is empty"),
    ("text for layers", two(layers=[{"donor": "a", "layers": "first"}]), "piece 1: 'first' names no layers"),
    ("trailing letter", two(layers=[{"donor": "a", "layers": "0-5x"}]), "piece 1: '0-5x' names no layers"),
    ("negative", two(layers=[{"donor": "a", "layers": -1}]), "layers are counted from 0, and -1 is less"),
    ("negative range", two(layers=[{"donor": "a", "layers": "-3-5"}]), "'-3-5' names no layers"),
    ("number as text", two(layers=[{"donor": "a", "layers": "5"}]), "'5' names no layers"),
    ("truth for layers", two(layers=[{"donor": "a", "layers": True}]), "true names no layers"),
    ("nothing for layers", two(layers=[{"donor": "a", "layers": None}]), "nothing names no layers"),
    ("fraction", two(layers=[{"donor": "a", "layers": 1.5}]), "1.5 names no layers"),
    ("list with a word", two(layers=[{"donor": "a", "layers": [0, "all"]}]), "'all' names no layers"),
    ("too deep", two(layers=[{"donor": "a", "layers": "0-99999999"}]), "no model has a layer 99999999"),
    ("unknown adapter", two(layers=[{"donor": "a", "layers": 0, "adapter": "liner"}]), "'piece 1: adapter: kind' cannot be 'liner'. Did you mean 'linear'?"),
    ("adapter of nothing", two(layers=[{"donor": "a", "layers": 0, "adapter": None}]), "and is nothing"),
    ("adapter without kind", two(layers=[{"donor": "a", "layers": 0, "adapter": {"rank": 4}}]), "piece 1: adapter has no 'kind'"),
    ("adapter with an unknown key", two(layers=[{"donor": "a", "layers": 0, "adapter": {"kind": "mlp", "with": 4}}]), "Did you mean 'width'?"),
    ("rank as text", two(layers=[{"donor": "a", "layers": 0, "adapter": {"kind": "low-rank", "rank": "64"}}]), "rank' should be a whole number above 0, and is '64'"),
    ("rank of nothing", two(layers=[{"donor": "a", "layers": 0, "adapter": {"kind": "low-rank", "rank": 0}}]), "and is 0"),
    ("train of nothing", two(train=None), "'train' should be text, and is nothing"),
    ("train with a number", two(train=["adapters", 3]), "'train' should be text, and is 3"),
    ("unknown vocabulary", two(vocabulary="cuts"), "'vocabulary' cannot be 'cuts'. Did you mean 'cut'?"),
    ("unknown attention", two(attention="flash3"), "'attention' cannot be 'flash3'. Did you mean 'flash2'?"),
    ("dtype of nothing", two(dtype=None), "'dtype' cannot be nothing. One of: float32, bfloat16, float16"),
    ("name that is a number", two(name=7), "'name' should be text, and is 7"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), [row[1:] for row in WRONG_MAPPINGS], ids=[row[0] for row in WRONG_MAPPINGS])
def test_what_is_wrong_is_told_in_one_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(given)
    assert caught.value.message.startswith("The recipe: ")
    assert "\n" not in caught.value.message
    assert says in f"{caught.value.message} {caught.value.hint}"


WRONG_FILES = [
    ("not yaml", "donors: [", "is not valid YAML in line 1"),
    ("empty", "", "is empty."),
    ("only a comment", "# later\n", "is empty."),
    ("a list", "- donors\n", "it should be a mapping with donors and layers, and is a list"),
    ("a word", "donors\n", "and is 'donors'"),
    ("a key twice", "donors: {a: gpt2}\ndonors: {a: gpt2}\n", "in line 2: the key 'donors' appears twice"),
    ("a donor twice", "donors:\n  a: gpt2\n  a: gpt2\n", "in line 3: the key 'a' appears twice"),
    ("a key of a piece twice", "donors: {a: gpt2}\nlayers:\n  - donor: a\n    layers: 0\n    layers: 1\n", "in line 5: the key 'layers' appears twice"),
    ("code", "donors: !!python/object/apply:os.getcwd []\n", "is not valid YAML in line 1"),
    ("a key that is a list", "? [a]\n: 1\n", "is not valid YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), [row[1:] for row in WRONG_FILES], ids=[row[0] for row in WRONG_FILES])
def test_a_file_that_cannot_be_a_recipe_is_told_by_its_name(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(path) in caught.value.message
    assert says in caught.value.message


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the recipe .*nowhere.yaml: No such file"):
        read_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a folder, and a recipe is a YAML file"):
        read_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_recipe(tmp_path / "latin.yaml")


def test_an_anchor_may_be_merged(tmp_path: Path) -> None:
    text = "donors: {a: gpt2}\nlayers:\n  - &base {donor: a, layers: 0}\n  - {<<: *base, layers: 1}\n"
    assert [piece.layers for piece in read_recipe(write(tmp_path, text)).pieces] == [(0,), (1,)]
