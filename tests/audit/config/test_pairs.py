"""Files that are read together say the same, or it is said who wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.audit.config.parts import ACCELERATE, ARGUMENTS, DEEPSPEED, TRL, code_of, examined_files, mended, rules

RULE = "config-pair-disagrees"


def deepspeed(**changes: Any) -> str:
    return json.dumps({**json.loads(DEEPSPEED), **changes}, indent=2)


def pair(arguments: str, engine: str, **asked: Any) -> list[Any]:
    files = {"configs/train.yaml": arguments + "deepspeed: ds.json\n", "configs/ds.json": engine}
    return [each for each in examined_files(files, **asked) if each.rule == RULE]


@pytest.mark.parametrize(
    ("line", "changes", "said"),
    [
        ("", {"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 8"),
        ("", {"train_micro_batch_size_per_gpu": 2}, "per_device_train_batch_size is 4"),
        ("max_grad_norm: 0.5\n", {"gradient_clipping": 1.0}, "max_grad_norm is 0.5"),
        ("", {"gradient_clipping": 0.3}, "max_grad_norm is not set here, so it is 1.0"),
        ("", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, "learning_rate is 2e-05"),
        ("bf16: true\n", {"bf16": {"enabled": False}}, "bf16 is True"),
    ],
    ids=["accumulation", "micro-batch", "clipping", "clipping by default", "learning rate", "precision"],
)
def test_the_trainer_stops_where_its_values_and_deepspeeds_differ(line: str, changes: dict[str, Any], said: str) -> None:
    [found] = pair(ARGUMENTS + line, deepspeed(**changes))
    assert found.file == "configs/train.yaml"
    assert said in found.message
    assert [edit.file for edit in found.edits] == ["configs/ds.json"]
    assert pair(ARGUMENTS + line, mended(deepspeed(**changes), found)) == []


def test_the_trainer_itself_stops_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed.")
    from transformers import TrainingArguments
    from transformers.integrations import deepspeed as integration

    compare: Any = integration.HfTrainerDeepSpeedConfig
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=8, learning_rate=2e-5, use_cpu=True
    )
    for changes, key in (
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps"),
        ({"gradient_clipping": 0.3}, "max_grad_norm"),
    ):
        compared = compare(json.loads(deepspeed(**changes)))
        compared.trainer_config_process(arguments)
        assert key in compared.mismatches[0]
        assert len(pair(ARGUMENTS, deepspeed(**changes))) == len(compared.mismatches) == 1


def test_equal_values_and_auto_are_left_alone() -> None:
    assert pair(ARGUMENTS, DEEPSPEED) == []
    assert pair(ARGUMENTS, deepspeed(gradient_accumulation_steps="auto", train_micro_batch_size_per_gpu="auto")) == []
    assert pair(ARGUMENTS + "bf16: true\n", deepspeed(bf16={"enabled": "auto"})) == []


def test_a_mapping_in_the_arguments_is_compared_too() -> None:
    text = ARGUMENTS + "deepspeed:\n  gradient_accumulation_steps: 2\n  zero_optimization:\n    stage: 2\n"
    [found] = [each for each in examined_files({"a.yaml": text}) if each.rule == RULE]
    assert found.line == 3


def test_files_that_only_lie_together_are_compared_with_less_confidence() -> None:
    files = {"a/train.yaml": ARGUMENTS, "a/ds.json": deepspeed(gradient_accumulation_steps=1)}
    [found] = examined_files(files)
    assert (found.rule, found.confidence, found.edits) == (RULE, "low", ())
    assert examined_files({"a/train.yaml": ARGUMENTS, "b/ds.json": deepspeed(gradient_accumulation_steps=1)}) == []
    assert examined_files({**files, "a/other.yaml": ARGUMENTS}) == []


@pytest.mark.parametrize(("line", "in_force"), [("bf16: true\n", "bf16"), ("bf16: false\nfp16: false\n", "fp16")])
def test_of_two_precisions_the_one_in_force_is_named(line: str, in_force: str) -> None:
    files = {"train.yaml": ARGUMENTS + line + "accelerate_config: accelerate.yaml\n", "accelerate.yaml": ACCELERATE}
    [found] = examined_files(files)
    assert found.rule == RULE
    assert found.message.endswith(f": {in_force} is used.")
    assert found.in_force[0].in_force == in_force


def test_the_precision_in_force_is_what_the_trainer_says_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainingArguments

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    arguments: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True}
    assert TrainingArguments(**arguments, bf16=True).mixed_precision == "bf16"
    assert TrainingArguments(**arguments, bf16=False, fp16=False).mixed_precision == "fp16"


def test_processes_that_are_named_twice_are_compared() -> None:
    files = {"trl.yaml": TRL + "num_processes: 1\naccelerate_config: accelerate.yaml\n", "accelerate.yaml": ACCELERATE}
    [found] = examined_files(files)
    assert (found.rule, found.in_force[0].set, found.in_force[0].in_force) == (RULE, 2, 1)


REPEATED = """\
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 2
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: false
  gradient_accumulation_steps: 4
  zero_stage: 2
"""


def test_what_a_deepspeed_file_says_may_not_be_said_by_accelerate_again() -> None:
    [found] = examined_files({"accelerate.yaml": REPEATED})
    assert found.rule == RULE
    assert "says: gradient_accumulation_steps, zero_stage, mixed_precision. accelerate refuses to start" in found.message
    mend = mended(REPEATED, found)
    assert "zero3_init_flag" in mend
    assert examined_files({"accelerate.yaml": mend}) == []


@pytest.mark.parametrize("field", ["mixed_precision", "gradient_accumulation_steps", "zero_stage"])
def test_accelerate_itself_refuses_it(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed.")
    from accelerate.utils import DeepSpeedPlugin

    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{field}")
    with pytest.raises(ValueError, match="will be ignored"):
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}})


def test_accelerates_own_accumulation_is_compared_with_the_trainers() -> None:
    launcher = (
        ACCELERATE.replace("MULTI_GPU", "DEEPSPEED") + "deepspeed_config:\n  gradient_accumulation_steps: 1\n  zero_stage: 2\n"
    )
    files = {"train.yaml": ARGUMENTS + "fp16: true\naccelerate_config: a.yaml\n", "a.yaml": launcher}
    assert rules(examined_files(files)) == [RULE]
    assert examined_files({**files, "a.yaml": launcher.replace("steps: 1", "steps: 8")}) == []


def test_a_default_that_the_code_replaces_is_not_compared() -> None:
    files = {
        "train.yaml": ARGUMENTS.replace("per_device_train_batch_size: 4\n", "optim: adamw_torch\n") + "deepspeed: ds.json\n",
        "ds.json": DEEPSPEED,
    }
    assert RULE in [found.rule for found in examined_files(files)]
    code = code_of("args = TrainingArguments('out', per_device_train_batch_size=micro)\n")
    assert RULE not in [found.rule for found in examined_files(files, code=code)]
