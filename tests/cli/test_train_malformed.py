"""`brim train` on a malformed file: exit code 2, the place and the reason, and nothing written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainer.data.malformed import ALL, STRUCTURAL, Malformed

if TYPE_CHECKING:
    from tests.conftest import Cli

pytest.importorskip("brim.cli.train")

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 330, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
OF_TOKENS = [bad for bad in ALL if bad not in STRUCTURAL]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def refused(cli: Cli, model: Path, bad: Malformed, folder: Path, *more: str) -> None:
    path = bad.write(folder)
    before = sorted(folder.rglob("*"))
    columns = ",".join(f"{meaning}={name}" for meaning, name in (bad.columns or {}).items())
    named = ("--columns", columns) if columns else ()
    ended = cli("train", str(model), "--data", str(path), "--task", bad.task, *named, *more, "-o", str(folder / "run"))
    assert ended.code == 2, ended.err
    assert not ended.out
    for word in bad.words:
        assert word in ended.err
    assert sorted(folder.rglob("*")) == before
    assert not list(Path(os.environ["BRIM_CACHE"]).glob("data/*"))


@pytest.mark.parametrize("bad", STRUCTURAL, ids=lambda bad: bad.name)
def test_a_malformed_file_is_refused_with_its_place_before_anything_is_written(
    cli: Cli, model: Path, bad: Malformed, tmp_path: Path
) -> None:
    refused(cli, model, bad, tmp_path)


@pytest.mark.parametrize("bad", OF_TOKENS, ids=lambda bad: bad.name)
def test_what_only_a_tokenizer_finds_out_is_refused_too(cli: Cli, model: Path, bad: Malformed, tmp_path: Path) -> None:
    from tests.trainer.data.tokenizers_here import CHATML, tokenizer

    tokenizer(template=CHATML).save_pretrained(model)
    refused(cli, model, bad, tmp_path, "--max-length", "64", "--device", "cpu", "--from-scratch", "--no-probe", "--no-verify")
