"""What the verbs of this version answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brim import find_gpu, find_model
from tests.conftest import Cli


def test_gpus_lists_at_least_45_with_their_facts(cli: Cli) -> None:
    found = json.loads(cli("gpus", "--json").out)["gpus"]
    assert len(found) >= 45
    for gpu in found:
        assert gpu["memory_bytes"] >= gpu["usable_bytes"] > 0
        assert gpu["dense_flops"]
        assert isinstance(gpu["bf16"], bool)
        assert isinstance(gpu["flash_attention"], bool)


def test_models_lists_at_least_60_each_with_its_parameters(cli: Cli) -> None:
    found = json.loads(cli("models", "--json").out)["models"]
    assert len(found) >= 60
    assert all(model["parameters"] > 10**6 and model["config"]["model_type"] for model in found)


def test_one_gpu_is_shown_with_what_was_assumed(cli: Cli) -> None:
    ended = cli("gpus", "rtx-3080*2")
    assert "rtx-3080-10gb x 2" in ended.out
    assert "the commonest variant" in ended.err
    (entry,) = json.loads(cli("gpus", "rtx-3080*2", "--json").out)["gpus"]
    assert (entry["count"], entry["usable_bytes"]) == (2, find_gpu("rtx-3080").gpu.usable_bytes)


def test_a_card_of_a_size_is_shown_without_invented_facts(cli: Cli) -> None:
    ended = cli("gpus", "24GiB")
    assert "24.0 GiB" in ended.out
    assert "only its memory is known" in ended.err
    assert "TFLOP" not in ended.out
    assert "bfloat16" not in ended.out


def test_filters_filter(cli: Cli) -> None:
    found = json.loads(cli("gpus", "--vendor", "nvidia", "--min-memory", "40GiB", "--bf16", "--json").out)["gpus"]
    assert found
    assert all(gpu["vendor"] == "nvidia" and gpu["usable_bytes"] >= 40 * 2**30 and gpu["bf16"] for gpu in found)
    models = json.loads(cli("models", "--task", "seq2seq", "--search", "t5", "--json").out)["models"]
    assert models
    assert all(model["task"] == "seq2seq" for model in models)


def test_one_model_is_shown_to_the_digit(cli: Cli) -> None:
    out = cli("models", "meta-llama/Llama-3.1-8B-Instruct").out
    assert "8,030,261,248" in out
    assert "llama-3.1-8b" in out


def test_a_model_of_ones_own_is_counted(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "brim_own_model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(10, 10)\n")
    (entry,) = json.loads(cli("models", "brim_own_model:make", "--json").out)["models"]
    assert (entry["parameters"], entry["origin"]) == (110, "function")
    (tmp_path / "config.json").write_text(json.dumps(dict(find_model("gpt2").config or {})))
    (entry,) = json.loads(cli("models", str(tmp_path), "--json").out)["models"]
    assert (entry["parameters"], entry["origin"], entry["has_weights"]) == (124_439_808, "folder", False)


def test_env_is_the_block_for_a_bug_report(cli: Cli) -> None:
    ended = cli("env")
    for text in ("brim", "Python", "torch", "transformers", "Memory", "/dev/shm", "Cache folder"):
        assert text in ended.out
    document = json.loads(cli("env", "--json").out)
    assert document["schema"] == "brim.env/1"
    assert document["machine"]["host"]["memory_bytes"] > 0
