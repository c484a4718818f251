"""Rows become exactly the tokens that the model is to see, and only the answer is learnt; all of it once, and found again."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from brim.errors import UsageError
from brim.records.runs import DataCard
from brim.trainer.data.classes import labels_of
from brim.trainer.data.prepare import prepare_data
from brim.trainer.data.tokens import IGNORED, TokenData
from tests.trainer.data.tokenizers_here import CHATML, tokenizer

SFT = Path(__file__).parents[3] / "../shared/data/sft"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "hm! A stone."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "hm! A river."},
]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1, max_size=30).filter(
    lambda text: bool(text.strip()) and "<" not in text
)


@pytest.fixture(scope="module")
def words() -> Any:
    return tokenizer()


@pytest.fixture(scope="module")
def t5_words() -> Any:
    return tokenizer("$A </s>")


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def prepared(path: Path, words: Any, **changes: Any) -> DataCard:
    asked: dict[str, Any] = {"task": "causal-lm", "max_length": 512, "cache": path.parent / "cache", "say": lambda _text: None}
    return prepare_data(path, tokenizer=words, tokenizer_name="words", **{**asked, **changes})


def sequences(card: DataCard) -> list[dict[str, Any]]:
    data = TokenData.open(card)
    return [data[place] for place in range(len(data))]


def learnt(words: Any, row: dict[str, Any]) -> str:
    return str(words.decode(row["labels"][row["labels"] != IGNORED]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8))
def test_tokens_decode_to_the_rows_and_what_is_learnt_to_the_answers(
    tmp_path: Path, words: Any, pairs: list[tuple[str, str]]
) -> None:
    card = prepared(jsonl(tmp_path / "a.jsonl", *({"prompt": one, "response": two} for one, two in pairs)), words)
    rows = sequences(card)
    assert [words.decode(row["input_ids"]) for row in rows] == [f"<s>{one}\n{two}</s>" for one, two in pairs]
    assert [learnt(words, row) for row in rows] == [f"{two}</s>" for _one, two in pairs]
    assert card.tokens == sum(len(row["input_ids"]) for row in rows)
    assert card.supervised_tokens == sum(int((row["labels"][1:] != IGNORED).sum()) for row in rows)
    assert sum(bar.sequences * bar.tokens for bar in card.lengths) == card.tokens


def test_a_text_is_learnt_whole_and_so_is_everything_where_that_is_asked_for(tmp_path: Path, words: Any) -> None:
    (row,) = sequences(prepared(jsonl(tmp_path / "a.jsonl", {"text": "the river"}), words))
    assert row["labels"].tolist() == row["input_ids"].tolist() == [2, *words.encode("the river", add_special_tokens=False), 1]
    data = jsonl(tmp_path / "b.jsonl", {"instruction": "the river", "input": "", "output": "a stone"})
    card = prepared(data, words, loss_on="all")
    (row,) = sequences(card)
    assert learnt(words, row) == "<s>the river\na stone</s>"
    assert card.supervised_tokens == card.tokens - 1
    assert card.columns == "instruction/[input]/output"


def test_an_end_that_is_there_is_not_put_there_twice_and_a_tokenizer_may_have_none(tmp_path: Path) -> None:
    for around in ("<s> $A </s>", "$A", "$A </s>"):
        words = tokenizer(around)
        data = jsonl(
            tmp_path / "a.jsonl", {"prompt": "the river", "response": "a stone</s>"}, {"prompt": "", "response": "a lamp"}
        )
        first, second = sequences(prepared(data, words))
        start = "<s>" if "<s>" in around else ""
        assert words.decode(first["input_ids"]) == f"{start}the river\na stone</s>"
        assert words.decode(second["input_ids"]) == f"{start}a lamp</s>"
    words.eos_token = None
    card = prepared(data, words)
    assert words.decode(sequences(card)[1]["input_ids"]) == "a lamp"
    assert any("no end token" in note for note in card.notes)


@pytest.mark.parametrize(
    ("row", "columns", "name"),
    [
        ({"text": "the river", "label": 1}, None, "label"),
        ({"sentence": "the river", "category": "water"}, None, "category"),
        ({"text": "the river", "label": 1}, {"text": "text"}, None),
        ({"text": "the river", "prompt": "a", "response": "b", "label": 1}, None, None),
        ({"text": "the river", "number": 1}, None, None),
        ({"text": "the river", "label": None}, None, None),
    ],
)
def test_a_class_beside_a_text_is_not_passed_over_in_silence(
    tmp_path: Path, words: Any, row: Any, columns: Any, name: str | None
) -> None:
    data = jsonl(tmp_path / "a.jsonl", row)
    for _time in range(2):  # the second finds it in the cache
        notes = prepared(data, words, columns=columns).notes
        assert any(f"The column {name} is not read" in note for note in notes) == (name is not None)


def test_what_is_too_long_is_cut_at_the_right_without_an_end_and_counted(tmp_path: Path, words: Any) -> None:
    rows = [{"prompt": "the", "response": "river " * 50}, {"prompt": "the", "response": "lamp"}]
    said: list[str] = []
    card = prepared(jsonl(tmp_path / "a.jsonl", *rows), words, max_length=20, say=said.append)
    first, second = sequences(card)
    whole = [2, *words.encode("the\n", add_special_tokens=False), *words.encode("river " * 50, add_special_tokens=False), 1]
    assert first["input_ids"].tolist() == whole[:20]
    assert second["input_ids"][-1] == 1
    assert (card.cut, card.cut_tokens, card.longest_tokens) == (1, len(whole) - 20, len(whole))
    assert not any("were cut" in line for line in said), "the banner says it, once"


def test_without_a_template_messages_stand_on_lines_and_the_last_answer_is_learnt(tmp_path: Path, words: Any) -> None:
    (row,) = sequences(prepared(jsonl(tmp_path / "a.jsonl", {"messages": [*CHAT, CHAT[1]]}), words))
    assert words.decode(row["input_ids"]) == "<s>" + "\n".join(message["content"] for message in CHAT) + "</s>"
    assert learnt(words, row) == "hm! A river.</s>"


def test_a_target_gets_the_end_that_the_tokenizer_does_not_put_there(tmp_path: Path) -> None:
    words = tokenizer("$A")
    rows = [{"source": "the river", "target": "a stone"}, {"source": "the river " * 9, "target": "a stone " * 9}]
    first, second = sequences(prepared(jsonl(tmp_path / "a.jsonl", *rows), words, task="seq2seq", max_length=12, target_length=8))
    assert (words.decode(first["input_ids"]), words.decode(first["labels"])) == ("the river</s>", "a stone</s>")
    assert (len(second["input_ids"]), second["input_ids"][-1]) == (12, 1)
    assert (len(second["labels"]), second["labels"][-1] == 1) == (8, False)
    words.eos_token = None
    assert any("no end token" in note for note in prepared(tmp_path / "a.jsonl", words, task="seq2seq").notes)


def test_a_seq2seq_model_gets_source_and_target_apart_each_with_its_end(tmp_path: Path, t5_words: Any) -> None:
    rows = [{"source": "the river", "target": "a stone"}, {"source": "the river " * 9, "target": "a stone " * 9}]
    card = prepared(jsonl(tmp_path / "a.jsonl", *rows), t5_words, task="seq2seq", max_length=12, target_length=8)
    first, second = sequences(card)
    assert (t5_words.decode(first["input_ids"]), t5_words.decode(first["labels"])) == ("the river</s>", "a stone</s>")
    assert (len(second["input_ids"]), second["input_ids"][-1]) == (12, 1)
    assert (len(second["labels"]), second["labels"][-1] == 1) == (8, False)
    lengths = TokenData.open(card).lengths
    assert lengths.tolist() == [[len(row["input_ids"]), len(row["labels"])] for row in (first, second)]
    assert (card.tokens, card.cut, card.target_length) == (int(lengths.sum()), 1, 8)
    assert card.supervised_tokens == lengths[:, 1].sum()
    assert {bar.target_tokens for bar in card.lengths} == {len(first["labels"]), 8}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "the river", "response": "a stone"},
        {"instruction": "the river", "output": "a stone"},
        {"messages": [{"role": "user", "content": "the river"}, {"role": "assistant", "content": "a stone"}]},
    ],
    ids=["prompt and response", "instruction and output", "messages"],
)
def test_all_rows_with_an_answer_are_sources_and_targets(tmp_path: Path, t5_words: Any, row: dict[str, Any]) -> None:
    (found,) = sequences(prepared(jsonl(tmp_path / "a.jsonl", row), t5_words, task="seq2seq"))
    assert (t5_words.decode(found["input_ids"]), t5_words.decode(found["labels"])) == ("the river</s>", "a stone</s>")


@pytest.mark.parametrize(
    ("given_labels", "names", "numbers"),
    [
        (["b", "a", "b"], ("a", "b"), [1, 0, 1]),
        ([2, 0, 1], ("0", "1", "2"), [2, 0, 1]),
        (["10", "9", "9"], ("9", "10"), [1, 0, 0]),
        ([True, False, True], ("false", "true"), [1, 0, 1]),
        ([1.0, -1.0, 1.0], ("-1", "1"), [1, 0, 1]),
        (["好", "坏", "好"], ("坏", "好"), [1, 0, 1]),
        (["2.0", "1.0", "1"], ("1", "2"), [1, 0, 0]),
        (["True", "false", "TRUE"], ("false", "true"), [1, 0, 1]),
        (["9" * 5000, "10", "-2.0"], ("-2", "10", "9" * 5000), [2, 1, 0]),
    ],
    ids=[
        "words",
        "numbers from 0",
        "numbers as words",
        "truths",
        "numbers with a point",
        "Chinese",
        "words with a point",
        "truths as words",
        "very long numbers",
    ],
)
def test_classes_are_sorted_and_numbers_stay_what_they_are(
    tmp_path: Path, words: Any, given_labels: list[Any], names: tuple[str, ...], numbers: list[int]
) -> None:
    data = jsonl(tmp_path / "a.jsonl", *({"text": f"the river {label}", "category": label} for label in given_labels))
    card = prepared(data, words, task="classification")
    assert card.labels == names
    assert [card.labels[row["labels"]] for row in sequences(card)] == [names[number] for number in numbers]
    assert card.supervised_tokens == card.sequences == 3
    is_renumbered = names[0].lstrip("-").isdecimal() and names != ("0", "1", "2")
    assert bool(card.notes) == is_renumbered


def test_an_evaluation_has_the_classes_of_the_training_and_no_others(tmp_path: Path, words: Any) -> None:
    rows = [{"sentence": "a lamp", "label": "b"}, {"sentence": "a stone", "label": "new"}]
    card = prepared(jsonl(tmp_path / "a.jsonl", rows[0]), words, task="classification", labels=("c", "b", "a"))
    assert (card.labels, sequences(card)[0]["labels"]) == (("c", "b", "a"), 1)
    with pytest.raises(UsageError, match=r"line 2: the class new is none of the training data's: c, b, a"):
        prepared(jsonl(tmp_path / "b.jsonl", *rows), words, task="classification", labels=("c", "b", "a"))


def test_classes_that_the_model_has_keep_the_numbers_that_they_have_there(tmp_path: Path, words: Any) -> None:
    data = jsonl(tmp_path / "a.jsonl", *({"text": f"the river {label}", "label": label} for label in ("True", "False", "True")))
    for own, names, numbers in (
        (("True", "False"), ("True", "False"), [0, 1, 0]),
        (("yes", "no"), ("false", "true"), [1, 0, 1]),
        (("True", "False", "?"), ("false", "true"), [1, 0, 1]),
    ):
        card = prepared(data, words, task="classification", model_labels=own)
        assert (card.labels, [row["labels"] for row in sequences(card)]) == (names, numbers)
        again = prepared(data, words, task="classification", labels=card.labels)
        assert [row["labels"] for row in sequences(again)] == numbers
    assert labels_of({"1": "no", "0": "yes", "10": "?"}) == ("yes", "no", "?")
    for nameless in (None, {}, {"0": "LABEL_0", "1": "LABEL_1"}, {0: "a", 1: "a"}, {"x": "a"}):
        assert labels_of(nameless) == ()


def test_a_classified_text_that_is_cut_keeps_what_stands_behind_it(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"text": "the river " * 20, "label": 1}, {"text": "a", "label": 0})
    card = prepared(data, tokenizer("<s> $A </s>"), task="classification", max_length=8)
    ids = sequences(card)[0]["input_ids"]
    assert (len(ids), ids[0], ids[-1]) == (8, 2, 1)


def test_a_slow_tokenizer_does_the_same_one_by_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    slow = transformers.ByT5Tokenizer()
    assert not slow.is_fast
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "héllo", "response": "你好"})
    (row,) = sequences(prepared(data, slow))
    assert learnt(slow, row) == "你好</s>"
    (row,) = sequences(prepared(data, slow, task="seq2seq"))
    assert (slow.decode(row["input_ids"]), slow.decode(row["labels"])) == ("héllo</s>", "你好</s>")
    slow.chat_template = CHATML
    (row,) = sequences(prepared(jsonl(tmp_path / "b.jsonl", {"messages": CHAT}), slow))
    assert learnt(slow, row) == "hm! A stone.</s>hm! A river.</s>"


def test_columns_of_any_name_can_be_named(tmp_path: Path, words: Any) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"问": "the river", "答": "a stone", "text": "other"})
    card = prepared(data, words, columns={"source": "问", "target": "答"})
    assert card.columns == "问/答"
    assert learnt(words, sequences(card)[0]) == "a stone</s>"
    with pytest.raises(UsageError, match="no row has the column 'x'. There are the columns 问, 答, text"):
        prepared(data, words, columns={"source": "x", "target": "答"})
    for wrong, said in (
        (
            {"sauce": "问"},
            "cannot be named as 'sauce'. brim knows messages, conversations, .*, source, target, text, sentence, label",
        ),
        ({"target": "答"}, "the column with the input of the model is missing"),
        ({"text": "问", "label": "答"}, "is for classifiers"),
    ):
        with pytest.raises(UsageError, match=said):
            prepared(data, words, columns=wrong)


def test_bad_rows_that_are_allowed_are_left_out_listed_and_said(tmp_path: Path, words: Any) -> None:
    good = {"prompt": "the river", "response": "a stone"}
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, good, {"prompt": "the lamp " * 300, "response": "y"}, good, 7)
    said: list[str] = []
    card = prepared(data, words, max_bad=3, say=said.append)
    assert (card.sequences, card.skipped) == (2, 3)
    assert [row.place for row in card.bad_rows] == ["a.jsonl, line 1", "a.jsonl, line 3", "a.jsonl, line 5"]
    assert any("left out: 3." in line and "a.jsonl, line 3: too long" in line for line in said)
    # Found in the cache, and still too many for who allows fewer.
    with pytest.raises(UsageError, match="3, and 2 are allowed") as caught:
        prepared(data, words, max_bad=2)
    assert "a.jsonl, line 5" in caught.value.message
    # The same bytes under another name: the places are told by that name.
    other = jsonl(tmp_path / "b.jsonl")
    other.write_bytes(data.read_bytes())
    assert prepared(other, words, max_bad=3).bad_rows[0].place == "b.jsonl, line 1"


def test_the_tokenizer_of_another_model_is_found_out(tmp_path: Path, words: Any) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"text": "the river"})
    prepared(data, words, vocabulary=len(words))
    with pytest.raises(UsageError, match="the model knows 50: it is another model's tokenizer"):
        prepared(data, words, vocabulary=50)


def test_an_end_token_that_the_model_does_not_know_is_told_before_any_row(tmp_path: Path) -> None:
    words = tokenizer()
    words.add_special_tokens({"eos_token": "<|end|>"})
    data = jsonl(tmp_path / "a.jsonl", {"text": "the river", "label": 0}, {"text": "the stone", "label": 1})
    with pytest.raises(UsageError, match=r"end token '<\|end\|>' of the tokenizer words has the number"):
        prepared(data, words, vocabulary=words.eos_token_id)
    prepared(data, words, vocabulary=words.eos_token_id, task="classification")


def test_what_is_no_number_is_no_text(tmp_path: Path, words: Any) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"instruction": "the", "input": NaN, "output": "stone"}\n{"instruction": "the", "output": -Infinity}\n')
    card = prepared(data, words, max_bad=1)
    assert words.decode(sequences(card)[0]["input_ids"]) == "<s>the\nstone</s>"
    assert card.bad_rows[0].reason == "the column output holds no text: -Infinity"


def test_of_a_folder_it_is_said_what_was_read_and_what_was_not(tmp_path: Path, words: Any) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl"):
        jsonl(folder / name, {"text": "the river"})
    (folder / "more.tsv").write_text("x")
    said: list[str] = []
    prepared(folder, words, say=said.append)
    assert said[0].endswith("tokens in total (columns: text). Files that were read: 2. Passed over in the folder: .tsv, test.")


def test_the_tokenizer_and_the_environment_are_given_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizer()
    words.backend_tokenizer.enable_truncation(3)
    words.backend_tokenizer.enable_padding(length=64)
    before = words.backend_tokenizer.to_str()
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    card = prepared(jsonl(tmp_path / "a.jsonl", {"text": "the river finds the stone"}), words)
    assert words.decode(sequences(card)[0]["input_ids"]) == "<s>the river finds the stone</s>"
    assert words.backend_tokenizer.to_str() == before
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_progress_is_told_in_bytes_and_ends_at_the_end(tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.trainer.data.build._PROGRESS_SECONDS", 0)
    monkeypatch.setattr("brim.trainer.data.build._ROWS_AT_ONCE", 100)
    rows = ({"text": hashlib.sha256(bytes([number % 256, number // 256])).hexdigest()} for number in range(1500))
    plain = jsonl(tmp_path / "a.jsonl", *rows)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        told: list[tuple[int, int]] = []
        prepared(path, words, progress=lambda *numbers, told=told: told.append(numbers))
        total = path.stat().st_size
        assert told[-1] == (total, total)
        assert {each[1] for each in told} == {total}
        assert [each[0] for each in told] == sorted(each[0] for each in told)
        assert len({each[0] for each in told}) > 3


@pytest.mark.parametrize(
    "name",
    [
        "chatlm_zh_valid_1k.parquet",
        pytest.param("alpaca_en_1k.json", marks=pytest.mark.slow),
        pytest.param("alpaca_zh_1k.json", marks=pytest.mark.slow),
    ],
)
def test_real_data_are_read_without_one_bad_row_unless_an_answer_is_empty(tmp_path: Path, words: Any, name: str) -> None:
    if not SFT.is_dir():
        pytest.skip("the instruction data of ../shared/data/sft are not here")
    card = prepared(SFT / name, words, cache=tmp_path, max_bad=20, max_length=4096)
    assert all(row.reason == "the answer is empty" for row in card.bad_rows)
    assert 990 <= card.sequences <= 1000
    for row in sequences(card)[::97]:
        assert np.count_nonzero(row["labels"] != IGNORED) > 1
