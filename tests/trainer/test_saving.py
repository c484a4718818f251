"""The trained model is found where it should be, whole; whatever happens while it is written, what was there stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import SafetensorError

from brim.errors import RunError
from brim.memory.setup import Setup
from brim.memory.tracing.building import build_model
from brim.stitching.saving import save
from brim.trainer.loading import load_model
from brim.trainer.saving import HIDDEN, needed_bytes, save_model
from brim.workload.resolve import find_model
from brim.workload.settings import Settings
from tests.stitching.small import from_recipe, piece, recipe
from tests.trainer.small import ragged, trainer_of
from tests.trainer.words import model_of, tokenizer

WORDS = tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("base")
    model_of(WORDS, hidden_size=64, intermediate_size=128, use_cache=True).save_pretrained(found)
    WORDS.save_pretrained(found)
    return found


def trained(base: Path, run: Path, **settings: Any) -> Any:
    """A trainer after one step."""
    model = load_model(find_model(base), Settings(task="causal-lm", **settings), device="cpu", say=lambda sentence: None)
    trainer = trainer_of(run, ragged(8), model=model, learning_rate=1e-2)
    trainer.train()
    return trainer


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_model_loads_back_in_plain_transformers(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path)
    save_model(trainer, WORDS, tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(found, trainer.model)
    assert found.config.use_cache is True
    assert trainer.model.config.use_cache is False
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).get_vocab() == WORDS.get_vocab()
    assert (tmp_path / "ledger.jsonl").is_file()
    assert not (tmp_path / HIDDEN).exists()
    assert not (tmp_path / "training_args.bin").exists()


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_load_back_on_their_base(folder: Path, tmp_path: Path, method: Any) -> None:
    trainer = trained(folder, tmp_path, method=method, lora_rank=4)
    save_model(trainer, WORDS, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder.resolve())
    assert not (tmp_path / "config.json").exists()
    own = peft.get_peft_model_state_dict(trainer.model)
    found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(one, peft.get_peft_model_state_dict(found)[name]) for name, one in own.items())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, found(ids).logits)
        if method == "lora":
            torch.testing.assert_close(trainer.model.eval()(ids).logits, found(ids).logits)


def test_adapters_of_a_classifier_load_back_with_their_head(folder: Path, tmp_path: Path) -> None:
    settings = Settings(task="classification", method="lora")
    model = load_model(find_model(folder), settings, device="cpu", labels=("a", "b", "c"), say=lambda sentence: None)
    rows = [{"input_ids": row["input_ids"][:4], "labels": place % 3} for place, row in enumerate(ragged(8))]
    trainer = trainer_of(
        tmp_path, rows, model=model, learning_rate=1e-2, data_collator=transformers.default_data_collator, lengths=[4] * 8
    )
    trainer.train()
    save_model(trainer, WORDS, tmp_path)
    found = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    ids = torch.arange(3, 11).reshape(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, trainer.model.eval()(ids).logits)


def test_a_stitched_model_loads_back_frozen_as_it_was(tmp_path: Path) -> None:
    stitch = from_recipe(recipe(piece("llama", 0), piece("qwen2", 1, by="linear")))
    trainer = trained(save(stitch, tmp_path / "stitch"), tmp_path / "run")
    save_model(trainer, None, tmp_path / "run")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert same(found, trainer.model)
    assert found.trainable_parameters == stitch.trainable_parameters


def test_a_module_of_somebodys_own_is_saved_as_its_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of(WORDS)

        def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None, **rest: Any) -> Any:
            return self.inner(input_ids, attention_mask=attention_mask, labels=labels, **rest)

    trainer = trainer_of(tmp_path, ragged(8), model=Own())
    trainer.train()
    save_model(trainer, None, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["inner.lm_head.weight"], trainer.model.inner.lm_head.weight)


def test_an_older_model_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path)
    trainer.model.save_pretrained(tmp_path, max_shard_size="60KB")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    save_model(trainer, WORDS, tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("*.safetensors*"))] == ["model.safetensors"]
    assert not (tmp_path / "adapter_config.json").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), trainer.model)


def test_a_crash_at_any_move_leaves_no_mixture(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(folder, tmp_path / "run")
    save_model(trainer, WORDS, tmp_path / "run")
    count = len([name for name in content(tmp_path / "run") if "ledger" not in name])
    with torch.no_grad():
        trainer.model.lm_head.weight.add_(1.0)
    real = Path.replace
    for last in range(count):
        copy = tmp_path / f"copy-{last}"
        shutil.copytree(tmp_path / "run", copy)
        moves = iter(range(count))

        def replace(self: Path, target: Any, moves: Any = moves, last: int = last, copy: Path = copy) -> Any:
            # The manifest is first written into the hidden folder, by a move of its own.
            if Path(target).parent == copy and next(moves) == last:
                raise KeyboardInterrupt
            return real(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save_model(trainer, WORDS, copy)
        monkeypatch.undo()
        assert not (copy / "config.json").exists()
        assert not (copy / HIDDEN).exists()


def fail(error: BaseException) -> Any:
    def raising(*_arguments: Any, **_keywords: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        pytest.param(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), marks=pytest.mark.slow),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "quota", "safetensors"],
)
def test_a_full_disk_is_told_with_figures_and_changes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    trainer = trained(folder, tmp_path)
    save_model(trainer, WORDS, tmp_path)
    before = content(tmp_path)
    monkeypatch.setattr(type(WORDS), "save_pretrained", fail(error))
    with pytest.raises(RunError, match=r"It needs 3\d\d KiB, and .* are free there\. What was there is as it was") as caught:
        save_model(trainer, WORDS, tmp_path)
    assert "--resume" in (caught.value.hint or "")
    assert content(tmp_path) == before


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(folder, tmp_path)
    before = content(tmp_path)
    small = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("brim.trainer.manifest.shutil.disk_usage", lambda path: small)
    monkeypatch.setattr(type(trainer), "save_model", fail(AssertionError("written")))
    with pytest.raises(RunError, match="the disk is full"):
        save_model(trainer, WORDS, tmp_path)
    assert content(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(folder, tmp_path)
    monkeypatch.setattr(type(WORDS), "save_pretrained", fail(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(RunError, match="was not written to .*: Permission denied"):
        save_model(trainer, WORDS, tmp_path)
    monkeypatch.setattr(type(WORDS), "save_pretrained", fail(RuntimeError("PytorchStreamWriter failed writing file data/0")))
    with pytest.raises(RunError, match="could not be written to its end"):
        save_model(trainer, WORDS, tmp_path)
    monkeypatch.setattr(type(WORDS), "save_pretrained", fail(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        save_model(trainer, WORDS, tmp_path)
    assert not (tmp_path / HIDDEN).exists()


def test_half_changed_weights_are_never_saved(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path)
    trainer.running._is_torn = True
    with pytest.raises(RunError):
        save_model(trainer, WORDS, tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert not (tmp_path / HIDDEN).exists()


def test_the_bytes_that_are_needed_are_those_of_the_file(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path)
    save_model(trainer, WORDS, tmp_path)
    assert needed_bytes(trainer.model) <= (tmp_path / "model.safetensors").stat().st_size < needed_bytes(trainer.model) + 10_000
    adapters = build_model(
        Setup(config=trainer.model.config.to_dict(), task="causal-lm", micro_batch=1, length=8, method="lora"), device="cpu"
    )
    assert needed_bytes(adapters) == sum(one.numel() * 4 for one in adapters.parameters() if one.requires_grad)
