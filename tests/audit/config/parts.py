"""Configs as tests need them."""

from __future__ import annotations

from typing import Any

from brim.audit.config.code_names import CodeNames
from brim.audit.config.examine import examine_configs
from brim.audit.config.kinds import Config, recognise
from brim.audit.found import Found
from brim.audit.source.files import parse
from brim.audit.source.module import Source

ARGUMENTS = """\
output_dir: outputs
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
learning_rate: 2.0e-5
"""
TRL = ARGUMENTS + "model_name_or_path: gpt2\nuse_peft: false\nmax_length: 512\nfp16: true\n"
LLAMA_FACTORY = ARGUMENTS + "model_name_or_path: gpt2\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\nfp16: true\n"
AXOLOTL = """\
base_model: gpt2
datasets:
  - path: data.jsonl
    type: alpaca
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 2.0e-5
optimizer: adamw_torch
bf16: auto
"""
DEEPSPEED = """\
{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "zero_optimization": {"stage": 2}
}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp16
num_machines: 1
num_processes: 2
"""


def examined(*texts: str, **asked: Any) -> list[Found]:
    """What is found in texts that are named one.yaml, two.yaml, ...: JSON by its first letter."""
    files = {
        f"{name}.{'json' if text.lstrip().startswith('{') else 'yaml'}": text for name, text in zip("abcdef", texts, strict=False)
    }
    return examined_files(files, **asked)


def examined_files(files: dict[str, str], **asked: Any) -> list[Found]:
    """What is found in these files; nothing is predicted unless that is asked for."""
    return list(examine_configs([Source(name, text) for name, text in files.items()], **{"predict": False, **asked}))


def code_of(*texts: str) -> CodeNames:
    """Python files of the project."""
    return CodeNames([parse(Source(f"{number}.py", text), f"module{number}") for number, text in enumerate(texts)])


def rules(found: list[Found]) -> list[str]:
    """The names of what was found."""
    return [each.rule for each in found]


def config_of(text: str, name: str = "a.yaml") -> Config:
    """The one config in a text."""
    found = recognise(Source(name, text), [])
    assert len(found) == 1
    return found[0]


def mended(text: str, found: Found) -> str:
    """The text with the edits of a finding made, the last first."""
    lines = text.split("\n")
    for edit in sorted(found.edits, key=lambda each: (each.line, each.column), reverse=True):
        before = lines[edit.line - 1][: edit.column]
        after = lines[edit.end_line - 1][edit.end_column :] if edit.end_line <= len(lines) else ""
        lines[edit.line - 1 : edit.end_line] = (before + edit.text + after).split("\n")
    return "\n".join(lines)
