"""TRL parses its YAML itself; axolotl's and LLaMA-Factory's hold documented keys only."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from brim import UnsupportedError
from brim.planner.emit.write import files_of
from brim.records import Plan
from tests.planner.emit.plans import LORA, PLANS, make_plan

SHARED = Path(__file__).parents[4] / "shared"
DECODERS = [name for name, plan in PLANS.items() if plan.workload.task == "causal-lm"]

# Where each key is documented, in github.com/axolotl-ai-cloud/axolotl.
AXOLOTL = {
    "docs/config-reference.qmd": {
        "base_model", "adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "load_in_4bit",
        "load_in_8bit", "datasets", "val_set_size", "output_dir", "sequence_len", "sample_packing", "pad_to_sequence_len",
        "micro_batch_size", "gradient_accumulation_steps", "eval_batch_size", "num_epochs", "optimizer", "optim_args", "learning_rate",
        "lr_scheduler", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "adam_beta2", "bf16", "fp16", "bfloat16", "float16",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "dataloader_num_workers", "dataloader_pin_memory",
        "dataloader_prefetch_factor", "dataloader_drop_last", "deepspeed", "fsdp_config", "plugins",
    },
    "docs/attention.qmd": {"attn_implementation"},
    "docs/multi-gpu.qmd": {"fsdp_version"},
    "src/axolotl/integrations/liger/README.md": {"liger_fused_linear_cross_entropy"},
}  # fmt: skip
AXOLOTL_FSDP = {  # docs/multi-gpu.qmd and src/axolotl/utils/schemas/fsdp.py
    "offload_params", "cpu_ram_efficient_loading", "auto_wrap_policy", "state_dict_type", "reshard_after_forward",
    "activation_checkpointing",
}  # fmt: skip
AXOLOTL_DATASET = {"path", "type", "ds_type"}  # docs/dataset_loading.qmd, src/axolotl/utils/schemas/datasets.py
# In github.com/hiyouga/LLaMA-Factory, under src/llamafactory/hparams; the rest are transformers' own TrainingArguments.
LLAMA_FACTORY = {
    "model_args.py": {
        "model_name_or_path", "flash_attn", "use_reentrant_gc", "disable_gradient_checkpointing", "enable_liger_kernel",
        "quantization_bit", "quantization_method", "quantization_type", "double_quantization",
    },
    "data_args.py": {"dataset", "dataset_dir", "cutoff_len", "packing"},
    "finetuning_args.py": {
        "stage", "finetuning_type", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "pure_bf16",
    },
}  # fmt: skip


def read(plan: Plan, format_name: str, file: str, data: str | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(files_of(plan, format_name, data)[file])
    return settings


def expressible(names: list[str], format_name: str) -> list[str]:
    """Those that the format does not refuse; what it refuses is tested by name below."""
    kept = []
    for name in names:
        try:
            files_of(PLANS[name], format_name)
        except UnsupportedError:
            continue
        kept.append(name)
    return kept


@pytest.mark.parametrize("name", expressible(DECODERS, "trl"))
def test_trl_parses_its_yaml(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    sft: Any = importlib.import_module("trl.scripts.sft")

    plan = PLANS[name]
    assert plan.best is not None
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    file = tmp_path / "trl_sft.yaml"
    file.write_text(files_of(plan, "trl")["trl_sft.yaml"])
    # `use_cpu`, because bf16 asks for a card that is not here. What the parser does not know goes to `accelerate launch`.
    script, config, model, _data, launch, unknown = sft.make_parser().parse_args_and_config(
        ["--config", str(file), "--use_cpu", "true"], return_remaining_strings=True, separate_remaining_strings=True
    )
    assert unknown == []
    assert launch in (["--accelerate_config", "accelerate.yaml"], ["--num_processes", "1"])
    assert type(config).__name__ == "SFTConfig"
    assert (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * plan.best.world_size
        == plan.best.effective_batch
    )
    assert config.max_length == plan.workload.max_length
    assert config.bf16 == (plan.best.precision == "amp-bf16")
    assert config.gradient_checkpointing == (plan.best.checkpointing != "none" and plan.best.sharding != "fsdp")
    assert model.model_name_or_path == ("openai-community/gpt2" if plan.workload.model == "gpt2" else "meta-llama/Llama-3.1-8B")
    assert model.use_peft == (plan.best.method != "full")
    assert model.load_in_4bit == (plan.best.method == "qlora")
    assert script.dataset_name == "YOUR-DATA"


def test_trl_makes_the_adapters_that_were_planned(tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

    file = tmp_path / "trl_sft.yaml"
    file.write_text(files_of(make_plan(**LORA, lora_dropout=0.05), "trl")["trl_sft.yaml"])
    (model, *_rest) = trl.TrlParser([trl.ModelConfig]).parse_args_and_config(
        ["--config", str(file)], fail_with_unknown_args=False
    )
    adapters = trl.get_peft_config(model)
    assert (adapters.r, adapters.lora_alpha, adapters.lora_dropout) == (16, 32, 0.05)
    assert adapters.target_modules == {"q_proj", "v_proj"}


def test_trl_loads_a_local_file(tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n')
    file = tmp_path / "trl_sft.yaml"
    file.write_text(files_of(make_plan(), "trl", str(data))["trl_sft.yaml"])
    (mixture, *_rest) = trl.TrlParser([trl.DatasetMixtureConfig]).parse_args_and_config(
        ["--config", str(file)], fail_with_unknown_args=False
    )
    assert len(trl.get_dataset(mixture)["train"]) == 2


@pytest.mark.parametrize("name", expressible(DECODERS, "axolotl"))
def test_axolotls_keys_are_documented_and_its_batch_is_the_plans(name: str) -> None:
    plan = PLANS[name]
    assert plan.best is not None
    settings = read(plan, "axolotl", "axolotl.yaml")
    assert set(settings) <= set().union(*AXOLOTL.values())
    assert set(settings.get("fsdp_config", {})) <= AXOLOTL_FSDP
    assert set(settings["datasets"][0]) <= AXOLOTL_DATASET
    product = settings["micro_batch_size"] * settings["gradient_accumulation_steps"] * plan.best.world_size
    assert product == plan.best.effective_batch
    assert not settings["sample_packing"]  # packed rows hold many sequences: the batch would be another


@pytest.mark.parametrize("name", expressible(DECODERS, "llama-factory"))
def test_llama_factorys_keys_are_documented_and_its_batch_is_the_plans(name: str) -> None:
    from transformers import Seq2SeqTrainingArguments

    plan = PLANS[name]
    assert plan.best is not None
    settings = read(plan, "llama-factory", "llama_factory.yaml")
    documented = set().union(*LLAMA_FACTORY.values()) | set(Seq2SeqTrainingArguments.__dataclass_fields__)
    assert set(settings) <= documented
    product = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * plan.best.world_size
    assert product == plan.best.effective_batch
    assert settings["dataset"] in json.loads(files_of(plan, "llama-factory")["dataset_info.json"])


@pytest.mark.parametrize(
    ("given", "alpha", "dropout"),
    [({"lora_alpha": 24, "lora_dropout": 0.1}, 24, 0.1), ({"lora_alpha": None}, 8, 0.0)],
    ids=["given", "a plan of an older brim, which always took 8"],
)
def test_alpha_and_dropout_are_written_into_every_format(given: dict[str, Any], alpha: int, dropout: float) -> None:
    plan = make_plan(gpus="t4", precision="amp-fp16", **{**LORA, **given})
    for name, file in (("trl", "trl_sft.yaml"), ("axolotl", "axolotl.yaml"), ("llama-factory", "llama_factory.yaml")):
        settings = read(plan, name, file)
        assert (settings["lora_alpha"], settings["lora_dropout"]) == (alpha, dropout)
    files = files_of(plan, "transformers")
    assert f"lora_alpha={alpha}, lora_dropout={dropout}," in files["training_arguments.py"]


def test_every_format_is_expressible_for_the_commonest_plan() -> None:
    for name in ("trl", "axolotl", "llama-factory"):
        assert "lora in fp16 on a t4" in expressible(DECODERS, name)
        assert "fsdp, offload" in expressible(DECODERS, name)


@pytest.mark.parametrize("format_name", ["trl", "axolotl", "llama-factory"])
def test_what_needs_code_is_refused(format_name: str) -> None:
    with pytest.raises(UnsupportedError, match="the task is seq2seq"):
        files_of(PLANS["adafactor, seq2seq"], format_name)
    with pytest.raises(UnsupportedError, match="freeze"):
        files_of(make_plan(freeze=("embed",), precision="bf16"), format_name)
    with pytest.raises(UnsupportedError, match="is a function"):
        files_of(make_plan(model="my.models:build"), format_name)


def test_other_weights_than_planned_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="keeps them in float32"):
        files_of(make_plan(precision="amp-bf16"), "axolotl")
    with pytest.raises(UnsupportedError, match="pure fp16"):
        files_of(make_plan(precision="fp16"), "llama-factory")
    for name in ("axolotl", "llama-factory"):
        with pytest.raises(UnsupportedError, match="frozen base"):
            files_of(make_plan(precision="amp-bf16", base_dtype="float32", **LORA), name)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        files_of(make_plan(method="qlora", precision="amp-fp16"), "trl")


def test_records_are_recognised() -> None:
    data = SHARED / "data/sft/alpaca_en_1k.json"
    if not data.is_file():
        pytest.skip("the shared SFT data is not here: ../shared/data/sft")
    plan = make_plan(**LORA)
    assert read(plan, "axolotl", "axolotl.yaml", str(data))["datasets"] == [
        {"path": str(data.resolve()), "type": "alpaca", "ds_type": "json"}
    ]
    info = json.loads(files_of(plan, "llama-factory", str(data))["dataset_info.json"])
    assert info == {"training_data": {"file_name": str(data.resolve()), "formatting": "alpaca"}}


def test_messages_are_recognised(tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    plan = make_plan(**LORA)
    assert read(plan, "axolotl", "axolotl.yaml", str(data))["datasets"][0]["type"] == "chat_template"
    assert (
        json.loads(files_of(plan, "llama-factory", str(data))["dataset_info.json"])["training_data"]["formatting"] == "sharegpt"
    )
    hub = json.loads(files_of(plan, "llama-factory", "trl-lib/Capybara")["dataset_info.json"])["training_data"]
    assert hub["hf_hub_url"] == "trl-lib/Capybara"
