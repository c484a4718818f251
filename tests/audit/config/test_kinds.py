"""A config is known by its keys, and what is none is left alone."""

from __future__ import annotations

import pytest

from brim.audit.config.kinds import recognise
from brim.audit.config.view import view_of
from brim.audit.source.module import Source
from tests.audit.config.parts import ACCELERATE, ARGUMENTS, AXOLOTL, DEEPSPEED, LLAMA_FACTORY, TRL, config_of


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ARGUMENTS, "transformers"),
        (TRL, "trl"),
        (LLAMA_FACTORY, "llama-factory"),
        (AXOLOTL, "axolotl"),
        (DEEPSPEED, "deepspeed"),
        (ACCELERATE, "accelerate"),
        ('{"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true}}', "deepspeed"),
        ("training:\n  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2\n", "transformers"),
    ],
    ids=["transformers", "trl", "llama-factory", "axolotl", "deepspeed", "accelerate", "deepspeed without zero", "nested"],
)
def test_each_format_is_recognised_by_its_keys(text: str, kind: str) -> None:
    assert config_of(text, "anything.conf").kind == kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- b\n",
        '{"name": "web", "scripts": {"train": "node train.js"}, "dependencies": {}}',
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "learning_rate": 1}',
        '{"global_step": 10, "log_history": [], "train_batch_size": 8, "num_train_epochs": 3, "max_steps": 9, "logging_steps": 1}',
        "services:\n  trainer:\n    image: x\n    environment:\n      gradient_accumulation_steps: 4\n",
        "jobs:\n  test:\n    steps:\n      - run: python train.py --per_device_train_batch_size 4\n",
        "base_model: mistral\nmerge_method: slerp\nmodels: []\nsequence_len: 4\n",
        "learning_rate: 1.0\nmicro_batch_size: 4\n",
    ],
    ids=["empty", "list", "package", "model", "trainer state", "compose", "workflow", "merge", "two keys of anybody"],
)
def test_other_files_are_left_alone(text: str) -> None:
    notes: list[str] = []
    assert recognise(Source("config.json", text), notes) == []
    assert not notes


def test_a_deepspeed_mapping_inside_the_arguments_is_a_config_of_its_own() -> None:
    found = recognise(Source("a.yaml", ARGUMENTS + "deepspeed:\n  zero_optimization:\n    stage: 3\n"), [])
    assert [config.kind for config in found] == ["transformers", "deepspeed"]
    assert found[1].value("zero_optimization.stage") == 3
    assert found[0].links == [found[1]]


def test_all_formats_are_seen_in_the_same_words() -> None:
    views = [view_of(config_of(text)) for text in (TRL, LLAMA_FACTORY, AXOLOTL)]
    assert [view.length.value for view in views if view.length] == [512, 512, 512]
    assert [view.micro_batch.value for view in views if view.micro_batch] == [4, 4, 2]
    assert [view.accumulation.value for view in views if view.accumulation] == [8, 8, 4]
    assert [view.model.value for view in views if view.model] == ["gpt2"] * 3
    deepspeed = view_of(config_of(DEEPSPEED))
    assert deepspeed.zero_stage is not None
    assert (deepspeed.zero_stage.value, deepspeed.zero_stage.entry.line) == (2, 4)
    accelerate = view_of(config_of(ACCELERATE))
    assert accelerate.precision is not None
    assert accelerate.world_size is not None
    assert (accelerate.precision.value, accelerate.world_size.value) == ("fp16", 2)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("attn_implementation: flash_attention_2", "attention", "flash2"),
        ("attn_implementation: kernels-community/flash-attn2", "attention", "flash2"),
        ("flash_attention: true", "attention", "flash2"),
        ("sdp_attention: true", "attention", "sdpa"),
        ("adapter: qlora", "adapter", "lora"),
        ("load_in_4bit: true", "quantisation", 4),
        ("sample_packing: true", "packing", True),
        ("lr_scheduler: cosine", "schedule", "cosine"),
        ("fp8: true", "precision", "fp8"),
    ],
)
def test_axolotls_words_are_understood(line: str, field: str, value: object) -> None:
    said = getattr(view_of(config_of(AXOLOTL + line + "\n")), field)
    assert said.value == value
    assert said.entry.line == AXOLOTL.count("\n") + 1
