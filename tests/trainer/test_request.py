"""What a training may be asked for, checked before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.errors import UsageError
from brim.trainer.request import read_request

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
ROW = '{"prompt": "a", "response": "b"}\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(ROW, encoding="utf-8")
    return folder


def test_what_is_given_is_kept_with_paths_that_mean_the_same_elsewhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = read_request("model", {"data": "rows.jsonl", "epochs": 2, "method": "lora", "memory": "1GiB"}, None)
    assert request.asked == {
        "model": str(model), "data": str(tmp_path / "rows.jsonl"), "epochs": 2, "method": "lora", "memory": "1GiB",
    }  # fmt: skip
    assert request.memory == 2**30
    assert request.settings.method == "lora"
    assert request.pinned == {"method": "lora"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 0}, "--epochs 0"),
        ({"max_steps": 1.5}, "--max-steps 1.5"),
        ({"seed": -1}, "--seed -1"),
        ({"learning_rate": float("nan")}, "--learning-rate nan"),
        ({"schedule": "cosinus"}, "linear"),
        ({"loss_on": "prompt"}, "answer, all"),
        ({"eval_split": 1.5}, "--eval-split 1.5"),
        ({"eval_split": 0.1, "eval_data": "x"}, "--eval-data and --eval-split"),
        ({"memory": "much"}, "much"),
        ({"workers": -1}, "--workers -1"),
        ({"gpus": 0}, "gpus"),
        ({"sharding": "zero4"}, "zero3"),
        ({"speeds": "1,0"}, "--speeds 1,0"),
        ({"launch": "mpirun"}, "torchrun, accelerate"),
        ({"speeds": "0,1"}, "--speeds 0"),
        ({"rendezvous": "first"}, "host:29500"),
        ({"epoch": 3}, "'epochs'"),
        ({"precision": "bf32"}, "fp32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_possible_is_told_with_its_name(given: dict[str, Any], words: str, model: Path) -> None:
    with pytest.raises(UsageError) as told:
        read_request(model, {"data": model.parent / "rows.jsonl", **given}, None)
    assert words in told.value.message + (told.value.hint or "")


def test_without_a_model_or_data_it_is_said_what_to_type(model: Path) -> None:
    with pytest.raises(UsageError, match="no model") as told:
        read_request(None, {"data": "x"}, None)
    assert "brim train MODEL --data FILE" in str(told.value.hint)
    with pytest.raises(UsageError, match="no training data"):
        read_request(model, {}, None)


def test_a_folder_that_is_no_run_cannot_go_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run that could go on"):
        read_request(None, {}, tmp_path)


def test_reading_a_request_imports_neither_torch_nor_transformers(model: Path) -> None:
    program = (
        "import sys; from brim.trainer.request import read_request; "
        f"read_request({str(model)!r}, {{'data': {str(model.parent / 'rows.jsonl')!r}}}, None); "
        "print([name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[]"
