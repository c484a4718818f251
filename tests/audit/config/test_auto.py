"""`auto` is found where nobody fills it in, and only there."""

from __future__ import annotations

import json

import pytest

from brim.audit.config.auto import FILLED_BY_TRAINER
from tests.audit.config.parts import ARGUMENTS, examined, examined_files, rules

RULE = "config-auto-open"


def nested(names: frozenset[str]) -> str:
    content: dict[str, object] = {
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR"},
    }
    for name in sorted(names):
        *sections, last = name.split(".")
        part = content
        for section in sections:
            part = part.setdefault(section, {})  # type: ignore[assignment]
        part[last] = "auto"
    return json.dumps(content, indent=1)


def test_every_field_that_the_trainer_fills_may_be_auto() -> None:
    text = nested(FILLED_BY_TRAINER)
    assert examined(text) == []
    assert examined(text, has_trainer=True) == []
    assert examined_files({"train.yaml": ARGUMENTS + "deepspeed: ds.json\n", "ds.json": text}, has_trainer=False) == []


def test_without_the_trainer_they_stay_open() -> None:
    [found] = examined(nested(FILLED_BY_TRAINER), has_trainer=False)
    assert (found.rule, found.confidence) == (RULE, "medium")
    assert "gradient_accumulation_steps" in found.message


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("zero_optimization.stage3_max_live_parameters", "takes its default"),
        ("fp16.initial_scale_power", "takes its default"),
        ("optimizer.params.momentum", "the word itself"),
    ],
)
def test_a_field_that_nobody_fills_is_found(field: str, said: str) -> None:
    [found] = examined(nested(frozenset({field})))
    assert found.rule == RULE
    assert field in found.message
    assert said in found.message


def test_words_that_deepspeed_or_accelerate_understand_are_left_alone() -> None:
    fields = {"data_types.keep_in_fp32_modules", "zero_optimization.stage3_gather_16bit_weights_on_model_save"}
    assert RULE not in rules(examined(nested(frozenset(fields))))


def test_the_trainer_fills_what_it_is_said_to_fill() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed", reason="transformers is not installed.")
    text = open(integration.__file__, encoding="utf-8").read()  # noqa: PTH123, SIM115
    assert all(f'"{name}"' in text for name in FILLED_BY_TRAINER)
