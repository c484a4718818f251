"""A text file is a set of documents: by which rule is said, each is read in blocks, and every token is learnt once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from brim.records.runs import DataCard
from brim.trainer.data.tokens import IGNORED
from brim.trainer.loading import load_tokenizer
from brim.workload import plain_text, specials
from brim.workload.lengths import Lengths, measure_lengths
from brim.workload.reading import Rows
from tests.trainer.data.test_prepare import jsonl, prepared, sequences
from tests.trainer.data.tokenizers_here import tokenizer

RIVER = "the river finds the stone and the lamp, and question and answer. "


def documents_of(path: Path) -> list[str]:
    return [found.row["text"] for found in Rows(path) if found.row is not None]


@pytest.mark.parametrize(
    ("text", "documents", "kind"),
    [
        ("one\ntwo\nthree\n", ["one", "two", "three"], "text_lines"),
        ("\n\none\r\ntwo\n\n\n", ["one", "two"], "text_lines"),
        ("one\ntwo\n\nthree\n", ["one\ntwo", "three"], "text_paragraphs"),
        ("one\n \t\ntwo", ["one", "two"], "text_paragraphs"),
        ("one", ["one"], "text_lines"),
    ],
)
def test_documents_have_blank_lines_between_them_where_there_are_any_and_else_are_lines(
    tmp_path: Path, text: str, documents: list[str], kind: str
) -> None:
    (tmp_path / "a.txt").write_text(text, newline="")
    assert documents_of(tmp_path / "a.txt") == documents
    assert Rows(tmp_path / "a.txt").kinds == (kind,)


def learnt_in(card: DataCard) -> list[int]:
    """All tokens that are learnt, block after block, after the first token of all, which nothing stands before."""
    blocks = sequences(card)
    return list(itertools.chain.from_iterable(row["input_ids"][1:][row["labels"][1:] != IGNORED].tolist() for row in blocks))


@pytest.mark.parametrize("around", ["<s> $A </s>", "<s> $A", "$A </s>", "$A"])
@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("part_bytes", [1 << 20, 100])
@pytest.mark.parametrize("max_length", [7, 8, 64, 10_000])
def test_every_token_of_a_document_is_learnt_once_and_a_plan_counts_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: str, has_end: bool, part_bytes: int, max_length: int
) -> None:
    monkeypatch.setattr(plain_text, "_PART_BYTES", part_bytes)
    words = tokenizer(around)
    if not has_end:
        words.eos_token = None
    words.save_pretrained(tmp_path / "words")
    texts = ["\n".join([RIVER * count, "a stone " * count, "the lamp"]) for count in range(1, 9)]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    card = prepared(tmp_path / "a.txt", load_tokenizer(str(tmp_path / "words")), max_length=max_length)
    blocks = sequences(card)
    assert all(len(row["input_ids"]) <= max_length for row in blocks)
    leading = [2] if "<s>" in around else []
    expected = [[*leading, *words.encode(text, add_special_tokens=False), *([1] if has_end else [])] for text in texts]
    if part_bytes > 100:
        assert learnt_in(card) == [token for ids in expected for token in ids[1:]]
    text = "".join(words.decode(row["input_ids"][1:][row["labels"][1:] != IGNORED]) for row in blocks)
    if leading:
        assert text.replace("</s>", "") == "".join(texts)
    assert (card.cut, card.cut_tokens) == (0, 0)
    counted = measure_lengths(tmp_path / "a.txt", tokenizer=str(tmp_path / "words")).cut(max_length)
    assert counted.tokens.tolist() == [len(row["input_ids"]) for row in blocks]
    assert counted.histogram() == card.lengths


def test_four_hundred_lines_are_four_hundred_sequences_and_it_is_said_how(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("".join(f"{RIVER} {number}\n" for number in range(400)))
    said: list[str] = []
    card = prepared(tmp_path / "notes.txt", tokenizer(), say=said.append)
    assert card.sequences == 400
    assert any("notes.txt: each line is a document" in line for line in said)
    assert any("blocks of up to 512 tokens" in line for line in said)
    (tmp_path / "notes.txt").write_text("".join(f"{RIVER} {number}\n\n" for number in range(400)))
    again = prepared(tmp_path / "notes.txt", tokenizer(), say=said.append)
    assert again.fingerprint != card.fingerprint
    assert any("documents have blank lines between them" in line for line in said)


def test_a_folder_of_texts_has_a_document_for_each_file_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "_PART_BYTES", 50)
    (tmp_path / "texts").mkdir()
    text = "\n".join([RIVER] * 9) + "\n" * 120
    for name in ("a.txt", "b.md"):
        (tmp_path / "texts" / name).write_text(text)
    parts = [found.document for found in Rows(tmp_path / "texts")]
    assert parts.count("whole") == 2
    assert parts.count("part") >= 10
    card = prepared(tmp_path / "texts", tokenizer(), max_length=10_000)
    assert card.sequences == 2
    assert tokenizer().decode(sequences(card)[0]["input_ids"]) == f"<s>{text.rstrip(chr(10))}</s>"


@pytest.mark.parametrize("bad_line", [0, 5])
def test_a_document_that_breaks_off_is_not_joined_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_line: int
) -> None:
    monkeypatch.setattr(plain_text, "_PART_BYTES", 50)
    (tmp_path / "texts").mkdir()
    lines = [f"{RIVER}\n".encode()] * 8
    lines[bad_line] = b"\xff\n"
    (tmp_path / "texts" / "a.txt").write_bytes(b"".join(lines))
    (tmp_path / "texts" / "b.txt").write_text("the lamp")
    card = prepared(tmp_path / "texts", tokenizer(), max_length=10_000, max_bad=1)
    before = [f"<s>{(RIVER + chr(10)) * bad_line}".rstrip("\n") + "</s>"] if bad_line else []
    assert [tokenizer().decode(row["input_ids"]) for row in sequences(card)] == [*before, "<s>the lamp</s>"]


def test_a_text_that_is_longer_than_a_tokenizer_takes_is_cut_at_a_blank_and_counted_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specials, "LONGEST_TEXT", 50)
    for module in ("brim.workload.lengths", "brim.trainer.data.encoding"):
        monkeypatch.setattr(f"{module}.LONGEST_TEXT", 50)
    words = tokenizer("<s> $A </s>")
    words.save_pretrained(tmp_path / "words")
    data = jsonl(tmp_path / "a.jsonl", {"prompt": RIVER * 3, "response": RIVER * 2}, {"prompt": "x" * 120, "response": "a"})
    card = prepared(data, words)
    assert [words.decode(row["input_ids"]) for row in sequences(card)] == [
        f"<s>{RIVER * 3}\n{RIVER * 2}</s>",
        f"<s>{'x' * 120}\na</s>",
    ]
    counted = measure_lengths(data, tokenizer=str(tmp_path / "words"))
    assert counted.tokens.tolist() == [len(row["input_ids"]) for row in sequences(card)]
    classified = [{"text": RIVER * 3, "label": "a"}, {"text": "x", "label": "b"}]
    card = prepared(jsonl(tmp_path / "b.jsonl", *classified), words, task="classification")
    assert words.decode(sequences(card)[0]["input_ids"]) == f"<s>{RIVER * 3}</s>"
    counted = measure_lengths(tmp_path / "b.jsonl", tokenizer=str(tmp_path / "words"), task="classification")
    assert counted.tokens.tolist() == [len(row["input_ids"]) for row in sequences(card)]


def test_much_that_is_cut_is_a_warning_with_figures_and_little_is_none(tmp_path: Path) -> None:
    rows = [{"text": RIVER}] * 9
    card = prepared(jsonl(tmp_path / "a.jsonl", *rows, {"text": RIVER * 20}), tokenizer(), max_length=64)
    (warning,) = [note for note in card.notes if "are cut" in note]
    share = card.cut_tokens / (card.tokens + card.cut_tokens)
    assert (
        f"1 of 10 sequences are too long and are cut: {card.cut_tokens:,} of {card.tokens + card.cut_tokens:,} tokens" in warning
    )
    assert f"({share:.1%}) are not trained on" in warning
    assert f"has {card.longest_tokens:,} tokens, and --seq-len is 64." in warning
    quiet = prepared(
        jsonl(tmp_path / "b.jsonl", *rows * 30, {"text": RIVER * 3}), tokenizer(), max_length=card.longest_tokens // 8
    )
    assert 0 < quiet.cut_tokens <= 0.01 * quiet.tokens
    assert not [note for note in quiet.notes if "are cut" in note]


def test_lengths_by_a_guess_are_cut_into_blocks_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 4000 + "\n" + "y" * 40)
    guessed = measure_lengths(tmp_path / "a.txt")
    assert isinstance(guessed, Lengths)
    assert guessed.tokens.tolist() == [1000, 10]
    blocks = guessed.cut(101).tokens.tolist()
    assert blocks == [*[101] * 9, 100, 10]
    assert sum(blocks) - 9 == 1010


def test_rows_of_other_files_are_still_one_sequence_each(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": RIVER * 30}, {"text": RIVER}]
    assert prepared(jsonl(tmp_path / "a.jsonl", *rows), tokenizer(), max_length=32).sequences == 2
