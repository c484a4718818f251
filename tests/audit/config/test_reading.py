"""Any text is read or refused, never trusted; places are those of the file."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings, strategies as st

from brim.audit.config.kinds import recognise
from brim.audit.config.reading import LARGEST_CHARACTERS, Broken, Tree, read
from brim.audit.source.module import Source
from tests.audit.config.parts import ARGUMENTS, AXOLOTL, DEEPSPEED, TRL, examined


def tree_of(text: str) -> Tree:
    tree = read(Source("a", text))
    assert tree is not None
    return tree


def test_json_with_comments_tabs_and_trailing_commas_is_read_in_place() -> None:
    text = (
        '{\n\t// DeepSpeed takes comments\n\t"zero_optimization": {"stage": 2,}, # and these\n\t/* and\n\tthese */ "lr": 1e-5,\n}'
    )
    entries = tree_of(text).entries
    assert entries["zero_optimization.stage"].value == 2
    assert entries["zero_optimization.stage"].line == 3
    assert entries["lr"].value == pytest.approx(1e-5)
    assert text.split("\n")[4][entries["lr"].of_value.column : entries["lr"].of_value.end_column] == "1e-5"


def test_two_slashes_in_a_string_are_no_comment() -> None:
    assert tree_of('{"address": "https://example.com/a#b", "b": 1}').entries["address"].value == "https://example.com/a#b"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_lines_are_those_of_the_file_whatever_ends_them(start: str, end: str) -> None:
    entries = tree_of(start + end.join(["a: 1", "b:", "  c: no", ""])).entries
    assert [(entry.name, entry.line, entry.value) for entry in entries.values()] == [
        ("a", 1, 1),
        ("b", 2, {"c": False}),
        ("b.c", 3, False),
    ]
    assert entries["a"].key.column == len(start)


def test_numbers_are_what_people_mean_by_them() -> None:
    entries = tree_of('a: 1e-5\nb: 5e8\nc: "8"\nd: 1_000\ne: .nan\nf: 0x10\ng: ~\nh:\n').entries
    assert [entry.value for entry in entries.values()] == [1e-5, 5e8, "8", 1000, ".nan", "0x10", None, None]


def test_anchors_are_merged_below_what_stands_there() -> None:
    entries = tree_of("base: &base\n  x: 1\n  y: 2\nown:\n  <<: *base\n  x: 3\n").entries
    assert entries["own"].value == {"x": 3, "y": 2}
    assert (entries["own.x"].value, entries["own.y"].value) == (3, 2)


def test_a_key_that_stands_twice_is_kept_twice() -> None:
    [(lost, holds)] = tree_of("a: 1\nb: 2\na: 3\n").repeated
    assert (lost.line, lost.value, holds.line, holds.value) == (1, 1, 3, 3)


def test_a_bomb_of_aliases_is_not_unfolded() -> None:
    layers = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    merged = [f"m{level}: &m{level}\n  <<: [{', '.join([f'*m{level - 1}'] * 9)}]" for level in range(1, 12)]
    text = ARGUMENTS + "\n".join(["a0: &a0 [x]", *layers, "m0: &m0\n  k: 1", *merged])
    entries = tree_of(text).entries
    assert entries["per_device_train_batch_size"].value == 4
    assert len(entries) < 20_000


def test_a_list_that_holds_itself_ends() -> None:
    assert tree_of("a: &a [*a]\nb: &b {c: *b}\nd: 1\n").entries["d"].value == 1


@pytest.mark.parametrize("text", ["{" * 5000, "[" * 5000 + "]" * 5000, "a: [1, 2", "a:\n\t- b", "\x00", "a: *nowhere"])
def test_what_is_no_config_is_broken_or_empty(text: str) -> None:
    with contextlib.suppress(Broken):
        assert read(Source("a", text)) is None


def test_a_training_config_that_cannot_be_read_is_noted_once_and_anything_else_is_not() -> None:
    notes: list[str] = []
    assert recognise(Source("train.yaml", ARGUMENTS + "bad: [1, 2\n"), notes) == []
    assert recognise(Source("other.yaml", "services:\n  web: [1, 2\n"), notes) == []
    [note] = notes
    assert note.startswith("train.yaml looks like a training config, and cannot be read in line 6")


def test_a_huge_file_is_left_alone() -> None:
    assert recognise(Source("a.yaml", ARGUMENTS + "#" * LARGEST_CHARACTERS), []) == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {line.partition(":")[0].strip(' "') for text in (ARGUMENTS, AXOLOTL, DEEPSPEED, TRL) for line in text.splitlines()}
    | {"deepspeed", "deepspeed_config", "distributed_type", "mixed_precision", "bf16", "packing", "auto_find_batch_size", "eval_steps",
       "load_best_model_at_end", "max_steps", "num_train_epochs", "optimizer", "train_batch_size", "batch_size", "num_processes",
       "dataloader_prefetch_factor", "attn_implementation", "quantization_bit", "adapter", "tf32", "lr_scheduler_type", "use_cache"}
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=10), VALUES, max_size=14))
def test_known_keys_with_any_values_are_examined(content: dict[str, object]) -> None:
    text = json.dumps(content, indent=1)
    for found in examined(text, gpu="t4", gpus=2, has_trainer=False):
        assert 1 <= found.line <= text.count("\n") + 1
        assert found.message


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_config_with_any_damage_is_examined(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([ARGUMENTS, TRL, AXOLOTL, DEEPSPEED]))
    at = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 6))
    examined(text[:at] + data.draw(st.text(max_size=6)) + text[at + length :], gpu="t4", gpus=2)
