"""Settings that cancel are found, and the tools themselves are asked whether it is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.audit.config.parts import (
    ACCELERATE,
    ARGUMENTS,
    AXOLOTL,
    DEEPSPEED,
    LLAMA_FACTORY,
    TRL,
    code_of,
    examined,
    examined_files,
    mended,
)

RULE = "config-cancels"
REFUSED = {
    "two precisions": "bf16: true\nfp16: true\n",
    "two precisions of evaluation": "bf16_full_eval: true\nfp16_full_eval: true\n",
    "best model without evaluation": "load_best_model_at_end: true\n",
    "best model by epochs": "load_best_model_at_end: true\neval_strategy: epoch\nsave_strategy: steps\n",
    "best model between evaluations": "load_best_model_at_end: true\neval_strategy: steps\neval_steps: 100\nsave_steps: 250\n",
    "prefetching by nobody": "dataloader_prefetch_factor: 4\n",
    "plateau without evaluation": "lr_scheduler_type: reduce_lr_on_plateau\n",
}
ALLOWED = {
    "one precision": "bf16: true\nfp16: false\n",
    "best model": "load_best_model_at_end: true\neval_strategy: steps\neval_steps: 100\nsave_steps: 200\n",
    "best model by epochs": "load_best_model_at_end: true\neval_strategy: epoch\nsave_strategy: epoch\n",
    "best saved": "load_best_model_at_end: true\neval_strategy: epoch\nsave_strategy: best\n",
    "prefetching": "dataloader_num_workers: 2\ndataloader_prefetch_factor: 4\ndataloader_persistent_workers: true\n",
    "plateau": "lr_scheduler_type: reduce_lr_on_plateau\neval_strategy: epoch\n",
    "no steps": "max_steps: -1\nnum_train_epochs: 3\n",
    "no evaluation": 'eval_strategy: "no"\n',
}


def built(text: str, folder: Path) -> object:
    from transformers import TrainingArguments

    return TrainingArguments(**{**yaml.safe_load(text), "output_dir": str(folder), "learning_rate": 2e-5, "use_cpu": True})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_the_trainer_refuses_is_found(name: str, tmp_path: Path) -> None:
    text = ARGUMENTS + REFUSED[name]
    [found] = examined(text)
    assert found.rule == RULE
    with pytest.raises(ValueError, match=".") as refusal:
        built(text, tmp_path)
    assert "unexpected keyword" not in str(refusal.value)


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_what_the_trainer_takes_is_left_alone(name: str, tmp_path: Path) -> None:
    text = ARGUMENTS + ALLOWED[name]
    assert examined(text) == []
    assert built(text, tmp_path) is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ARGUMENTS + "dataloader_persistent_workers: true\n", "without workers"),
        (ARGUMENTS + "auto_find_batch_size: true\n", "lowers per_device_train_batch_size 4"),
        (TRL + "auto_find_batch_size: true\nnum_generations: 4\n", "TRL stops"),
        (TRL + "load_in_4bit: true\nload_in_8bit: true\n", "load_in_8bit and load_in_4bit are both on"),
        (TRL + "packing: true\nattn_implementation: sdpa\n", "a mask of the whole packed length"),
        (TRL + "generation_batch_size: 8\nsteps_per_generation: 2\n", "both set"),
        (AXOLOTL + "warmup_steps: 10\nwarmup_ratio: 0.1\n", "axolotl accepts only one of them"),
        (AXOLOTL + "batch_size: 8\n", "axolotl accepts only one of them"),
        (AXOLOTL + "sample_packing: true\n", "no attention is chosen"),
        (ACCELERATE.replace("MULTI_GPU", "'NO'"), "accelerate starts one process"),
        (ACCELERATE.replace("MULTI_GPU", "NO"), "accelerate starts one process"),
        (DEEPSPEED.replace('"stage": 2', '"stage": 2, "offload_param": {"device": "cpu"}'), "nothing is offloaded"),
        (DEEPSPEED[:-2] + ', "fp16": {"enabled": true}, "bf16": {"enabled": true}}', "both on"),
        (ARGUMENTS + "gradient_accumulation_steps: 1\n", "repeated in lines 3 and 5"),
    ],
)  # fmt: skip
def test_what_cancels_is_found(text: str, said: str) -> None:
    [found] = examined(text)
    assert found.rule == RULE
    assert said in found.message


@pytest.mark.parametrize(
    "text",
    [
        TRL + "packing: true\nattn_implementation: flash_attention_2\n",
        TRL + "packing: false\ntrain_sampling_strategy: group_by_length\n",
        AXOLOTL + "sample_packing: true\nflash_attention: true\n",
        AXOLOTL + "warmup_ratio: 0.1\n",
        ACCELERATE.replace("MULTI_GPU", "'NO'").replace("num_processes: 2", "num_processes: 1"),
        ACCELERATE,
        DEEPSPEED.replace('"stage": 2', '"stage": 3, "offload_param": {"device": "cpu"}'),
        DEEPSPEED.replace('"stage": 2', '"stage": 1, "offload_optimizer": {"device": "cpu"}'),
        ARGUMENTS + "gradient_accumulation_steps: 8\n",
        ARGUMENTS + "max_steps: 100\nnum_train_epochs: 3\n",
        AXOLOTL + "max_steps: 5\n",
        ARGUMENTS + "eval_steps: 100\n",
        ARGUMENTS + "gradient_checkpointing: true\nuse_cache: true\n",
        TRL + "packing: true\ntrain_sampling_strategy: group_by_length\n",
    ],
)
def test_what_goes_together_is_left_alone(text: str) -> None:
    assert examined(text) == []


@pytest.mark.parametrize(
    ("config", "call"),
    [
        ("load_best_model_at_end: true\n", "TrainingArguments('out', eval_strategy='steps')"),
        ("dataloader_prefetch_factor: 4\n", "TrainingArguments('out', dataloader_num_workers=4)"),
        ("lr_scheduler_type: reduce_lr_on_plateau\n", "args.eval_strategy = 'epoch'"),
    ],
)
def test_what_the_code_sets_at_run_time_is_not_concluded_from_the_file(config: str, call: str) -> None:
    text = ARGUMENTS + config
    assert [found.rule for found in examined(text)] == [RULE]
    assert examined(text, code=code_of(call)) == []


def test_the_last_of_two_equal_keys_is_in_force() -> None:
    text = ARGUMENTS + "gradient_accumulation_steps: 1\n"
    [found] = examined(text)
    assert (found.in_force[0].set, found.in_force[0].in_force) == (8, 1)
    assert yaml.safe_load(text)["gradient_accumulation_steps"] == 1
    assert examined(mended(text, found)) == []


def test_a_batch_that_shrinks_does_not_go_with_zero_3() -> None:
    files = {
        "train.yaml": ARGUMENTS + "auto_find_batch_size: true\ndeepspeed: ds.json\n",
        "ds.json": DEEPSPEED.replace('"stage": 2', '"stage": 3'),
    }
    assert any("does not work with ZeRO-3" in each.message for each in examined_files(files))


def test_a_base_is_not_quantised_twice_by_trl_either() -> None:
    trl: Any = pytest.importorskip("trl", reason="TRL is not installed.")
    with pytest.raises(ValueError, match="8 bit and 4 bit"):
        trl.ModelConfig(load_in_4bit=True, load_in_8bit=True)


def test_a_key_that_stands_twice_stops_deepspeed() -> None:
    text = DEEPSPEED.replace("{\n", '{\n  "gradient_accumulation_steps": 8,\n', 1)
    [found] = examined(text)
    assert (found.rule, found.severity, found.line) == (RULE, None, 4)
    assert "DeepSpeed rejects a file with a repeated key" in found.message


@pytest.mark.parametrize("number", ["1e-4", "2E-5", "1.0e4", "5.5e3"])
def test_a_number_that_yaml_takes_for_text_is_found(number: str) -> None:
    text = ARGUMENTS.replace("2.0e-5", number)
    [found] = examined(text)
    assert (found.rule, found.confidence) == (RULE, "medium")
    mend = mended(text, found)
    assert yaml.safe_load(text)["learning_rate"] == number
    assert yaml.safe_load(mend)["learning_rate"] == float(number)
    assert examined(mend) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [("rate = float(cfg['learning_rate'])\n", []), ("from transformers import HfArgumentParser\n", [RULE])],
)
def test_a_number_as_text_is_a_fault_of_one_parser_only(code: str, found: list[str]) -> None:
    assert [each.rule for each in examined(ARGUMENTS.replace("2.0e-5", "2e-5"), code=code_of(code))] == found


def test_the_argument_parser_passes_that_text_on(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed.")
    file = tmp_path / "args.yaml"
    file.write_text("output_dir: outputs\nuse_cpu: true\nlearning_rate: 1e-4\n")
    [arguments] = transformers.HfArgumentParser(transformers.TrainingArguments).parse_yaml_file(str(file))
    assert arguments.learning_rate == "1e-4"


def test_numbers_in_json_and_those_that_other_tools_turn_into_numbers_are_left_alone() -> None:
    assert (
        examined('{"output_dir": "o", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "learning_rate": 1e-4}')
        == []
    )
    for text in (TRL, LLAMA_FACTORY, AXOLOTL):
        assert examined(text.replace("2.0e-5", "2e-5")) == []


def test_qlora_does_not_go_with_eight_bits() -> None:
    text = AXOLOTL + "adapter: qlora\nload_in_8bit: true\n"
    [found] = examined(text)
    assert (found.rule, found.severity) == (RULE, None)
    assert examined(mended(text, found)) == []
    assert examined(AXOLOTL + "adapter: lora\nload_in_8bit: true\n") == []
