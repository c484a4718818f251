"""A micro-batch gives its rows to two smaller ones: every row as it was, without columns that are padding in all rows that are left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from brim.step.micro import IGNORED, Counting, MicroBatch, has_rows, trimmed
from tests.step import toys

LENGTHS = [6, 5, 3, 2, 1]


def features(lengths: Sequence[int] = LENGTHS) -> list[dict[str, list[int]]]:
    """Row `n` holds the numbers from 10 n on; its first token is not supervised."""
    rows = [list(range(10 * row + 1, 10 * row + 1 + length)) for row, length in enumerate(lengths)]
    return [{"input_ids": row, "labels": [IGNORED, *row[1:]]} for row in rows]


def right(lengths: Sequence[int] = LENGTHS) -> MicroBatch:
    return MicroBatch(np.arange(len(lengths)) + 100, np.array(lengths), toys.collate(features(lengths)))


def left(lengths: Sequence[int] = LENGTHS) -> MicroBatch:
    """The same rows with the padding before them, as decoders are fed for generation."""
    micro = right(lengths)
    batch = {
        key: torch.stack([row.roll(len(row) - length) for row, length in zip(value, lengths, strict=True)])
        for key, value in micro.batch.items()
    }
    return MicroBatch(micro.ids, micro.lengths, batch)


def contents(micro: MicroBatch) -> list[tuple[int, list[int], list[int]]]:
    """What each row says, padding apart."""
    batch = micro.batch
    shown = batch["attention_mask"].bool()
    rows = range(len(micro))
    return [
        (int(micro.ids[row]), batch["input_ids"][row][shown[row]].tolist(), batch["labels"][row][shown[row]].tolist())
        for row in rows
    ]


@pytest.mark.parametrize("made", [right, left], ids=["right", "left"])
def test_halves_hold_the_same_rows_without_the_padding_of_the_longest(made: Any) -> None:
    micro = made()
    first, second = micro.split(None)
    assert (first.ids.tolist(), second.ids.tolist()) == ([100, 101, 102], [103, 104])
    assert contents(first) + contents(second) == contents(micro)
    assert [half.batch["input_ids"].shape for half in (first, second)] == [(3, 6), (2, 2)]
    assert all(value.shape == (2, 2) for value in second.batch.values())
    assert (second.tokens, second.padded_tokens, second.shape, second.padded) == (3, 4, (2,), (2,))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans())
def test_splitting_to_the_end_loses_and_repeats_nothing(lengths: list[int], pads_left: bool) -> None:
    micro = (left if pads_left else right)(sorted(lengths, reverse=True))
    waiting, alone = [micro], []
    while waiting:
        one = waiting.pop(0)
        waiting[:0] = one.split(None) if len(one) > 1 else []
        alone += [one] if len(one) == 1 else []
    assert [row for one in alone for row in contents(one)] == contents(micro)
    assert all(one.padded_tokens == one.tokens == one.lengths.sum() for one in alone)
    for counting in ("next-token", "token", "sequence"):
        assert sum(one.items(counting) for one in alone) == micro.items(counting)


def test_labels_outside_the_mask_keep_their_columns() -> None:
    micro = right([4, 2])
    micro.batch["labels"][1, 3] = 7
    second = micro.split(None)[1]
    assert second.batch["labels"].tolist() == [[IGNORED, 12, IGNORED, 7]]
    assert second.batch["input_ids"].shape == (1, 4)


def test_a_matrix_of_which_nothing_is_known_keeps_all_columns_as_they_were() -> None:
    micro = right()
    micro.batch["bias"] = torch.arange(30.0).view(5, 6)
    second = micro.split(None)[1]
    assert second.batch["bias"].tolist() == torch.arange(18.0, 30.0).view(2, 6).tolist()
    assert second.batch["input_ids"].shape == (2, 6)


def test_values_of_one_number_a_row_do_not_stop_the_trimming() -> None:
    micro = right()
    micro.batch["length"] = torch.tensor(LENGTHS)
    micro.batch["name"] = ["a", "b", "c", "d", "e"]
    second = micro.split(None)[1]
    assert second.batch["length"].tolist() == [2, 1]
    assert second.batch["name"] == ["d", "e"]
    assert second.batch["input_ids"].shape == (2, 2)


def test_a_batch_without_a_mask_is_not_trimmed() -> None:
    micro = right()
    del micro.batch["attention_mask"]
    assert micro.split(None)[1].batch["input_ids"].shape == (2, 6)


def test_source_and_target_are_trimmed_each_by_its_own() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "labels": torch.tensor([[1, 2, IGNORED], [3, IGNORED, IGNORED]]),
        "decoder_input_ids": torch.tensor([[0, 1, 2], [0, 3, 0]]),
    }
    micro = MicroBatch(np.array([0, 1]), np.array([[4, 2], [2, 1]]), batch)
    assert (micro.shape, micro.padded, micro.padded_tokens, micro.tokens) == ((4, 3), (4, 2), 14, 9)
    second = micro.split(None)[1]
    assert second.batch["input_ids"].tolist() == [[5, 6]]
    assert second.batch["labels"].tolist() == [[3]]
    assert second.batch["decoder_input_ids"].tolist() == [[0]]
    assert (second.shape, second.padded_tokens, second.tokens) == ((2, 1), 3, 3)
    assert micro.items("token") == 3


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@pytest.mark.parametrize("kind", [tuple, list, lambda parts: Pair(*parts)], ids=["tuple", "list", "named"])
def test_batches_that_are_no_mapping_are_split_by_rows(kind: Any) -> None:
    batch = kind([torch.arange(6).view(3, 2), torch.arange(3)])
    micro = MicroBatch(np.arange(3), np.array([2, 2, 2]), batch)
    first, second = micro.split(None)
    assert type(first.batch) is type(batch)
    assert [part.tolist() for part in first.batch] == [[[0, 1], [2, 3]], [0, 1]]
    assert [part.tolist() for part in second.batch] == [[[4, 5]], [2]]
    assert (micro.items("token"), micro.tokens) == (3, 6)


def test_mappings_inside_a_batch_are_split_too_and_a_plain_tensor_is_a_batch() -> None:
    nested = MicroBatch(np.arange(2), np.array([1, 1]), {"image": {"pixels": torch.zeros(2, 3, 4, 4)}, "scale": 2.0})
    assert nested.split(None)[1].batch["image"]["pixels"].shape == (1, 3, 4, 4)
    assert nested.split(None)[1].batch["scale"] == 2.0
    assert MicroBatch(np.arange(2), np.array([1, 1]), torch.arange(2)).split(None)[1].batch.tolist() == [1]


def test_a_batch_without_padding_is_collated_again_from_its_features() -> None:
    def flat(given: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids = [token for one in given for token in one["input_ids"]]
        # As some collators do: what it was given is taken apart.
        labels = [label for one in given for label in one.pop("labels")]
        return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}

    kept = features()
    micro = MicroBatch(np.arange(5), np.array(LENGTHS), flat([dict(one) for one in kept]), kept)
    assert not has_rows(micro.batch, 5)
    assert (micro.padded_tokens, micro.tokens) == (20, 17)  # rounded up to whole rows
    waiting, alone = [micro], []
    while waiting:
        one = waiting.pop(0)
        waiting[:0] = one.split(flat) if len(one) > 1 else []
        alone += [one] if len(one) == 1 else []
    assert [one.batch["input_ids"].tolist() for one in alone] == [[one["input_ids"]] for one in features()]
    assert [one.batch["labels"].tolist() for one in alone] == [[one["labels"]] for one in features()]


def test_rows_are_seen_only_where_every_tensor_has_them() -> None:
    assert has_rows({"input_ids": torch.zeros(3, 5), "weight": torch.zeros(3)}, 3)
    assert not has_rows({"input_ids": torch.zeros(3, 5), "scale": torch.tensor(2.0)}, 3)
    assert not has_rows({"input_ids": torch.zeros(1, 15)}, 3)
    assert has_rows({"text": ["a", "b", "c"], "weight": np.zeros(3)}, 3)
    assert not has_rows({"text": ["a", "b"], "weight": torch.zeros(3)}, 3)
    assert not has_rows({"weight": torch.zeros(3), "other": object()}, 3)


@pytest.mark.parametrize(("counting", "expected"), [("next-token", 3), ("token", 5), ("sequence", 2)])
def test_items_are_what_the_loss_counts(counting: Counting, expected: int) -> None:
    labels = torch.tensor([[1, 2, IGNORED, 4], [5, IGNORED, 6, IGNORED]])
    assert MicroBatch(np.arange(2), np.array([4, 4]), {"labels": labels}).items(counting) == expected


def test_labels_that_are_shifted_already_are_counted_as_they_are() -> None:
    batch = {"labels": torch.tensor([[1, 2]]), "shift_labels": torch.tensor([[2, IGNORED]])}
    assert MicroBatch(np.arange(1), np.array([2]), batch).items("next-token") == 1


@pytest.mark.parametrize(
    "labels", [None, torch.tensor([0.5, 2.0]), torch.zeros(2, 7), torch.tensor([0, 3])], ids=["none", "value", "values", "class"]
)
def test_one_answer_a_row_counts_rows(labels: torch.Tensor | None) -> None:
    micro = MicroBatch(np.arange(2), np.array([3, 3]), {"labels": labels})
    assert {micro.items(counting) for counting in ("next-token", "token", "sequence")} == {2}


def test_what_is_all_padding_is_left_alone() -> None:
    batch = {"input_ids": torch.zeros(2, 3), "attention_mask": torch.zeros(2, 3)}
    assert trimmed(batch, has_targets=False)["input_ids"].shape == (2, 3)


def test_a_target_that_begins_with_a_prompt_keeps_it_and_flat_labels_stay_possible() -> None:
    labels = torch.tensor([[-100, -100, 5, 6, 7], [-100, -100, 5, -100, -100]])
    batch = {
        "input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "labels": labels, "decoder_input_ids": torch.arange(10).view(2, 5),
    }  # fmt: skip
    micro = MicroBatch(np.array([0, 1]), np.array([[4, 5], [2, 3]]), batch)
    _first, second = micro.split(None)
    assert second.batch["labels"].tolist() == [[-100, -100, 5]]
    assert second.batch["decoder_input_ids"].tolist() == [[5, 6, 7]]
    assert second.batch["input_ids"].shape == (1, 2)
    assert all(value.is_contiguous() for value in second.batch.values())


def test_arrays_of_numpy_are_split_like_tensors() -> None:
    batch = {"input_ids": torch.ones(3, 2), "weight": np.arange(3.0), "names": ["a", "b", "c"]}
    first, second = MicroBatch(np.arange(3), np.array([2, 2, 2]), batch).split(None)
    assert first.batch["weight"].tolist() == [0, 1]
    assert second.batch["names"] == ["c"]
