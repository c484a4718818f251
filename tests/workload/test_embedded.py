"""What ships with brim for its demonstration: small, complete, and the same everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from brim.workload import embedded
from brim.workload.columns import Layout
from brim.workload.embedded import making
from brim.workload.reading import read_rows

FOLDER = Path(embedded.__file__).parent


def test_the_data_is_what_its_maker_makes() -> None:
    assert embedded.data_file().read_text(encoding="utf-8") == making.data_text()


def test_the_rows_are_of_two_languages_and_none_is_there_twice() -> None:
    rows = list(read_rows(embedded.data_file()))
    assert len(rows) == making.ROWS
    assert len({json.dumps(row) for row in rows}) == making.ROWS
    assert Layout.of(rows[0]).name == "prompt/response"
    assert all(row["prompt"].strip() and row["response"].strip() for row in rows)
    chinese = sum(bool(re.search(r"[\u4e00-\u9fff]", row["prompt"])) for row in rows)
    assert 0.35 < chinese / len(rows) < 0.65


def test_most_rows_are_short_and_some_are_long() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    lengths = sorted(len(tokenizer.encode(f"{row['prompt']}\n{row['response']}").ids) for row in read_rows(embedded.data_file()))
    assert lengths[0] <= 10
    assert lengths[len(lengths) // 2] <= 30
    assert lengths[len(lengths) * 9 // 10] >= 100
    assert 280 <= lengths[-1] <= 320
    assert tokenizer.get_vocab_size() == making.VOCABULARY == json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    text = "Any text, 任何文字, ünïcode 😀"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 400_000


def test_the_model_is_complete_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    automatic: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    folders = [embedded.write_model(tmp_path / name, seed) for name, seed in (("one", 0), ("two", 0), ("other", 1))]
    assert torch.rand(1) == expected
    one, two, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert one == two != other
    model, told = automatic.from_pretrained(folders[0], output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folders[0])
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (model.config.pad_token_id, model.config.eos_token_id) == (0, 2)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
