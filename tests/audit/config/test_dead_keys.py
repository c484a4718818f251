"""Keys that nobody reads are found, with the name that is meant; the lists agree with the packages that are installed."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from brim.audit.config import dead_keys, keys
from tests.audit.config.parts import (
    ACCELERATE,
    ARGUMENTS,
    AXOLOTL,
    DEEPSPEED,
    LLAMA_FACTORY,
    TRL,
    examined,
    examined_files,
    mended,
    rules,
)

RULE = "config-dead-key"


@pytest.mark.parametrize(
    ("text", "key", "instead"),
    [
        (ARGUMENTS.replace("per_device_train", "per_gpu_train"), "per_gpu_train_batch_size", "per_device_train_batch_size: 4"),
        (ARGUMENTS + "evaluation_strategy: epoch\n", "evaluation_strategy", "eval_strategy: epoch"),
        (ARGUMENTS + "no_cuda: true\n", "no_cuda", "use_cpu: true"),
        (ARGUMENTS + "warmup_ratio: 0.03\n", "warmup_ratio", "warmup_steps: 0.03"),
        (ARGUMENTS + "group_by_length: true\n", "group_by_length", "train_sampling_strategy: group_by_length"),
        (ARGUMENTS.replace("accumulation", "acumulation"), "gradient_acumulation_steps", "gradient_accumulation_steps: 8"),
        (TRL.replace("max_length", "max_seq_length"), "max_seq_length", "max_length: 512"),
        (LLAMA_FACTORY + "evaluation_strategy: steps\n", "evaluation_strategy", "eval_strategy: steps"),
        (AXOLOTL.replace("micro_batch_size", "micro_batchsize"), "micro_batchsize", "micro_batch_size: 2"),
        (DEEPSPEED.replace("_steps", "_step"), "gradient_accumulation_step", '"gradient_accumulation_steps": 8'),
        (ACCELERATE.replace("num_processes", "num_proceses"), "num_proceses", "num_processes: 2"),
    ],
)  # fmt: skip
def test_a_dead_key_is_found_and_its_patch_gives_the_key_that_lives(text: str, key: str, instead: str) -> None:
    [found] = examined(text)
    assert found.rule == RULE
    assert key in found.message
    mend = mended(text, found)
    assert instead in mend
    assert examined(mend) == []


@pytest.mark.parametrize(
    "text",
    [
        ARGUMENTS + "max_seq_length: 512\ntorch_dtype: bfloat16\nmy_own_argument: 3\nblock_size: 4\n",
        LLAMA_FACTORY + "warmup_ratio: 0.1\noverwrite_output_dir: true\n",
        AXOLOTL + "warmup_ratio: 0.1\nwandb_name:\nsome_new_switch: true\n",
        DEEPSPEED[:-2] + ', "comms_config": {"verbose": false}}',
        TRL + "dataset_configs: [all]\n",
    ],
    ids=["a script's own arguments", "llama-factory's version", "axolotl", "deepspeed", "trl's data"],
)
def test_keys_that_somebody_may_read_are_left_alone(text: str) -> None:
    assert examined(text) == []


def test_a_key_of_accelerate_that_it_does_not_know_is_refused_by_it() -> None:
    [found] = examined(ACCELERATE + "gradient_accumulation_steps: 4\n")
    assert (found.rule, found.confidence) == (RULE, "medium")
    assert "refuses to start" in found.message


def test_deepspeed_does_not_clip_by_its_optimizer() -> None:
    text = DEEPSPEED[:-2] + ', "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}}'
    [found] = examined(text)
    assert (found.rule, found.severity) == (RULE, None)
    assert "gradient_clipping" in found.message


def test_what_does_not_change_the_training_counts_less() -> None:
    [found] = examined(ARGUMENTS + "overwrite_output_dir: true\n")
    assert found.severity == "medium"


def test_a_key_is_renamed_only_where_its_new_name_is_free() -> None:
    [found] = examined(ARGUMENTS + "evaluation_strategy: epoch\neval_strategy: steps\n")
    assert found.edits == ()
    assert not found.is_safe


@pytest.mark.parametrize("major", [4, None])
def test_under_an_older_transformers_its_keys_are_alive(
    major: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no project asks for a version
    monkeypatch.setattr(dead_keys, "_major", lambda _package: major)
    found = examined(ARGUMENTS + "warmup_ratio: 0.1\n")
    assert [(each.rule, each.confidence) for each in found] == ([] if major == 4 else [(RULE, "medium")])


def fields(*classes: Any) -> set[str]:
    return {field.name for each in classes for field in dataclasses.fields(each)}


def test_the_arguments_are_those_of_the_installed_transformers() -> None:
    transformers: Any = pytest.importorskip("transformers", minversion="5.22", reason="The list is that of transformers 5.22.")
    known = fields(transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments)
    assert not known & set(keys.REMOVED_ARGUMENTS)
    assert {gone.instead for gone in keys.REMOVED_ARGUMENTS.values() if gone.instead} <= known
    if transformers.__version__.startswith("5.22."):
        assert known == keys.ARGUMENTS


def test_trls_keys_are_those_of_the_installed_trl() -> None:
    trl: Any = pytest.importorskip("trl", reason="TRL is not installed.")
    known = fields(trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
    assert keys.TRL - known <= {"num_processes", "accelerate_config", "env", "datasets"}
    assert not known & set(keys.REMOVED_TRL)


def test_accelerates_keys_are_those_of_the_installed_accelerate() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    assert fields(ClusterConfig, SageMakerConfig) | {"dynamo_backend", "fp16"} == keys.ACCELERATE


def test_what_deepspeed_removed_is_what_the_installed_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", minversion="0.19", reason="The list is that of DeepSpeed 0.19.")
    config: Any = importlib.import_module("deepspeed.runtime.config")
    known = set(getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ()))
    assert {name for name in keys.REMOVED_DEEPSPEED if "." not in name} <= known
    assert not keys.DEEPSPEED & known


START = {
    "transformers": ARGUMENTS,
    "trl": TRL,
    "llama-factory": LLAMA_FACTORY,
    "axolotl": AXOLOTL,
    "accelerate": ACCELERATE,
    "deepspeed": "train_micro_batch_size_per_gpu: 4\nzero_optimization:\n  stage: 2\n",
}


@pytest.mark.parametrize("kind", sorted(START))
def test_no_known_key_is_taken_for_a_misspelling_of_another(kind: Any) -> None:
    own = {line.partition(":")[0] for line in START[kind].splitlines()}
    more = [name for name in sorted(dead_keys._KNOWN[kind] - own) if name not in keys.REMOVED_ARGUMENTS]
    assert RULE not in rules(examined(START[kind] + "".join(f"{name}: null\n" for name in more)))


def test_a_near_miss_beside_the_key_itself_is_read_by_nobody() -> None:
    text = AXOLOTL + "micro_batchsize: 8\n"
    [found] = examined(text)
    assert (found.rule, found.confidence) == (RULE, "medium")
    assert "micro_batch_size is what is in force" in found.message
    assert mended(text, found) == AXOLOTL


@pytest.mark.parametrize(
    ("name", "pin", "severity"),
    [
        ("requirements.txt", "torch\ntransformers\n", "medium"),
        ("requirements.txt", "transformers>=4.40\n", "medium"),
        ("requirements.txt", "transformers>=5.0\n", None),
        ("requirements.txt", "transformers[torch]==5.2.1\n", None),
        ("pyproject.toml", '[project]\ndependencies = [\n  "transformers>=5",\n]\n', None),
        ("requirements.txt", "transformers==4.51.3\n", "silent"),
        ("requirements.txt", "transformers>=4.40,<5\n", "silent"),
        ("pyproject.toml", '[project]\ndependencies = ["torch", "transformers~=4.50"]\n', "silent"),
    ],
    ids=["open", "old-bound", "new-bound", "new-pin", "pyproject", "old-pin", "below", "pyproject-old"],
)
def test_what_is_gone_since_transformers_5_weighs_as_the_project_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pin: str, severity: str | None
) -> None:
    monkeypatch.setattr(dead_keys, "_major", lambda _package: 5)
    (tmp_path / name).write_text(pin)
    found = examined_files({str(tmp_path / "args.yaml"): ARGUMENTS + "warmup_ratio: 0.03\n"})
    if severity == "silent":
        assert found == []
        return
    assert [each.severity for each in found] == [severity]
    assert "gone since transformers 5" in found[0].message
