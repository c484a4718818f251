"""The emitted Python file and YAML build `TrainingArguments` in transformers itself, and train with the batch that was planned."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from brim.planner.emit.write import emit, files_of
from brim.records import Plan
from tests.planner.emit.plans import LORA, PLANS, make_plan

pytest.importorskip("transformers")


def namespace(plan: Plan, folder: Path) -> dict[str, Any]:
    emit(plan, ["transformers"], folder)
    return runpy.run_path(str(folder / "training_arguments.py"))


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed on a machine without a GPU, and the environment as it was."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


def check_against(built: Any, plan: Plan) -> None:
    assert plan.best is not None
    product = built.per_device_train_batch_size * built.gradient_accumulation_steps * plan.best.world_size
    assert product == plan.best.effective_batch
    assert built.num_train_epochs == plan.workload.epochs
    assert built.seed == plan.workload.seed
    assert built.max_grad_norm == (plan.workload.max_grad_norm or 0.0)
    assert built.dataloader_num_workers == plan.best.num_workers
    assert not built.dataloader_drop_last


# ZeRO's and the Trainer's figures are compared where a process group can be: below, as one process.
WITHOUT_ZERO = [name for name in PLANS if not name.startswith("zero")]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", WITHOUT_ZERO)
def test_the_python_file_builds_training_arguments(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    # `use_cpu` because bf16 asks for a card that is not here.
    built = namespace(plan, tmp_path)["training_arguments"](output_dir=str(tmp_path / "out"), use_cpu=True)
    check_against(built, plan)
    assert type(built).__name__ == ("Seq2SeqTrainingArguments" if plan.workload.task == "seq2seq" else "TrainingArguments")


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", WITHOUT_ZERO)
def test_the_yaml_builds_the_same_training_arguments(name: str, tmp_path: Path) -> None:
    import yaml
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

    plan = PLANS[name]
    kind: Any = Seq2SeqTrainingArguments if plan.workload.task == "seq2seq" else TrainingArguments
    text = files_of(plan, "transformers")["training_arguments.yaml"]
    file = tmp_path / "here.yaml"
    file.write_text(text + ("" if "use_cpu" in yaml.safe_load(text) else "use_cpu: true\n"), encoding="utf-8")
    (built,) = HfArgumentParser(kind).parse_yaml_file(str(file))
    check_against(built, plan)
    other = namespace(plan, tmp_path)["training_arguments"](output_dir="outputs", use_cpu=True)
    same = {key: value for key, value in built.to_dict().items() if key not in {"logging_dir", "run_name"}}
    assert same == {key: value for key, value in other.to_dict().items() if key in same}


@pytest.mark.usefixtures("_alone")
def test_the_trainer_takes_zero_with_the_same_batch(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install deepspeed")
    kinds: list[dict[str, Any]] = [
        {"sharding": "zero2", "offload": "optimizer"},
        {"sharding": "zero3"},
        {"sharding": "zero1", "optimizer": "lion"},
    ]
    for number, settings in enumerate(kinds):
        plan = make_plan(24, 4, gpus="a100-80gb", **settings)
        # The Trainer compares every figure of the JSON with its own arguments, and raises where they differ.
        built = namespace(plan, tmp_path / str(number))["training_arguments"](output_dir=str(tmp_path / "out"), use_cpu=True)
        check_against(built, plan)
        assert built.hf_deepspeed_config.config["train_batch_size"] == 24
        built.hf_deepspeed_config.trainer_config_finalize(built, None, 10)


def test_precision_says_what_is_mixed_and_what_is_loaded() -> None:
    def said(**settings: Any) -> tuple[bool, bool, str]:
        texts = files_of(make_plan(**settings), "transformers")["training_arguments.py"]
        return "'bf16': True" in texts, "'fp16': True" in texts, texts.partition('"dtype": torch.')[2].partition(",")[0]

    assert said(precision="amp-bf16") == (True, False, "float32")
    assert said(precision="bf16") == (False, False, "bfloat16")
    assert said(precision="fp16") == (False, False, "float16")
    assert said(precision="fp32") == (False, False, "float32")
    assert said(precision="amp-fp16", **LORA) == (False, True, "float16")
    assert said(precision="amp-bf16", base_dtype="float32", **LORA) == (True, False, "float32")
    # DeepSpeed keeps the float32 copy itself, and must be told of half precision either way.
    assert said(precision="bf16", sharding="zero2") == (True, False, "bfloat16")


def test_the_optimizers_are_spelt_as_transformers_spells_them(tmp_path: Path) -> None:
    import yaml
    from transformers.training_args import OptimizerNames

    expected = {
        "adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused", "adamw-loop": "adamw_torch_fused", "adamw-8bit": "adamw_bnb_8bit",
        "paged-adamw-8bit": "paged_adamw_8bit", "adafactor": "adafactor", "sgd": "sgd", "sgd-momentum": "sgd", "lion": "lion_32bit",
    }  # fmt: skip
    for word, spelling in expected.items():
        settings = yaml.safe_load(files_of(make_plan(optimizer=word), "transformers")["training_arguments.yaml"])
        assert OptimizerNames(settings["optim"]).value == spelling
        assert (settings.get("optim_args") == "momentum=0.9") == (word == "sgd-momentum")


def tiny_model(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2
    )
    made: Any = LlamaForCausalLM
    made(config).save_pretrained(folder)
    return str(folder)


def test_the_python_file_loads_the_model_as_planned(tmp_path: Path) -> None:
    import torch

    model = tiny_model(tmp_path / "model")
    plan = make_plan(
        8,
        2,
        gpus=None,
        model=model,
        precision="bf16",
        checkpointing="every:2",
        freeze=("embed_tokens", "layers.0"),
        attention="eager",
    )
    loaded = namespace(plan, tmp_path)["load_model"]()
    assert next(loaded.parameters()).dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    frozen = {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _parameter in loaded.named_parameters() if "embed_tokens" in name or "layers.0" in name}
    assert [layer.gradient_checkpointing for layer in loaded.model.layers] == [True, False, True, False]


def test_the_python_file_makes_the_adapters(tmp_path: Path) -> None:
    import torch

    model = tiny_model(tmp_path / "model")
    plan = make_plan(8, 2, gpus=None, model=model, precision="fp32", checkpointing="full", lora_dtype="bfloat16", **LORA)
    loaded = namespace(plan, tmp_path)["load_model"]()
    trained = {name: parameter for name, parameter in loaded.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name and parameter.dtype == torch.bfloat16 for name, parameter in trained.items())
    assert loaded.peft_config["default"].r == 16
    assert loaded.peft_config["default"].target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize("name", list(PLANS))
def test_the_python_file_is_python_and_says_how_many_processes(name: str) -> None:
    plan = PLANS[name]
    assert plan.best is not None
    text = files_of(plan, "transformers")["training_arguments.py"]
    compile(text, "training_arguments.py", "exec")
    assert ("import os" in text) == ("os.environ" in text)
    assert ("import re" in text) == ("re.search" in text)
    if plan.machine.accelerators and plan.best.world_size == 1:
        assert "CUDA_VISIBLE_DEVICES=0" in text  # or nn.DataParallel takes every card, and the batch is another
    elif plan.best.world_size > 1:
        assert f"Start it in {plan.best.world_size} processes" in text


def test_a_quantised_base_is_spelt_out() -> None:
    text = files_of(PLANS["qlora, paged"], "transformers")["training_arguments.py"]
    assert "load_in_4bit=True" in text
    assert "prepare_model_for_kbit_training(model, use_gradient_checkpointing=False" in text
    assert "target_modules='all-linear'" in text
    assert "bnb_4bit_quant_storage=torch.bfloat16" in files_of(PLANS["qlora, fsdp"], "transformers")["training_arguments.py"]
    assert "load_in_8bit=True" in files_of(PLANS["lora on 8 bits"], "transformers")["training_arguments.py"]


def test_a_function_of_the_user_is_called(tmp_path: Path) -> None:
    text = files_of(make_plan(gpus="t4", model="my.models:build", precision="amp-fp16"), "transformers")["training_arguments.py"]
    assert "from my.models import build" in text
    compile(text, "training_arguments.py", "exec")


def test_the_trainer_takes_the_planned_number_of_sequences_in_every_step(tmp_path: Path) -> None:
    import torch
    from transformers import Trainer, TrainerCallback

    plan = make_plan(6, 4, gpus=None, model=tiny_model(tmp_path / "model"), precision="fp32", samples=15, checkpointing="full")
    made = namespace(plan, tmp_path)
    seen: list[int] = []

    class Counted(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any, labels: Any) -> Any:
            seen.append(len(input_ids))
            return self.inner(input_ids=input_ids, labels=labels)

        def gradient_checkpointing_enable(self, **settings: Any) -> None:
            self.inner.gradient_checkpointing_enable(**settings)

    steps: list[int] = []

    class Stepped(TrainerCallback):
        def on_step_end(self, *_arguments: Any, **_rest: Any) -> None:
            steps.append(sum(seen))

    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _index in range(15)]
    arguments = made["training_arguments"](str(tmp_path / "out"), report_to="none", disable_tqdm=True, save_strategy="no")
    Trainer(model=Counted(made["load_model"]()), args=arguments, train_dataset=data, callbacks=[Stepped()]).train()
    assert max(seen) <= 4
    # Six, six, and the three that are left, as the comment in the file says.
    assert steps == [6, 12, 15]
    assert "holds 3 sequences, not 6" in (tmp_path / "training_arguments.yaml").read_text()
