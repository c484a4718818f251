"""What a stitched model is trained on: every row that cannot be is told by its number, before anything runs."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

from brim.errors import UsageError
from brim.stitching.angles import refuse_rows_beyond
from brim.stitching.rows import Pad, Rows, rows_of
from tests.stitching.small import CONFIGS, VOCABULARY, fresh_donor


class _Words:
    """A tokenizer for which every word is one and the same token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, text: str, **_keywords: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.token] * len(text.split())}


def read(data: Any, tokenizer: Any = None, vocabulary: int = VOCABULARY) -> Rows:
    return rows_of(data, tokenizer, positions=128, vocabulary=vocabulary, say=lambda _text: None)


def test_labels_are_the_tokens_unless_a_row_has_its_own() -> None:
    batch = Pad(0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [-100, 9, -100]]


def test_padding_that_a_row_brings_along_is_not_learned() -> None:
    row = {"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0]}
    assert Pad(0)([row, {**row, "labels": [3, 5, 6, 3]}])["labels"].tolist() == [[-100, 5, 6, -100], [3, 5, 6, 3]]
    found = read([row])
    assert (found.lengths.tolist(), found.real_lengths.tolist()) == ([4], [2])


GOOD = {"input_ids": [3, 4]}
BAD_DATA: list[tuple[str, Any, str]] = [
    ("empty", [], "The training data is empty."),
    ("a name", "data.jsonl", "The training data is str"),
    ("a stream", iter([]), "can only be iterated"),
    ("other columns", [{"prompt": "x", "answer": "y"}], "neither input_ids nor text; it has: prompt, answer"),
    ("numbers", [5], "neither input_ids nor text; it has: int"),
    ("text without tokenizer", ["word5"], "there is no tokenizer"),
    ("an empty row", [GOOD, {"input_ids": []}], "Row 1 of the training data has no tokens"),
    ("a long row", [{"input_ids": [3] * 129}], "1 rows are longer than the 128 positions of the model; the longest has 129"),
    ("packed rows", [{"input_ids": [3, 4], "position_ids": [0, 0]}], "several sequences each"),
    ("packed later", [GOOD, {"input_ids": [3, 4], "position_ids": [0, 0]}], "several sequences each"),
    ("text later", [GOOD, {"text": "x"}], "Row 1 of the training data has no input_ids"),
    ("a token too high", [GOOD, {"input_ids": [3, 97]}], "Row 1 of the training data has the number 97 in input_ids, .* 0 to 96"),
    ("a token below zero", [{"input_ids": [3, -1]}], "Row 0 of the training data has the number -1 in input_ids"),
    ("a label too high", [{**GOOD, "labels": [-100, 700]}], "Row 0 of the training data has the number 700 in labels"),
    ("a label below zero", [{**GOOD, "labels": [-1, 3]}], "Row 0 of the training data has the number -1 in labels"),
    ("fewer labels", [{**GOOD, "labels": [3]}], "Row 0 of the training data has 2 input_ids and 1 labels"),
    ("a longer mask", [{**GOOD, "attention_mask": [1] * 3}], "Row 0 of the training data has 2 input_ids and 3 attention_mask"),
    ("a batch of one", [{"input_ids": torch.ones(1, 4, dtype=torch.long)}], r"input_ids is no line of whole numbers \(its shape is \(1, 4\)"),
    ("fractions", [{"input_ids": [0.5, 1.0]}], "input_ids is no line of whole numbers"),
    ("ragged", [{"input_ids": [[3], [3, 4]]}], "input_ids is no line of whole numbers"),
    ("words", [{"input_ids": "three"}], "input_ids is no line of whole numbers"),
    ("a table", datasets.Dataset.from_list([GOOD, {"input_ids": [3, 4, 500]}]), "Row 1 of the training data has the number 500"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "says"), [row[1:] for row in BAD_DATA], ids=[row[0] for row in BAD_DATA])
def test_data_that_cannot_be_trained_on_is_told(data: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(data)


def test_a_table_with_gaps_is_read_as_a_list_is() -> None:
    listed = [{"input_ids": [3] * length, "labels": None if length % 2 else [-100] * length} for length in range(1, 6)]
    assert read(datasets.Dataset.from_list(listed)).lengths.tolist() == read(listed).lengths.tolist() == [1, 2, 3, 4, 5]


def test_a_tokenizer_of_another_model_is_told() -> None:
    with pytest.raises(UsageError, match="gives the token 96, and the model has 50 tokens"):
        read(["word"], _Words(96), vocabulary=50)


def test_rows_that_would_turn_each_other_by_other_angles_are_refused() -> None:
    config = CONFIGS["phi3"]()
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    nested = CONFIGS["gemma3_text"]()
    nested.rope_parameters = {"full_attention": config.rope_parameters, "sliding_attention": {"rope_type": "default"}}
    for one in (config, nested):
        with pytest.raises(UsageError, match="1 of 3 rows are longer than 16 tokens") as refused:
            refuse_rows_beyond(np.array([5, 16, 17]), [CONFIGS["llama"](), one])
        assert "Cut all rows to 16 tokens" in str(refused.value.hint)
        refuse_rows_beyond(np.array([5, 16]), [one])
        refuse_rows_beyond(np.array([17, 90]), [one])  # all of them have the same angles
    dynamic = fresh_donor("llama").config
    dynamic.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(UsageError, match="2 of 2 rows are longer than 128 tokens"):
        refuse_rows_beyond(np.array([129, 140]), [dynamic])
    refuse_rows_beyond(np.array([5, 128]), [dynamic])
