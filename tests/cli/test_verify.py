"""`brim verify` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brim.records import Verification

if TYPE_CHECKING:
    from tests.conftest import Cli


def test_the_model_of_the_story_fails_with_the_diagnosis_and_the_mend(cli: Cli) -> None:
    ended = cli("verify", "tests.cli.stitched_by_hand:broken")
    assert ended.code == 1
    assert "✗  causality" in ended.out
    assert "✗  batch" in ended.out
    assert "receives a 2-D mask" in ended.out
    assert "create_causal_mask" in ended.out
    assert "[2, 24]" in ended.out
    assert "[2, 1, 24, 24]" in ended.out
    assert "Not right:" in ended.out


def test_the_same_model_with_the_mend_passes_under_every_attention(cli: Cli) -> None:
    ended = cli("verify", "tests.cli.stitched_by_hand:mended", "--attention", "all", "--json")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert document["schema"] == "brim.verify/1"
    assert {proof["attention"] for proof in document["proofs"]} == {"eager", "sdpa"}
    assert {proof["verdict"] for proof in document["proofs"]} == {"pass"}
    assert any("flash2" in note for note in document["notes"])


def test_a_shrunk_copy_says_what_it_is_and_a_file_holds_the_result(cli: Cli, tmp_path: Path) -> None:
    ended = cli("verify", "qwen2.5-7b", "-o", str(tmp_path / "proofs.json"))
    assert ended.code == 0
    assert "A shrunk copy: 28 to 2 layers" in ended.out
    assert "Right at every batch size" in ended.out
    assert Verification.read(tmp_path / "proofs.json").is_proven


def test_several_models_get_a_line_each_and_one_document(cli: Cli) -> None:
    names = ("tests.cli.stitched_by_hand:broken", "tests.cli.stitched_by_hand:mended")
    ended = cli("verify", *names, "--proofs", "causality")
    assert ended.code == 1
    assert f"✗  {names[0]}" in ended.out
    assert f"✓  {names[1]}" in ended.out
    assert "of which 1 are not right" in ended.out
    document = json.loads(cli("verify", *names, "--proofs", "causality", "--json").out)
    assert document["schema"] == "brim.verifications/1"
    assert [each["model"] for each in document["models"]] == list(names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing-like-this",), "no model 'nothing-like-this'"),
        (("llama-3.1-8b", "--full", "--shrunk"), "exclude each other"),
        (("llama-3.1-8b", "--proofs", "spelling"), "no proof 'spelling'"),
        (("llama-3.1-8b", "-o", "/nowhere/at/all.json"), "in a folder that exists"),
        (("llama-3.1-8b", "--attention", "fast"), "fast"),
        (("llama-3.1-8b", "qwen2.5-7b", "-o", "proofs.json"), "-o holds one result"),
        (("t5-small", "--task", "masked-lm"), "no model of the type t5"),
    ],
)
def test_wrong_wishes_end_with_2_and_one_message(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    ended = cli("verify", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err
