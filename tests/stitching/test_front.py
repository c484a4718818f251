"""`StitchLLM`: the training call as people write it, at any batch size."""

from __future__ import annotations

import json
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from brim.errors import ConfigError, RunError, UnsupportedError, UsageError
from brim.locale import activate
from brim.proofs.verify import verify as really_verify
from brim.stitching import arguments, proving
from brim.stitching.front import StitchLLM, _trained_in_float32
from brim.stitching.model import StitchedModel
from brim.trainer.hf import BrimTrainer
from tests.stitching.small import SLOW, STITCHES, VOCABULARY, fresh_donor, from_recipe, stitched, tokens

WORDS = [f"word{number}" for number in range(VOCABULARY - 3)]


def rows(count: int = 24) -> list[dict[str, list[int]]]:
    """Rows of 4 to 12 tokens that count upwards: something to learn."""
    draw = random.Random(0)
    return [{"input_ids": [3 + (first + place) % 60 for place in range(draw.randint(4, 12))]} for first in range(count)]


def front(name: str = "llama-qwen2-linear", dataset: Any = None, **options: Any) -> StitchLLM:
    return StitchLLM(stitched(name), dataset if dataset is not None else rows(), **options)


def quick(**changes: Any) -> dict[str, Any]:
    """What only tests need: an end, and no bars."""
    return {"disable_tqdm": True, "report_to": "none", "save_strategy": "no", "dataloader_num_workers": 0, **changes}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token; 0 pads, 1 is unknown, 2 ends."""
    known = {word: number for number, word in enumerate(["<pad>", "<unk>", "<end>", *WORDS])}
    plain = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    kind: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = kind(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")
    return made


def losses(model: StitchLLM) -> list[float]:
    assert model.trainer is not None
    return [entry["loss"] for entry in model.trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("size", "epochs"), [pytest.param(1, 2, marks=SLOW), (3, 3)])
def test_training_as_people_write_it_lowers_the_loss_and_saves(
    size: int, epochs: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = front()
    before = {name: parameter.clone() for name, parameter in model.model.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = model.train(
            output_dir=str(tmp_path / "stitch_model_optimized"),
            learning_rate=3e-2,
            per_device_train_batch_size=size,
            save_steps=100,
            logging_steps=1,
            gradient_checkpointing=True,
            num_train_epochs=epochs,
        )
    told = losses(model)
    assert len(told) == result.global_step == epochs * 6 // size
    assert np.mean(told[-2:]) < np.mean(told[:2]) - 0.1
    assert not [one for one in caught if "worker" in str(one.message)]
    said = capfd.readouterr().err
    assert "Proven: causality, batch, pad, pack, accumulation." in said
    assert f"  Effective batch   {size} × 4 (gradient accumulation) = {4 * size}\n" in said
    assert "  Data loading      4 workers in parallel, each prefetches 2 batches\n" in said
    assert "  Precision         fp32, attention kernel sdpa, checkpointing full\n" in said
    assert f"effective batch {4 * size}," in said

    ledger = [json.loads(line) for line in (tmp_path / "stitch_model_optimized" / "ledger.jsonl").read_text().splitlines()]
    assert {entry["sequences"] for entry in ledger if "sequences" in entry and "step" in entry} == {4 * size}
    changed = {name for name, parameter in model.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all(name.startswith("adapters.") for name in changed)

    loaded = StitchedModel.from_pretrained(tmp_path / "stitch_model_optimized")
    ids = tokens(2, 7)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=3, do_sample=False), model.generate(ids, max_new_tokens=3, do_sample=False)
    )
    assert not loaded.training
    assert loaded.trainable_parameters == model.model.trainable_parameters


def test_the_same_effective_batch_trains_the_same_model_whatever_the_slices(tmp_path: Path) -> None:
    found = []
    for size, steps in ((1, 6), (6, 1)):
        model = front(verify=False)
        model.train(tmp_path / str(size), 1e-2, size, logging_steps=1, gradient_accumulation_steps=steps, **quick(max_steps=2))
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.model.adapters.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-5)


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    straight = front(verify=False)
    straight.train(tmp_path / "straight", 1e-2, **quick(num_train_epochs=1, save_strategy="steps", save_steps=3))
    again = front(verify=False)
    again.train(tmp_path / "straight", 1e-2, resume_from_checkpoint=True, **quick(num_train_epochs=1))
    for name, parameter in again.model.named_parameters():
        torch.testing.assert_close(parameter, straight.model.get_parameter(name))


def test_text_is_made_into_tokens_and_cut_to_the_positions(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [" ".join(WORDS[place : place + 6]) for place in range(8)] + [" ".join(WORDS * 2), ""]
    model = StitchLLM(stitched("llama-qwen2-linear"), texts, tokenizer, verify=False)
    model.train(tmp_path, **quick(max_steps=1))
    said = capfd.readouterr().err
    assert "1 of 10 texts are longer than the 128 positions of the model, and were cut there." in said
    assert "1 of 10 texts have no token, and were left out." in said
    assert "Not proven, because verify=False was given" in said
    assert (tmp_path / "tokenizer.json").is_file()
    # The folder brings its tokenizer along.
    assert StitchLLM(str(tmp_path)).tokenizer("word5")["input_ids"] == [8]


class _Numbered(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> dict[str, Any]:
        if place >= 8:
            raise IndexError
        return {"input_ids": torch.arange(3, 9 + place), "labels": torch.tensor([-100] * 2 + [5] * (4 + place))}


@pytest.mark.parametrize(
    "kind",
    [
        "table",
        pytest.param("table of text", marks=SLOW),
        pytest.param("rows of text", marks=SLOW),
        pytest.param("torch", marks=SLOW),
    ],
)
def test_every_usual_kind_of_data_trains(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [{"text": " ".join(WORDS[place : place + 3 + place])} for place in range(8)]
    data: Any = {
        "table": datasets.Dataset.from_list([{**row, "source": "x"} for row in rows(8)]),
        "table of text": datasets.Dataset.from_list(texts),
        "rows of text": texts,
        "torch": _Numbered(),
    }[kind]
    model = StitchLLM(stitched("llama-qwen2-linear"), tokenizer=tokenizer, verify=False)
    result = model.train(tmp_path, dataset=data, eval_dataset=data, **quick(num_train_epochs=1))
    assert result.global_step == 2
    assert model.trainer is not None
    assert any("eval_loss" in entry for entry in model.trainer.state.log_history)


@pytest.mark.parametrize("data", [None, [{"input_ids": [3, VOCABULARY]}]], ids=["none", "bad"])
def test_data_that_cannot_be_trained_on_is_told_before_anything_runs(data: Any, tmp_path: Path) -> None:
    model = StitchLLM(from_recipe(STITCHES["llama-qwen2-linear"]))
    with pytest.raises(UsageError, match=r"There is no training data|Row 0 of the training data"):
        model.train(tmp_path / "new", dataset=data, **quick())
    assert not (tmp_path / "new").exists()


def test_where_nothing_trains_the_recipe_is_to_say_what_does(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Nothing of this model trains") as caught:
        front("same-family").train(tmp_path / "new", **quick())
    assert "`train: [head]`" in str(caught.value.hint)
    assert "llama" in str(caught.value.hint)


def test_arguments_that_nobody_knows_get_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no 'learning_rates'. Did you mean 'learning_rate'"):
        front().train(tmp_path / "new", learning_rates=1.0)
    with pytest.raises(UsageError, match="do not go together"):
        front().train(tmp_path / "new", dataloader_num_workers=0, dataloader_prefetch_factor=2)


def test_a_model_that_fails_a_proof_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(model: Any, **keywords: Any) -> Any:
        found = really_verify(model, proofs=["causality"], **keywords)
        (proof,) = found.proofs
        return replace(found, proofs=(replace(proof, verdict="fail", diagnosis="Tokens see the future.", mend="Mask them."),))

    monkeypatch.setattr(proving, "verify", verify)
    with pytest.raises(RunError, match="The proof of causality failed, so nothing was trained. Tokens see the future.") as caught:
        front().train(tmp_path / "new", **quick())
    assert caught.value.hint == "Mask them."
    assert not (tmp_path / "new").exists()


def test_a_front_is_made_of_a_recipe_a_file_or_a_folder(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        fresh_donor(family).save_pretrained(tmp_path / family)
    text = "donors: {a: ./llama, b: ./qwen2}\nlayers: [{donor: a, layers: 0-1}, {donor: b, layers: 1-2, adapter: linear}]\n"
    (tmp_path / "recipe.yaml").write_text(text)
    of_file = StitchLLM(str(tmp_path / "recipe.yaml"))
    of_file.save_pretrained(tmp_path / "saved")
    of_folder = StitchLLM(tmp_path / "saved")
    ids = tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(of_file(ids).logits, of_folder(ids).logits)
    assert sum(parameter.numel() for parameter in of_file.parameters()) == sum(
        one.numel() for one in of_folder.model.parameters()
    )
    with pytest.raises(UsageError, match="holds a llama model, and not a stitched one"):
        StitchLLM(tmp_path / "llama")
    with pytest.raises(UsageError, match="is not a model folder"):
        StitchLLM(tmp_path)
    with pytest.raises(ConfigError, match="Cannot read the recipe nowhere.yaml"):
        StitchLLM("nowhere.yaml")
    with pytest.raises(UsageError, match="LlamaForCausalLM is not a stitched model"):
        StitchLLM(fresh_donor("llama"))


def test_the_defaults_are_what_people_expect(tmp_path: Path) -> None:
    chosen = arguments.training_arguments({"output_dir": str(tmp_path), "gradient_checkpointing": True})
    assert chosen.gradient_accumulation_steps == 4
    assert (chosen.dataloader_num_workers, chosen.dataloader_prefetch_factor) == (4, 2)
    assert chosen.max_grad_norm == 1.0
    assert chosen.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert chosen.dataloader_pin_memory is torch.cuda.is_available()
    assert (
        arguments.training_arguments({"output_dir": str(tmp_path), "dataloader_num_workers": 0}).dataloader_prefetch_factor
        is None
    )


@pytest.mark.parametrize(
    ("has_gpu", "has_bf16", "given", "chosen"),
    [
        (False, False, {}, {}),
        (True, True, {}, {"bf16": True, "fp16": False}),
        (True, False, {}, {"bf16": False, "fp16": True}),
        (True, True, {"fp16": True}, {}),
        (True, True, {"use_cpu": True}, {}),
        (False, False, {"is_half": True}, {"bf16": True, "use_cpu": True}),
        (False, False, {"bf16": True}, {"use_cpu": True}),
    ],
    ids=["cpu", "new card", "old card", "said", "cpu wanted", "halves on a cpu", "bf16 on a cpu"],
)
def test_the_precision_is_what_the_machine_has(
    has_gpu: bool, has_bf16: bool, given: dict[str, bool], chosen: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    assert arguments.precision_for(given, is_half=given.pop("is_half", False)) == chosen


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is here, which has fp16")
def test_what_would_not_be_honoured_is_refused_before_anything_runs(tmp_path: Path) -> None:
    front = StitchLLM(stitched("llama-qwen2-linear"), [{"input_ids": [5, 6, 7]}])
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        front.train(output_dir=tmp_path, fp16=True)
    with pytest.raises(UsageError, match=r"per_device_train_batch_size is 2.5"):
        front.train(output_dir=tmp_path, per_device_train_batch_size=2.5)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(UsageError, match="holds a llama model, which would be gone"):
        front.train(output_dir=tmp_path)
    with pytest.raises(UsageError, match="is not a stitched model") as told:
        StitchLLM(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    assert "brim.attach" in str(told.value.hint)


def test_what_trains_under_a_scaler_is_held_in_float32() -> None:
    model = from_recipe(STITCHES["llama-qwen2-linear"], dtype="float16")
    with _trained_in_float32(model, is_cast=True):
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        assert kinds == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_steps_that_are_smaller_than_the_spacing_of_bfloat16_are_not_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = StitchLLM(from_recipe(STITCHES["llama-qwen2-linear"], dtype="bfloat16"), rows(), verify=False)
    before = model.model.adapters[0].projection.weight.detach().diagonal().clone()
    model.train(tmp_path, 1e-3, lr_scheduler_type="constant", gradient_accumulation_steps=1, **quick(max_steps=12))
    after = model.model.adapters[0].projection.weight.detach()
    assert after.dtype == torch.bfloat16
    assert int((after.diagonal() != before).sum()) > 10
    said = capfd.readouterr().err
    assert "Precision         amp-bf16, attention" in said
    assert "held in float32 until it is saved, and rounded to bfloat16 then" in said


def test_the_settings_are_confirmed_in_chinese_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    activate("zh_CN")
    try:
        front(verify=False).train(tmp_path, per_device_train_batch_size=2, **quick(max_steps=1, dataloader_num_workers=1))
    finally:
        activate("en")
    said = capfd.readouterr().err
    assert re.search(r"有效batch_size +2 × 4 \(gradient_accumulation\) = 8\n", said)
    assert re.search(r"数据加载 +1 个 worker.* 2 ", said)
    assert re.search(r"精度 +fp32，注意力内核 sdpa，检查点 full\n", said)


def test_what_training_switched_is_switched_back_however_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = front(verify=False)
    model.train(tmp_path / "new", gradient_accumulation_steps=1, **quick(max_steps=1))
    assert json.loads((tmp_path / "new" / "config.json").read_text())["use_cache"] is True

    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BrimTrainer, "train", fail)
    with pytest.raises(OSError, match="No space left"):
        model.train(tmp_path / "other", **quick(max_steps=1))
    assert (model.model.training, model.model.is_gradient_checkpointing, model.model.config.use_cache) == (False, False, True)


def test_an_engine_that_cannot_be_is_refused_before_transformers_hears_of_it(tmp_path: Path) -> None:
    from transformers.integrations import deepspeed

    with pytest.raises(UnsupportedError, match="does not run inside DeepSpeed"):
        front().train(tmp_path / "new", deepspeed={"zero_optimization": {"stage": 3}}, **quick())
    assert deepspeed._hf_deepspeed_config_weak_ref is None
    with pytest.raises(UnsupportedError, match="does not run inside FSDP"):
        front().train(tmp_path / "new", fsdp="full_shard", **quick())


def test_a_tokenizer_with_code_of_its_own_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stitched("llama-qwen2-linear").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    named = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert StitchLLM(tmp_path).tokenizer is None
    assert not (tmp_path / "ran").exists()
    assert "cannot be loaded, and is left out" in capfd.readouterr().err
