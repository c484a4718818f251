"""Micro-batch x accumulation x processes is the batch that the config names, or it is said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from brim.audit.config.reading import read
from brim.audit.source.module import Source
from tests.audit.config.parts import ACCELERATE, ARGUMENTS, AXOLOTL, TRL, examined, examined_files, mended, rules

RULE = "config-product"


def deepspeed(train: int | None, micro: int | None, accumulation: int | None) -> str:
    figures = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": 2},
    }
    return json.dumps({key: value for key, value in figures.items() if value is not None}, indent=2)


@settings(max_examples=200, deadline=None)
@given(
    train=st.none() | st.integers(1, 64),
    micro=st.none() | st.integers(1, 8),
    accumulation=st.none() | st.integers(1, 8),
    world=st.integers(1, 8),
)
def test_what_deepspeed_refuses_is_found_and_nothing_else(
    train: int | None, micro: int | None, accumulation: int | None, world: int
) -> None:
    """DeepSpeed's own reckoning, from its documentation: a figure that is missing is the others' quotient, rounded down."""
    found = rules(examined(deepspeed(train, micro, accumulation), gpus=world))
    refused = False
    if train is not None:
        micro_ = micro if micro is not None else train // world // (accumulation or 1)
        accumulation_ = accumulation if accumulation is not None else (train // micro_ // world if micro is not None else 1)
        refused = micro_ * accumulation_ * world != train
    assert (RULE in found) is refused


def test_deepspeed_itself_stops_where_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed is not installed.")
    for train, micro, accumulation in ((100, 8, 4), (9, 2, None)):
        text = deepspeed(train, micro, accumulation)
        assert rules(examined(text, gpus=1)) == [RULE]
        with pytest.raises(AssertionError):
            config.DeepSpeedConfig(json.loads(text))
    assert config.DeepSpeedConfig(json.loads(deepspeed(32, 8, 4))).train_batch_size == 32


def test_without_processes_only_what_no_number_of_them_can_mend_is_found() -> None:
    assert rules(examined(deepspeed(128, 8, 4))) == []
    [found] = examined(deepspeed(100, 8, 4))
    assert found.line == 2
    assert "8 x 4 = 32" in found.message


def test_the_patch_keeps_the_batch_that_was_named() -> None:
    text = deepspeed(128, 8, 4)
    [found] = examined(text, gpus=2)
    tree = read(Source("a.json", mended(text, found)))
    assert tree is not None
    assert tree.entries["gradient_accumulation_steps"].value == 8
    assert examined(mended(text, found), gpus=2) == []


def test_accelerates_processes_count_for_the_file_that_the_arguments_name() -> None:
    files = {
        "run/train.yaml": ARGUMENTS + "deepspeed: ds.json\naccelerate_config: accelerate.yaml\n",
        "run/accelerate.yaml": ACCELERATE,
        "run/ds.json": deepspeed(32, 4, 8),
    }
    [found] = [each for each in examined_files(files) if each.rule == RULE]
    assert (found.file, "4 x 8 x 2 processes = 64" in found.message) == ("run/ds.json", True)


def test_accelerate_and_the_trainer_put_one_where_accumulation_is_missing() -> None:
    files = {"train.yaml": ARGUMENTS + "deepspeed: ds.json\n", "ds.json": deepspeed(32, 4, None)}
    assert RULE in rules(examined_files(files, gpus=1))
    assert RULE not in rules(examined_files({"ds.json": deepspeed(32, 4, None)}, gpus=1))


def test_axolotl_rounds_down_and_multiplies_by_the_processes() -> None:
    text = AXOLOTL.replace("gradient_accumulation_steps: 4", "batch_size: 9")
    [found] = examined(text)
    assert (found.rule, found.in_force[0].set, found.in_force[0].in_force) == (RULE, 9, 8)
    [found] = examined(text, gpus=2)
    assert found.in_force[0].in_force == 16
    assert examined(AXOLOTL.replace("gradient_accumulation_steps: 4", "batch_size: 8")) == []


AUTO = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {}}'


def test_auto_is_what_the_arguments_that_name_the_file_say() -> None:
    arguments = ARGUMENTS.replace("steps: 8", "steps: 4") + "deepspeed: ds.json\n"
    [found] = examined_files({"args.yaml": arguments, "ds.json": AUTO}, gpus=2)
    assert (found.rule, found.file, found.edits) == (RULE, "ds.json", ())
    assert "train_batch_size is 64, and 4 x 4 x 2 processes = 32" in found.message
    assert examined_files({"args.yaml": arguments, "ds.json": AUTO}, gpus=4) == []
    assert RULE not in rules(examined_files({"ds.json": AUTO}, gpus=2))


def test_auto_is_the_default_where_the_arguments_say_nothing() -> None:
    arguments = ARGUMENTS.replace("gradient_accumulation_steps: 8\n", "deepspeed: ds.json\n")
    assert examined_files({"args.yaml": arguments, "ds.json": AUTO}, gpus=16) == []
    assert rules(examined_files({"args.yaml": arguments, "ds.json": AUTO}, gpus=8)) == [RULE]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ARGUMENTS.replace("steps: 8", "steps: 0"), "gradient_accumulation_steps is 0"),
        (ARGUMENTS.replace("batch_size: 4", "batch_size: -4"), "per_device_train_batch_size is -4"),
        (ARGUMENTS.replace("batch_size: 4", 'batch_size: "4"'), 'per_device_train_batch_size is the text "4"'),
        (AXOLOTL.replace("batch_size: 2", "batch_size: 0"), "micro_batch_size is 0"),
        (deepspeed(8, -4, 2), "train_micro_batch_size_per_gpu is -4"),
        (deepspeed(8, 4, 2).replace("8", '"8"'), 'train_batch_size is the text "8"'),
    ],
    ids=["zero-steps", "negative-batch", "batch-as-text", "axolotl", "deepspeed-negative", "deepspeed-text"],
)
def test_a_factor_that_is_none_is_found(text: str, said: str) -> None:
    [found] = examined(text)
    assert found.rule == RULE
    assert said in found.message


def test_a_stage_in_quotes_is_not_seen_by_the_trainer() -> None:
    text = deepspeed(8, 4, 2).replace('"stage": 2', '"stage": "3"')
    [found] = examined(text)
    assert (found.rule, found.severity) == (RULE, "medium")
    assert '"stage": 3' in mended(text, found)


def test_parsers_that_turn_text_into_numbers_are_left_alone() -> None:
    assert examined(AXOLOTL.replace("batch_size: 2", 'batch_size: "2"')) == []
    assert examined(TRL.replace("batch_size: 4", 'batch_size: "4"')) == []
