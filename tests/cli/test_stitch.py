"""`brim stitch`: what it shows, what it writes, and one clear message for every recipe that cannot be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from brim.errors import UsageError
from brim.proofs.verify import verify as really_verify
from brim.stitching import proving
from brim.stitching.assembling import stitch
from brim.stitching.model import StitchedModel
from brim.stitching.reading import read_recipe
from brim.stitching.writing import check_place, write as write_model
from tests.conftest import Cli
from tests.stitching.small import fresh_donor, tokens

TWO = """
name: llama-qwen
donors: {small: ./llama, big: ./qwen2}
layers:
  - {donor: small, layers: 0-1}
  - {donor: big, layers: 1-2, adapter: linear}
"""
SAME = "donors: {small: ./llama}\nlayers: [{donor: small, layers: 0-1}, {donor: small, layers: [2, 2]}]\n"
CATALOGUE = """
donors: {llama: llama-3.2-1b, qwen: qwen2.5-0.5b}
layers:
  - {donor: llama, layers: 0-3}
  - {donor: qwen, layers: 12-14, adapter: {kind: low-rank, rank: 64}}
  - {donor: llama, layers: none, adapter: mlp}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Donors as files, made once."""
    folder = tmp_path_factory.mktemp("donors")
    for family in ("llama", "qwen2"):
        fresh_donor(family).save_pretrained(folder / family)
    fresh_donor("gpt2", vocab_size=90).save_pretrained(folder / "gpt2")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A folder with donors and nothing else."""
    for donor in made.iterdir():
        (tmp_path / donor.name).symlink_to(donor, target_is_directory=True)
    return tmp_path


