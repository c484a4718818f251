"""A model is whatever people point at: a name, a folder, a config.json, a function. What is wrong is said in one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from brim import RunError, UnknownNameError, UsageError, find_model

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


def _folder(path: Path, config: object, *, weights: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return path


def _built(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.build("meta").parameters())


def test_a_catalogue_model_is_built_without_memory() -> None:
    model = find_model("meta-llama/Llama-3.1-70B")
    assert (model.origin, model.name) == ("catalogue", "llama-3.1-70b")
    module = model.build()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert sum(parameter.numel() for parameter in module.parameters()) == model.parameters() == 70_553_706_496


def test_a_folder_with_only_a_config_serves(tmp_path: Path) -> None:
    model = find_model(str(_folder(tmp_path / "tiny", LLAMA)))
    assert (model.origin, model.class_name, model.has_weights) == ("folder", "LlamaForCausalLM", False)
    assert model.parameters() == _built(model)
    assert find_model(str(_folder(tmp_path / "tiny", LLAMA, weights=True))).has_weights


def test_a_config_file_serves_too(tmp_path: Path) -> None:
    path = _folder(tmp_path / "tiny", LLAMA) / "config.json"
    assert find_model(str(path)).parameters() == find_model(str(path.parent)).parameters()


def test_a_folder_wins_over_a_catalogue_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path / "gpt2", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert find_model("gpt2").origin == "folder"


def test_a_real_saved_model_resolves(tmp_path: Path) -> None:
    module = find_model(str(_folder(tmp_path / "tiny", LLAMA))).build("cpu")
    module.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    model = find_model(str(tmp_path / "saved"))
    assert model.has_weights
    assert model.parameters() == sum(parameter.numel() for parameter in module.parameters())


def test_a_config_without_architectures_means_the_familys_own_task(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert find_model(str(_folder(tmp_path, config))).class_name == "LlamaForCausalLM"


def test_a_family_without_a_formula_is_built_and_counted(tmp_path: Path) -> None:
    config = {
        "model_type": "xlnet",
        "architectures": ["XLNetLMHeadModel"],
        "d_model": 32,
        "n_layer": 1,
        "n_head": 2,
        "d_inner": 64,
        "vocab_size": 99,
    }
    model = find_model(str(_folder(tmp_path, config)))
    assert model.parameters() == _built(model) > 0


def test_an_untied_t5_has_an_output_layer_of_its_own() -> None:
    model = find_model("flan-t5-small")
    module: Any = model.build("meta")
    assert module.lm_head.weight is not module.shared.weight
    assert _built(model) == model.parameters()


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    path = tmp_path / f"brim_test_models_{abs(hash(str(tmp_path)))}.py"
    path.write_text(
        "import torch\nWIDTH = 8\n"
        "def tiny(): return torch.nn.Linear(WIDTH, 4)\n"
        "def wrong(): return 'a model'\n"
        "def broken(): raise ValueError('no weights')\n"
        "class Holder:\n    @staticmethod\n    def make(): return torch.nn.Linear(2, 2)\n"
    )
    return path


def test_a_function_of_the_current_folder_serves(module_file: Path) -> None:
    model = find_model(f"{module_file.stem}:tiny")
    assert (model.origin, model.parameters()) == ("function", 36)
    assert find_model(f"{module_file.stem}:Holder.make").parameters() == 6
    assert next(model.build("cpu").parameters()).device == torch.device("cpu")


def test_a_function_that_is_wrong_is_told(module_file: Path) -> None:
    stem = module_file.stem
    with pytest.raises(UsageError, match="has no huge; it has: tiny, wrong, broken"):
        find_model(f"{stem}:huge")
    with pytest.raises(UsageError, match="is not a function"):
        find_model(f"{stem}:WIDTH")
    with pytest.raises(UsageError, match=r"returned str, and a torch.nn.Module is needed"):
        find_model(f"{stem}:wrong").parameters()
    with pytest.raises(RunError, match="failed: ValueError: no weights"):
        find_model(f"{stem}:broken").parameters()
    with pytest.raises(UsageError, match="There is no module no_such_place"):
        find_model("no_such_place:tiny")


def test_a_module_that_fails_on_import_is_told(module_file: Path) -> None:
    module_file.with_name("brim_test_syntax.py").write_text("def broken(:\n")
    with pytest.raises(RunError, match="Importing brim_test_syntax failed: SyntaxError"):
        find_model("brim_test_syntax:x")
    module_file.with_name("brim_test_import.py").write_text("import no_such_dependency\n")
    with pytest.raises(RunError, match="No module named 'no_such_dependency'"):
        find_model("brim_test_import:x")


def test_code_that_looks_at_values_while_it_builds_is_built_for_real(module_file: Path) -> None:
    name = module_file.with_name("brim_test_values.py")
    name.write_text(
        "import torch\nprint('loud')\n"
        "def make():\n    return torch.nn.ModuleList(torch.nn.Linear(int(n.item()), 2) for n in torch.tensor([3, 4]))\n"
        "net = torch.nn.Linear(5, 5)\n"
    )
    model = find_model("brim_test_values:make")
    assert model.parameters() == 3 * 2 + 2 + 4 * 2 + 2
    assert all(parameter.is_meta for parameter in model.build("meta").parameters())
    assert find_model("brim_test_values:net").parameters() == 30


def test_a_sibling_has_its_own_context_and_dtype() -> None:
    facts = {
        name: find_model(name)
        for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "google/gemma-2-2b", "google/gemma-2-2b-it")
    }
    contexts = [(facts[name].config or {})["max_position_embeddings"] for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct")]
    assert contexts == [131072, 32768]
    dtypes = [card.dtype for name in ("google/gemma-2-2b", "google/gemma-2-2b-it") if (card := facts[name].card) is not None]
    assert dtypes == ["float32", "bfloat16"]


def test_a_folder_that_merely_has_a_models_name_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("gpt2").origin == "catalogue"
    assert find_model(Path("gpt2")).origin == "catalogue"


@pytest.mark.parametrize("name", ["AutoModel", "pipeline", "logging", "LlamaConfig"])
def test_a_class_that_is_no_model_is_not_built(name: str, tmp_path: Path) -> None:
    model = find_model(str(_folder(tmp_path, {**LLAMA, "architectures": [name]})))
    assert type(model.build("meta")).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "is not valid JSON"), ("[]", "has no model_type"), ({}, "has no model_type"), ({"model_type": 3}, "has no model_type"),
        ({"model_type": "no-such-family", "architectures": ["X"]}, "cannot build"),
        ({**LLAMA, "architectures": ["NoSuchClass"], "model_type": "llama"}, None),
        ({**LLAMA, "model_type": "cohere", "num_hidden_layers": 10**9}, "more layers than any model has"),
        ({**LLAMA, "architectures": "LlamaForCausalLM"}, None), ({**LLAMA, "architectures": {"a": 1}}, None),
        ({**LLAMA, "num_attention_heads": 0}, "no attention heads|cannot build"),
        ({**LLAMA, "vocab_size": "many"}, "should be a whole number|cannot build"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "modeling.Mine"}}, "needs Python code from its own folder"),
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_in_words(config: object, says: str | None, tmp_path: Path) -> None:
    folder = str(_folder(tmp_path, config))
    if says is None:  # transformers knows the family, if not the class: its own task's class stands in
        assert find_model(folder).parameters() > 0
        return
    with pytest.raises(UsageError, match=says):
        find_model(folder).parameters()


def test_folders_that_are_no_models_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("")
    with pytest.raises(UsageError, match=r"has no config.json \(it has: data.txt\)"):
        find_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    with pytest.raises(UsageError, match="PEFT adapter, not a model; its base model is gpt2"):
        find_model(str(tmp_path))
    with pytest.raises(UsageError, match=r"and not a config.json"):
        find_model(str(tmp_path / "data.txt"))
    for missing in ("./nowhere", "/nowhere/at/all", "missing.json"):
        with pytest.raises(UsageError, match="There is no file or folder"):
            find_model(missing)


@pytest.mark.parametrize("given", ["", "  "])
def test_no_model_at_all_is_told(given: str) -> None:
    with pytest.raises(UsageError, match="A model is needed"):
        find_model(given)


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Nearest: .*llama-3.1-8b"):
        find_model("lama-3.1-8b")


def test_a_hub_id_without_network_is_told_and_a_cached_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="not on this disk, and the Hub was not reached"):
        find_model("some-org/some-model-1b")
    from huggingface_hub import constants

    commit = "0" * 40
    repository = tmp_path / "models--some-org--some-model-1b"
    _folder(repository / "snapshots" / commit, LLAMA)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = find_model("some-org/some-model-1b")
    assert (model.origin, model.parameters()) == ("hub", _built(model))


@pytest.mark.parametrize(
    "given", ["a/b/c", "what is this", "💥", "../..:x", "x:y:z", ":", "a:", ":b", "--help", "~nosuchuser/m", "x" * 5000, "a\0b"]
)
def test_nonsense_is_refused(given: str) -> None:
    with pytest.raises(UsageError):
        find_model(given)
