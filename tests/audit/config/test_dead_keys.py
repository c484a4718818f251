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
    code_of,
    examined,
    mended,
    rules,
)

RULE = "config-dead-key"


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder where no project asks for a version."""
    monkeypatch.chdir(tmp_path)


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


@pytest.mark.parametrize(("clipping", "in_force"), [("", 0.0), (', "gradient_clipping": 0.5', 0.5)])
def test_deepspeed_does_not_clip_by_its_optimizer(clipping: str, in_force: float) -> None:
    text = DEEPSPEED[:-2] + clipping + ', "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}}'
    [found] = examined(text)
    assert (found.rule, found.severity) == (RULE, None)
    assert f"gradient_clipping, which is {in_force}" in found.message
    assert [(row.set, row.in_force) for row in found.in_force] == [(1.0, in_force)]


@pytest.mark.parametrize(
    "line",
    ["overwrite_output_dir: true", "logging_dir: logs", "group_by_length: false", "evaluation_strategy: no", "warmup_ratio: 0"],
)
def test_what_changes_nothing_is_low(line: str) -> None:
    [found] = examined(ARGUMENTS + f"{line}\n")
    assert (found.rule, found.severity) == (RULE, "low")


@pytest.mark.parametrize(("is_on", "severity"), [("false", "low"), ("true", "medium")])
def test_a_section_of_deepspeed_that_is_switched_off_is_low(is_on: str, severity: str) -> None:
    [found] = examined(DEEPSPEED[:-2] + f', "amp": {{"enabled": {is_on}}}}}')
    assert (found.rule, found.severity) == (RULE, severity)


@pytest.mark.parametrize("line", ["warmup_ratio:", "evaluation_strategy: null", "gradient_acumulation_steps: ~"])
def test_a_key_without_a_value_sets_nothing(line: str) -> None:
    text = ARGUMENTS.replace("gradient_accumulation_steps: 8\n", "") + f"{line}\n"
    assert examined(text) == []


@pytest.mark.parametrize(
    "code",
    [
        "def train(cfg):\n    return cfg['train']['warmup_ratio']\n",
        "def train(cfg):\n    return cfg.get('warmup_ratio', 0.1)\n",
        "def train(cfg):\n    return cfg.sft.warmup_ratio\n",
        "def train(cfg):\n    return read(cfg, 'warmup_ratio')\n",
        "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    warmup_ratio: float = 0.1\n",
        "def flags(parser):\n    parser.add_argument('--warmup-ratio', type=float)\n",
    ],
    ids=["subscript", "get", "attribute", "helper", "dataclass", "flag"],
)
@pytest.mark.parametrize("text", [ARGUMENTS, TRL], ids=["transformers", "trl"])
def test_a_key_that_the_projects_code_reads_is_not_dead(text: str, code: str) -> None:
    text += "warmup_ratio: 0.1\n"
    assert rules(examined(text)) == [RULE]
    assert examined(text, code=code_of(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "args = TrainingArguments('out', warmup_ratio=0.1)\n",
        "warmup_ratio = 0.1\n",
        "# warmup_ratio is read from the file\n",
    ],
)
def test_a_key_that_code_only_writes_is_still_dead(code: str) -> None:
    assert rules(examined(ARGUMENTS + "warmup_ratio: 0.1\n", code=code_of(code))) == [RULE]


@pytest.mark.parametrize(
    ("code", "severity"),
    [
        ("from transformers import HfArgumentParser\n", None),
        ("import mine\nmine.train('a.yaml')\n", "low"),
    ],
)
@pytest.mark.parametrize("line", ["evaluation_strategy: epoch", "num_train_epoch: 3"])
def test_a_file_that_something_else_may_read_is_low(tmp_path: Path, line: str, code: str, severity: str | None) -> None:
    (tmp_path / "requirements.txt").write_text("transformers>=5\n")
    [found] = examined(ARGUMENTS + f"{line}\n", code=code_of(code))
    assert found.severity == (severity or ("medium" if "epoch:" in line else None))


def test_what_a_tool_reads_itself_is_not_read_by_the_projects_code() -> None:
    text = LLAMA_FACTORY + "evaluation_strategy: steps\n"
    assert rules(examined(text, code=code_of("print(cfg['evaluation_strategy'])\n"))) == [RULE]


def test_a_file_of_deepspeed_that_the_code_edits_is_not_judged_as_it_lies_there() -> None:
    text = DEEPSPEED[:-2] + ', "train_batch_size": 100}'
    assert rules(examined(text)) == ["config-product"]
    assert examined(text, code=code_of("config['train_batch_size'] = micro * accumulation * world\n")) == []


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.4.1", [("max_packed_sequence_len", None)]),
        ("0.18.0", [("max_packed_sequence_len", None), ("s2_attention", None)]),
        ("0.3.0", []),
    ],
)
def test_a_framework_reads_what_its_own_version_reads(tmp_path: Path, version: str, found: list[tuple[str, str | None]]) -> None:
    (tmp_path / "setup.py").write_text(f"from setuptools import setup\nsetup(name='axolotl', version='{version}')\n")
    seen = examined(AXOLOTL + "max_packed_sequence_len: 2048\ns2_attention: true\nmicro_batchsize: 4\n")
    assert [(each.message.partition(" ")[0], each.severity) for each in seen] == found


def test_a_key_is_renamed_only_where_its_new_name_is_free() -> None:
    [found] = examined(ARGUMENTS + "evaluation_strategy: epoch\neval_strategy: steps\n")
    assert found.edits == ()
    assert not found.is_safe


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
    assert "micro_batch_size is used" in found.message
    assert [(row.set, row.in_force) for row in found.in_force] == [(8, 2)]
    assert mended(text, found) == AXOLOTL


@pytest.mark.parametrize(
    ("name", "pin", "severity"),
    [
        ("requirements.txt", "torch\ntransformers\n", "medium"),
        ("requirements.txt", "transformers>=4.40\n", "medium"),
        ("requirements.txt", "transformers[torch]==5.16.1\n", None),
        ("pyproject.toml", '[project]\ndependencies = [\n  "transformers>=5.15",\n]\n', None),
        ("requirements.txt", "transformers==5.7.0\n", "silent"),
        ("requirements.txt", "transformers>=4.40,<5\n", "silent"),
        ("pyproject.toml", '[project]\ndependencies = ["torch", "transformers~=4.50"]\n', "silent"),
    ],
    ids=["open", "old-bound", "new-pin", "pyproject", "5.7", "below", "pyproject-old"],
)
@pytest.mark.parametrize("kind", ["transformers", "trl"])
def test_a_key_is_dead_by_the_version_that_the_project_pins(
    tmp_path: Path, kind: str, name: str, pin: str, severity: str | None
) -> None:
    (tmp_path / name).write_text(pin)
    found = examined({"transformers": ARGUMENTS, "trl": TRL}[kind] + "warmup_ratio: 0.03\n")
    assert [each.severity for each in found] == ([] if severity == "silent" else [severity])
    assert all("removed in transformers 5.15" in each.message for each in found)


@pytest.mark.parametrize(
    ("pin", "is_safe"),
    [("transformers==5.2.0", True), ("transformers>=4.51", True), ("transformers>=4.30", False), ("transformers", False)],
)
def test_a_rename_is_safe_only_where_every_admitted_version_has_the_new_name(tmp_path: Path, pin: str, is_safe: bool) -> None:
    (tmp_path / "requirements.txt").write_text(f"{pin}\n")
    [found] = examined(ARGUMENTS + "evaluation_strategy: epoch\n")
    assert found.edits
    assert found.is_safe == is_safe


def test_keys_of_trl_are_dead_by_the_version_of_trl(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers==5.20.0\ntrl==0.15.2\n")
    assert examined(TRL + "max_seq_length: 512\n") == []
    (tmp_path / "requirements.txt").write_text("transformers==4.56.0\ntrl>=0.20\n")
    assert rules(examined(TRL + "max_seq_length: 512\n")) == [RULE]