def write(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return str(folder / "recipe.yaml")


def test_a_dry_run_needs_no_weights_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    ended = cli("stitch", write(tmp_path, CATALOGUE), "--dry-run", "--gpu", "t4", "--seq-len", "256")
    assert ended.code == 0, ended.err
    for words in (
        "7 layers", "embedding + 0-3", "LlamaForCausalLM", "Qwen2ForCausalLM", "12-14", "norm and head", "low-rank, rank 64", "2048 -> 896",
        "mlp, width 2048", "frozen", "trains", "128,256 tokens", "sdpa", "32,768", "1 x 256 tokens", "t4", "yes", "Assumed",
    ):  # fmt: skip
        assert words in ended.out, words
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_dry_run_as_json_is_one_document(cli: Cli, folder: Path) -> None:
    ended = cli("stitch", write(folder, TWO), "--dry-run", "--seq-len", "64", "--micro-batch", "2", "--json")
    document = json.loads(ended.out)
    assert document["schema"] == "brim.stitch/1"
    assert [(piece["donor"], piece["layers"], piece["width"]) for piece in document["pieces"]] == [
        ("small", [0, 1], 32),
        ("big", [1, 2], 48),
    ]
    (adapter,) = document["adapters"]
    assert adapter == {"kind": "linear", "from": 32, "to": 48, "parameters": 33 * 48, "trainable_parameters": 33 * 48}
    assert document["trainable_parameters"] == 33 * 48
    assert document["total_parameters"] == sum(each["parameters"] for each in (*document["pieces"], adapter))
    model = stitch(read_recipe(folder / "recipe.yaml"))
    assert document["total_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert [each["device"] for each in document["estimates"]] == ["t4", "rtx-3090", "rtx-4090-24gb", "a100-80gb"]
    assert all(each["trainable_parameters"] == 33 * 48 and each["settings"]["micro_batch"] == 2 for each in document["estimates"])


def test_a_stitch_loads_without_its_donors(cli: Cli, folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "verify", lambda model, **keywords: really_verify(model, proofs=["causality"], **keywords))
    recipe = write(folder, TWO)
    expected = stitch(read_recipe(recipe))
    ended = cli("stitch", recipe, "-o", str(folder / "new"), "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["output"] == str(folder / "new")
    assert document["verification"]["schema"] == "brim.verify/1"
    assert {proof["verdict"] for proof in document["verification"]["proofs"]} == {"pass"}
    shutil.move(folder / "new", folder / "elsewhere")
    for name in ("llama", "qwen2"):
        (folder / name).unlink()
    loaded = StitchedModel.from_pretrained(folder / "elsewhere")
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    assert loaded.trainable_parameters == 33 * 48
    assert (made / "llama" / "config.json").is_file()


def test_the_screen_says_where_it_is_and_what_comes_next(cli: Cli, folder: Path) -> None:
    ended = cli("stitch", write(folder, TWO), "-o", str(folder / "new"))
    assert ended.code == 0, ended.err
    for words in ("llama-qwen: 4 layers", "causality", "accumulation", "Next", "StitchLLM"):
        assert words in ended.out, words
    assert f"Written: {folder / 'new'}" in ended.err
    assert "it/s" not in ended.err


def test_a_stitch_within_a_family_is_written_as_an_ordinary_model(cli: Cli, folder: Path) -> None:
    recipe = write(folder, SAME)
    assert cli("stitch", recipe, "-o", str(folder / "new"), "--as-family", "--no-verify").code == 0
    loaded = AutoModelForCausalLM.from_pretrained(folder / "new")
    assert isinstance(loaded, LlamaForCausalLM)
    ids = tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, stitch(read_recipe(recipe))(ids).logits, rtol=1e-5, atol=1e-5)
    assert "LlamaForCausalLM" in cli("stitch", recipe, "--dry-run", "--as-family").out


def test_where_nothing_trains_a_dry_run_says_so(cli: Cli, folder: Path) -> None:
    ended = cli("stitch", write(folder, SAME), "--dry-run")
    assert ended.code == 0
    assert "Nothing trains, so there is no step to estimate." in ended.out


def two(
    first: str = "donor: small, layers: 0-1", second: str = "donor: big, layers: 1-2, adapter: linear", more: str = ""
) -> str:
    return f"donors: {{small: ./llama, big: ./qwen2, old: ./gpt2, none: ./empty}}\nlayers: [{{{first}}}, {{{second}}}]\n{more}\n"


BAD = [
    ("missing layer", two("donor: small, layers: 0-3"), "Donor small has no layer 3: it has 3 layers, 0 to 2."),
    ("widths that do not meet", two(second="donor: big, layers: 1"), "small is 32 wide and big 48, and no adapter stands between them."),
    ("identity between widths", two(second="donor: big, layers: 1, adapter: identity"), "an identity cannot join them"),
    ("different vocabularies", two(second="donor: old, layers: 1, adapter: linear"), "small, has 97 tokens, and the last one, old, has 90"),
    ("a folder that is no model", two("donor: none, layers: 0"), "is not a model folder: it has no config.json"),
    ("a folder that is not there", "donors: {a: ./nowhere}\nlayers: [{donor: a, layers: 0}]", "There is no file or folder"),
    ("an unknown model", "donors: {a: gpt22}\nlayers: [{donor: a, layers: 0}]", "There is no model 'gpt22'"),
    ("a donor without weights", "donors: {a: gpt2-large}\nlayers: [{donor: a, layers: 0}]", "is an entry of the catalogue, which has no weights"),
    ("a donor that nobody named", two("donor: smal, layers: 0"), "no donor has that name"),
    ("a backward range", two("donor: small, layers: 2-0"), "piece 1: the range '2-0' is empty"),
    ("an unknown key", two(more="trains: all"), "there is no key 'trains'"),
    ("training what is not there", two(more="train: haed"), "Nothing in this stitch is called 'haed'"),
    ("an adapter before the first", two("donor: small, layers: 0, adapter: linear"), "An adapter stands before the first piece"),
    ("a rank for a linear", two(second="donor: big, layers: 1, adapter: {kind: linear, rank: 4}"), "rank belongs to the adapter low-rank"),
    ("no layers at all", two("donor: small, layers: none", "donor: big, layers: none, adapter: linear"), "No piece of the recipe has a layer"),
    ("an encoder", "donors: {a: bert-base-uncased}\nlayers: [{donor: a, layers: 0}]", "bert"),
    ("not YAML", "donors: {", "is not valid YAML"),
    ("empty", "", "is empty"),
    ("a key twice", "donors: {a: gpt2}\ndonors: {a: gpt2}\n", "appears twice"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_recipe_that_cannot_be_gets_one_message(cli: Cli, folder: Path, text: str, says: str) -> None:
    (folder / "empty").mkdir()
    before = sorted(folder.iterdir())
    ended = cli("stitch", write(folder, text), "-o", str(folder / "new"))
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert says in ended.err
    assert ended.err.count("brim: ") == 1
    assert "Traceback" not in ended.err
    assert sorted(folder.iterdir()) == sorted([*before, folder / "recipe.yaml"])


def test_what_was_asked_for_must_make_sense(cli: Cli, folder: Path) -> None:
    recipe = write(folder, TWO)
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("x")
    for arguments, says in (
        ((), "-o is needed"),
        (("-o", ""), "-o is needed"),
        (("-o", str(folder / "new"), "--gpu", "t4"), "--gpu belongs to --dry-run"),
        (("-o", str(folder / "recipe.yaml")), "is a file, and a folder is needed"),
        (("-o", str(folder / "mine")), "exists already and is not empty"),
        (("-o", str(folder / "mine"), "--force"), "is not a model, and brim does not delete it"),
        (("-o", str(folder / "llama"), "--force"), "holds the donor small, which would be gone"),
        (("-o", str(folder / "new"), "--as-family"), "no ordinary model has layers of both"),
        (("--dry-run", "--as-family"), "no ordinary model has layers of both"),
        (("--dry-run", "--gpu", "t44"), "Nearest: t4"),
    ):
        ended = cli("stitch", recipe, *arguments)
        assert ended.code == 2, arguments
        assert says in ended.err, ended.err
    assert (folder / "mine" / "thesis.txt").is_file()
    assert not (folder / "new").exists()
    assert "Cannot read the recipe" in cli("stitch", str(folder / "nowhere.yaml"), "--dry-run").err


def test_force_replaces_a_model_and_leaves_nothing_beside_it(cli: Cli, folder: Path) -> None:
    new = folder / "new"
    assert cli("stitch", write(folder, TWO), "-o", str(new), "--no-verify").code == 0
    before = sorted(folder.iterdir())
    assert cli("stitch", write(folder, SAME), "-o", str(new), "--no-verify", "--force").code == 0
    assert json.loads((new / "config.json").read_text())["num_hidden_layers"] == 4
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["notes.txt", "recipe.yaml", "checkpoint-3", ".git", "training_args.bin"])
def test_force_deletes_nothing_that_is_no_part_of_a_model(folder: Path, name: str) -> None:
    recipe = read_recipe(write(folder, SAME))
    new = folder / "new"
    fresh_donor("llama").save_pretrained(new)
    check_place(str(new), recipe, replaces=True)
    (new / name).mkdir() if "." not in name[1:] else (new / name).write_text("mine")
    with pytest.raises(UsageError, match=f"holds {name}, which is no part of a model"):
        check_place(str(new), recipe, replaces=True)
    with pytest.raises(UsageError, match=f"holds {name}, which is no part of a model"):
        write_model(None, str(new), recipe, replaces=True)


def test_force_takes_a_config_of_something_else_for_no_model(folder: Path) -> None:
    recipe = read_recipe(write(folder, SAME))
    for name, config in (("web", '{"port": 80}'), ("list", "[]"), ("broken", "{"), ("bare", '{"model_type": "llama"}')):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
        with pytest.raises(UsageError, match="is not a model, and brim does not delete it"):
            check_place(str(folder / name), recipe, replaces=True)


@pytest.mark.parametrize("moment", ["old", "new"])
def test_an_interrupt_between_two_moves_loses_no_model(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    recipe, new = read_recipe(write(folder, SAME)), folder / "new"
    model = fresh_donor("llama")
    model.save_pretrained(new)
    entries = sorted(folder.iterdir())
    really = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        moved = really(self, target)
        if moment == (target.name if target.name == "old" else self.name) and self.parent.name.startswith(".new-") == (
            moment == "new"
        ):
            monkeypatch.setattr(Path, "rename", really)
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_model(model, str(new), recipe, replaces=True)
    assert sorted(folder.iterdir()) == entries
    assert (new / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device"), KeyboardInterrupt()],
    ids=["full", "full for safetensors", "interrupted"],
)
@pytest.mark.parametrize("was_there", [False, True], ids=["new", "old"])
def test_a_write_that_fails_leaves_what_was(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, was_there: bool
) -> None:
    recipe, new = write(folder, TWO), folder / "new"
    if was_there:
        assert cli("stitch", recipe, "-o", str(new), "--no-verify").code == 0
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    entries = sorted(folder.iterdir())

    def fail(_model: Any, place: Path, **_keywords: Any) -> None:
        (Path(place) / "model.safetensors").write_text("half")
        raise error

    monkeypatch.setattr(StitchedModel, "save_pretrained", fail)
    ended = cli("stitch", recipe, "-o", str(new), "--no-verify", *(["--force"] if was_there else []))
    assert ended.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert "Traceback" not in ended.err
    assert sorted(folder.iterdir()) == entries
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_failed_proof_ends_with_1_and_keeps_what_was_written(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(model: Any, **keywords: Any) -> Any:
        found = really_verify(model, proofs=["causality"], **keywords)
        (proof,) = found.proofs
        return replace(found, proofs=(replace(proof, verdict="fail", diagnosis="Tokens see the future.", mend="Mask them."),))

    monkeypatch.setattr(proving, "verify", verify)
    ended = cli("stitch", write(folder, TWO), "-o", str(folder / "new"))
    assert ended.code == 1
    assert "Tokens see the future." in ended.out
    assert "is kept, and should not be trained" in ended.err
    assert (folder / "new" / "config.json").is_file()


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from brim.cli import main; code = main(['stitch', '--help']);"
        "print(code, [name for name in ('torch', 'transformers', 'yaml', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines()[-1] == "0 []"
    assert "--dry-run" in ended.stdout


def test_the_example_can_be_looked_at(cli: Cli) -> None:
    ended = cli(
        "stitch", str(Path(__file__).parents[2] / "examples" / "stitch.yaml"), "--dry-run", "--gpu", "t4", "--seq-len", "128"
    )
    assert ended.code == 0, ended.err
    assert "llama-qwen: 20 layers" in ended.out
