"""`brim demo`: the whole way, on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_goes_the_whole_way(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ended = cli("demo", "-o", str(tmp_path / "demo"), "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["schema"] == "brim.demo/1"
    assert document["plan"]["fits"]
    assert {proof["verdict"] for proof in document["verify"]["proofs"]} == {"pass"}
    assert document["train"]["last_loss"] < document["train"]["first_loss"]
    assert document["out_of_memory"]["splits"] > 0
    promise = document["promise"]
    assert promise["same_sequences"] == promise["steps"]
    assert promise["largest_difference_of_loss"] < 1e-3
    assert promise["broken"] == []
    assert Path(document["report"]["path"]).is_file()


def test_a_folder_that_holds_something_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine", encoding="utf-8")
    ended = cli("demo", "-o", str(tmp_path))
    assert ended.code == 2
    assert "is not empty" in ended.err
