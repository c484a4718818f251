"""Micro-batch x accumulation x processes is the batch that the config names, or it is said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from brim.audit.config.reading import read
from brim.audit.source.module import Source
from tests.audit.config.parts import ACCELERATE, ARGUMENTS, AXOLOTL, examined, examined_files, mended, rules

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
