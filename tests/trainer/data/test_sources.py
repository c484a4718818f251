"""Several files are one data set, columns may have names of one's own, and a column with classes is never passed over in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brim.errors import UsageError
from brim.planner.command import flags_of
from brim.trainer.data.check import check_file
from brim.trainer.data.prepare import prepare_data
from brim.workload.lengths import measure_lengths
from brim.workload.reading import Rows, sources_in, sources_of
from tests.trainer.data.test_prepare import jsonl, learnt, prepared, sequences
from tests.trainer.data.tokenizers_here import tokenizer

PAIR = {"prompt": "the river", "response": "a stone"}


def together(files: list[Path], **changes: Any) -> Any:
    asked: dict[str, Any] = {
        "task": "causal-lm",
        "max_length": 512,
        "cache": files[0].parent / "cache",
        "say": lambda _text: None,
    }
    return prepare_data(files, tokenizer=tokenizer(), tokenizer_name="words", **{**asked, **changes})


def test_several_files_of_several_kinds_are_one_data_set(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "a.jsonl", PAIR, PAIR)
    two = tmp_path / "b.csv"
    two.write_text("prompt,response\nthe lamp,a question\n")
    card = together([one, two])
    assert (card.sequences, card.source) == (3, f"{one}, {two}")
    assert [learnt(tokenizer(), row) for row in sequences(card)] == ["a stone</s>", "a stone</s>", "a question</s>"]
    counted = measure_lengths([one, two])
    assert (counted.n, sources_in(counted.source)) == (3, (str(one), str(two)))
    assert together([one, two]).fingerprint == card.fingerprint
    assert together([two, one]).fingerprint != card.fingerprint
    two.write_text("prompt,response\nthe lamp,an answer\n")
    assert together([one, two]).fingerprint != card.fingerprint


def test_a_bad_row_of_several_files_is_named_with_its_file(tmp_path: Path) -> None:
    one, two = jsonl(tmp_path / "a.jsonl", PAIR), jsonl(tmp_path / "b.jsonl", {"q": "x", "a": "y"})
    with pytest.raises(UsageError) as caught:
        check_file([one, two], task="causal-lm", columns=None, max_bad=0)
    assert f"{two}, line 1: the column prompt is missing; the row has q, a." in caught.value.message


@pytest.mark.parametrize(
    ("columns", "row", "answer"),
    [
        ({"prompt": "q", "response": "a"}, {"q": "the river", "a": "a stone", "prompt": "no"}, "a stone</s>"),
        ({"question": "q", "completion": "a"}, {"q": "the river", "a": "a stone"}, "a stone</s>"),
        ({"source": "q", "target": "a"}, {"q": "the river", "a": "a stone"}, "a stone</s>"),
        ({"instruction": "q", "input": "c", "output": "a"}, {"q": "the river", "c": None, "a": "a lamp"}, "a lamp</s>"),
        ({"instruction": "q", "output": "a"}, {"q": "the river", "a": "a lamp"}, "a lamp</s>"),
        ({"text": "t"}, {"t": "the lamp"}, "<s>the lamp</s>"),
        ({"messages": "m"}, {"m": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "b</s>"),
    ],
)
def test_columns_may_have_names_of_ones_own(tmp_path: Path, columns: dict[str, str], row: Any, answer: str) -> None:
    data = jsonl(tmp_path / "a.jsonl", row)
    (found,) = sequences(prepared(data, tokenizer(), columns=columns))
    assert learnt(tokenizer(), found) == answer
    tokenizer().save_pretrained(tmp_path / "words")
    counted = measure_lengths(data, tokenizer=str(tmp_path / "words"), columns=columns)
    assert counted.tokens.tolist() == [len(found["input_ids"])]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": "x", "response": "a"}, "line 1: no row has the column 'x'. There are the columns q, a, c."),
        ({"instruction": "q", "input": "x", "output": "a"}, "line 1: no row has the column 'x'. There are the columns q, a, c."),
        ({"q": "prompt", "a": "response"}, "A column cannot be named as 'q'."),
        ({"prompt": "q"}, "--columns prompt=q: the column that the model learns to write is missing"),
        ({"prompt": "q", "response": "q"}, "--columns names the column 'q' twice: as prompt, response."),
        ({"prompt": "q", "question": "c", "response": "a"}, "these meanings cannot be combined"),
    ],
)
def test_a_wrong_column_is_an_error_that_lists_those_that_there_are(tmp_path: Path, columns: dict[str, str], said: str) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"q": "the river", "a": "a stone", "c": "x"})
    for look in (
        lambda: check_file(data, task=None, columns=columns, max_bad=0),
        lambda: prepared(data, tokenizer(), columns=columns),
        lambda: measure_lengths(data, columns=columns),
    ):
        with pytest.raises(UsageError) as caught:
            look()
        assert said in caught.value.message
    if "q" in columns:
        assert caught.value.hint == "Write what it means first: prompt=q."


def test_texts_with_classes_train_no_language_model_unless_that_was_said(tmp_path: Path) -> None:
    rows = [{"text": "the river", "label": "water"}, {"text": "a stone", "label": "rock"}]
    data = jsonl(tmp_path / "a.jsonl", *rows)
    prepared(data, tokenizer())
    for look in (
        lambda: prepared(data, tokenizer(), task_is_given=False),
        lambda: measure_lengths(data, task_is_given=False),
    ):
        with pytest.raises(UsageError, match=r"a text and a class in each row \(columns text, label\)") as caught:
            look()
        assert "--task classification" in (caught.value.hint or "")
        assert "--task causal-lm" in (caught.value.hint or "")
    assert prepared(data, tokenizer(), columns={"text": "text"}, task_is_given=False).sequences == 2
    assert prepared(data, tokenizer(), task="classification", task_is_given=False).labels == ("rock", "water")
    assert prepared(jsonl(tmp_path / "b.jsonl", PAIR), tokenizer(), task_is_given=False).sequences == 1
    assert measure_lengths(data, columns={"text": "text"}, task_is_given=False).n == 2


def test_what_was_asked_is_typed_again_with_every_file_and_column() -> None:
    words = flags_of({"data": ("a.jsonl", "b,c.csv"), "columns": {"prompt": "q", "response": "a"}, "freeze": "x"})
    assert words == ["--data", "a.jsonl", "--data", "b,c.csv", "--columns", "prompt=q,response=a", "--freeze", "x"]
    assert flags_of({"data": "a.jsonl"}) == ["--data", "a.jsonl"]


def test_sources_are_one_or_several(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a, b.jsonl", PAIR)
    assert sources_of(file) == (str(file),)
    assert sources_in(str(file)) == (str(file),)
    assert len(Rows([file, jsonl(tmp_path / "c.jsonl", PAIR)]).files) == 2


def test_a_first_row_without_a_class_does_not_hide_those_of_the_others(tmp_path: Path) -> None:
    rows = {"text": "the river", "label": None}, {"text": "the stone", "label": "rock"}
    data = jsonl(tmp_path / "a.jsonl", *rows)
    with pytest.raises(UsageError, match="a text and a class in each row"):
        prepared(data, tokenizer(), task_is_given=False)
    assert any("The column label is not read" in note for note in prepared(data, tokenizer()).notes)
