"""Rows with their places: documents of any size value by value, text by paragraph or by file, and bad rows between good ones."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import UsageError
from brim.workload import documents
from brim.workload.documents import Document, DocumentError
from brim.workload.reading import Rows, read_rows

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    values=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 2]), ascii_only=st.booleans(), at_once=st.integers(1, 40)
)
def test_a_list_read_in_parts_is_the_list_and_every_value_knows_its_line(
    values: list[Any], indent: int | None, ascii_only: bool, at_once: int
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BYTES_AT_ONCE", at_once)
        document = Document(io.BytesIO(text.encode("utf-8", "surrogatepass")))
        found = list(document.elements())
        document.end()
    assert [value.value for value in found] == values
    if indent is None:
        assert {value.line for value in found} <= {1}
    else:
        lines = text.split("\n")
        before = [len(json.dumps(value, indent=2, ensure_ascii=ascii_only).split("\n")) for value in values]
        assert [value.line for value in found] == [2 + sum(before[:place]) for place in range(len(values))]
        assert len(lines) == (2 + sum(before) if values else 1)


@settings(deadline=None)
@given(values=st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), min_size=1, max_size=5), data=st.data())
def test_a_document_that_breaks_off_is_an_error_wherever_it_breaks(values: list[Any], data: st.DataObject) -> None:
    text = json.dumps(values, indent=1).encode()
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BYTES_AT_ONCE", 7)
        document = Document(io.BytesIO(cut))
        with pytest.raises(DocumentError) as caught:
            list(document.elements())
    assert 1 <= caught.value.line <= cut.count(b"\n") + 1


def test_an_error_in_a_large_document_is_found_without_reading_the_rest() -> None:
    stream = io.BytesIO(b'[{"a": 1},\n{"a": oops},\n' + b'{"a": 2},\n' * 300_000 + b"{}]")
    with pytest.raises(DocumentError, match="Expecting value") as caught:
        list(Document(stream).elements())
    assert caught.value.line == 2
    assert stream.tell() < 1_000_000


def test_bad_rows_are_told_with_their_place_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"a"\n[1]\n"\xff"\n{"a": 2}\n')
    rows = Rows(tmp_path / "a.jsonl")
    found = list(rows)
    assert [each.row for each in found] == [{"a": 1}, None, None, None, {"a": 2}]
    assert [rows.place_of(each) for each in found] == [f"a.jsonl, line {number}" for number in (1, 3, 4, 5, 6)]
    assert [each.fault.partition(":")[0].partition(" (")[0] for each in found[1:4]] == [
        "this is not JSON",
        "a row must be an object with named columns, and this is [1]",
        "this is not UTF-8 text",
    ]


def test_a_csv_row_that_ends_early_is_bad_and_a_row_of_several_lines_is_told_by_its_first(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,b\n"one\ntwo",2\n1\n"x\ny",2,3\n3,4\n')
    found = list(Rows(tmp_path / "a.csv"))
    assert [(each.number, bool(each.fault)) for each in found] == [(2, False), (4, True), (5, True), (7, False)]
    assert found[1].row == {"a": "1", "b": None}
    (tmp_path / "b.csv").write_text("a,b\n1\n")
    assert list(read_rows(tmp_path / "b.csv")) == [{"a": "1", "b": None}]


def test_a_text_file_has_a_row_for_each_paragraph(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone\ntwo\n\n \n\nthree\r\n\r\nfour", encoding="utf-8", newline="")
    found = list(Rows(tmp_path / "a.txt"))
    assert [(each.number, each.row) for each in found] == [
        (1, {"text": "one\ntwo"}),
        (6, {"text": "three"}),
        (8, {"text": "four"}),
    ]


def test_a_folder_of_texts_has_a_row_for_each_file_and_none_for_its_readme(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, text in (("b.md", "# b\n\nmore\n"), ("deep/a.txt", "a"), ("README.md", "about"), (".x.txt", "hidden")):
        (tmp_path / name).write_text(text)
    rows = Rows(tmp_path)
    assert [(rows.place_of(each), each.row) for each in rows] == [
        ("b.md", {"text": "# b\n\nmore"}),
        ("deep/a.txt", {"text": "a"}),
    ]
    (tmp_path / "rows.jsonl").write_text('{"text": "c"}\n')
    assert list(read_rows(tmp_path)) == [{"text": "c"}]


def test_a_list_in_an_object_is_found_behind_large_members_and_before_others(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"about": {"x": [1]}, "rows": [{"a": 1}, {"a": 2}], "end": "x"}, indent=1))
    assert list(read_rows(tmp_path / "a.json")) == [{"a": 1}, {"a": 2}]


def test_a_file_that_is_no_more_is_told_when_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    rows = Rows(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UsageError, match="Cannot read"):
        list(rows)
