"""The plain Trainer with the emitted file: the loss and the gradient do not depend on accumulation or on the number of ranks."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from brim import UnsupportedError
from brim.planner.emit.write import emit, files_of
from brim.records import Plan
from tests import torchrun
from tests.planner.emit.plans import LORA, make_plan

pytest.importorskip("transformers")


def first_step(emitted: Path, task: str, output: Path) -> dict[str, float]:
    """What the plain Trainer logs of its first step with the model and the arguments of the emitted file."""
    import torch
    from transformers import Trainer

    file = runpy.run_path(str(emitted))
    rows = torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row, "labels": row[0] % 2 if task == "classification" else row} for row in rows]
    arguments = file["training_arguments"](
        str(output), report_to="none", disable_tqdm=True, save_strategy="no", max_steps=1, logging_steps=1, use_cpu=True
    )
    torch.manual_seed(0)
    trainer = Trainer(model=file["load_model"](), args=arguments, train_dataset=data)
    trainer.train()
    logged = trainer.state.log_history[0]
    return {"loss": logged["loss"], "grad_norm": logged["grad_norm"]}


def tiny(kind: str, folder: Path) -> str:
    import torch
    import transformers

    torch.manual_seed(0)
    tokens: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    llama = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    bart = {
        "d_model": 16,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
    }
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", llama),
        "llama-classifier": ("LlamaForSequenceClassification", llama),
        "bart": ("BartForCausalLM", {**bart, "dropout": 0.0}),
        "t5": ("T5ForConditionalGeneration", t5),
    }
    name, config = kinds[kind]
    made: Any = getattr(transformers, name)
    made(made.config_class(**tokens, **config)).save_pretrained(folder)
    return str(folder)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {"task": "seq2seq", "target_length": 12}),
    "t5, lora": ("t5", {"task": "seq2seq", "target_length": 12, **LORA, "lora_targets": ("q", "v")}),
    "llama": ("llama", {}),
    "llama-classifier": ("llama-classifier", {"task": "classification"}),
}


def plan_of(model: str, accumulation: int, settings: dict[str, Any], **machine: Any) -> Plan:
    return make_plan(
        8, 8 // accumulation, **{"gpus": None, "model": model, "precision": "fp32", "max_length": 12, **settings, **machine}
    )


@pytest.mark.parametrize("name", list(CASES))
def test_the_first_loss_and_gradient_are_the_same_at_every_accumulation(name: str, tmp_path: Path) -> None:
    kind, settings = CASES[name]
    model = tiny(kind, tmp_path / "model")
    seen = {}
    for accumulation in (1, 2, 4):
        folder = tmp_path / str(accumulation)
        emit(plan_of(model, accumulation, settings), ["transformers"], folder)
        seen[accumulation] = first_step(folder / "training_arguments.py", settings.get("task", ""), folder / "out")
    check_equal(*seen.values())


def check_equal(first: dict[str, float], *others: dict[str, float]) -> None:
    assert first["grad_norm"] > 0
    for measured in others:
        assert measured["loss"] == pytest.approx(first["loss"], rel=1e-3)  # the Trainer logs four decimals
        assert measured["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


@pytest.mark.long
def test_two_ranks_take_the_gradient_of_one(tmp_path: Path) -> None:
    kind, settings = CASES["t5"]
    model = tiny(kind, tmp_path / "model")
    emit(plan_of(model, 1, settings), ["transformers"], tmp_path / "one")
    emit(plan_of(model, 2, settings, gpus="t4*2"), ["transformers"], tmp_path / "two")
    found = first_step(tmp_path / "one" / "training_arguments.py", "seq2seq", tmp_path / "out")
    torchrun.on_two_ranks(__name__, str(tmp_path / "two"), seconds=300)
    check_equal(found, json.loads((tmp_path / "two" / "logged.json").read_text()))


@pytest.mark.parametrize("name", list(CASES))
def test_every_format_says_what_it_does_about_it(name: str, tmp_path: Path) -> None:
    kind, settings = CASES[name]
    plan = plan_of(tiny(kind, tmp_path / "model"), 4, settings)
    is_ignored = name != "llama"
    transformers = files_of(plan, "transformers")
    assert ("    model.accepts_loss_kwargs = False\n" in transformers["training_arguments.py"]) == is_ignored
    for text in (
        *transformers.values(),
        files_of(plan, "torchrun")["torchrun.sh"],
        files_of(plan, "accelerate")["accelerate.yaml"],
    ):
        assert ("ignores num_items_in_batch" in text) == is_ignored
    notes = emit(plan, ["deepspeed"], tmp_path / "deepspeed").notes
    assert any("accepts_loss_kwargs = False" in note for note in notes) == is_ignored


@pytest.mark.parametrize("format_name", ["axolotl", "llama-factory"])
def test_a_tool_that_cannot_set_it_is_refused(format_name: str, tmp_path: Path) -> None:
    model = tiny("bart", tmp_path / "model")
    with pytest.raises(UnsupportedError, match="BartForCausalLM ignores num_items_in_batch.* 4 times") as caught:
        files_of(plan_of(model, 4, {}), format_name)
    assert "--emit transformers" in str(caught.value.hint)
    assert files_of(plan_of(model, 1, {}), format_name), "without accumulation, on one rank, there is nothing to divide"


def test_trl_divides_by_itself(tmp_path: Path) -> None:
    """So its format is written for every model: TRL computes the loss from the hidden states, and not as the model does."""
    trl: Any = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words: Any = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="</s>"))
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    model = tiny("bart", tmp_path / "model")
    rows = torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(1)).tolist()
    assert "trl_sft.yaml" in files_of(plan_of(model, 4, {}), "trl")
    seen = []
    for accumulation in (1, 4):
        arguments = trl.SFTConfig(
            str(tmp_path / "out"), per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation, max_steps=1,
            logging_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no", loss_type="nll", disable_tqdm=True,
        )  # fmt: skip
        loaded: Any = AutoModelForCausalLM.from_pretrained(model)
        data = Dataset.from_dict({"input_ids": rows, "labels": rows})
        trainer = trl.SFTTrainer(model=loaded, args=arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        seen.append({name: trainer.state.log_history[0][name] for name in ("loss", "grad_norm")})
    check_equal(*seen)


def test_what_cannot_be_checked_is_divided_by_the_trainer() -> None:
    text = files_of(make_plan(gpus="t4", model="my.models:build", precision="amp-fp16"), "transformers")["training_arguments.py"]
    assert "model.accepts_loss_kwargs = False" in text
    assert "could not be checked" in text


if __name__ == "__main__":
    emitted = Path(sys.argv[1])
    logged = first_step(emitted / "training_arguments.py", "seq2seq", emitted / "out")
    if int(os.environ["RANK"]) == 0:
        (emitted / "logged.json").write_text(json.dumps(logged))
    torchrun.leave()
