"""A hundred data files with one fault each: every format, every kind of fault, where it is told and a word of how."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.workload.words import Task

GOOD = {"prompt": "What is the river?", "response": "Water that finds the sea."}
CHAT = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A stone."}]


@dataclass(frozen=True)
class Malformed:
    """One file, or a folder."""

    name: str
    """Says what is wrong, for a person and for pytest."""
    file: str
    content: bytes | Callable[[Path], None]
    place: str
    """Of the bad row: `line 2`, `row 2`; only the file's name, where the whole file is wrong."""
    said: str
    task: Task = "causal-lm"
    columns: dict[str, str] | None = None
    needs_tokens: bool = False
    """Only a tokenizer finds it out."""

    def write(self, folder: Path) -> Path:
        """The path to give to `--data`."""
        path = folder / self.file
        if callable(self.content):
            self.content(path)
        else:
            path.write_bytes(self.content)
        return path

    @property
    def words(self) -> list[str]:
        """What the message must hold."""
        return [self.file, self.place, self.said]


def _lines(*rows: Any) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _document(*rows: Any) -> bytes:
    return b"[\n" + b",\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n]\n"


def _table(*rows: dict[str, Any], kind: str = "parquet") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet

        table = pa.Table.from_pylist(list(rows))
        if kind == "parquet":
            parquet.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)

    return write


def _bytes_as_text(kind: str) -> Callable[[Path], None]:
    """Other programs write what they have, and call it text."""

    def write(path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        texts = pa.array([b"good", b"caf\xe9"], pa.binary()).view(pa.string())
        table = pa.table({"prompt": texts, "response": ["a", "b"]})
        if kind == "parquet":
            parquet.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)

    return write


def _twice(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=[name, name]), path)

    return write


def _cut(make: Callable[[Path], None], keep: float) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        make(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * keep)])

    return write


def _folder(**files: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            (path / name.replace("__", ".")).write_bytes(content)

    return write


def _changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def _messages(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


_GOOD = _lines(GOOD)
_SEQ: dict[str, Any] = {"task": "seq2seq"}
_CLASS: dict[str, Any] = {"task": "classification"}
_TOKENS: dict[str, Any] = {"needs_tokens": True}
_LABELLED = b"text,label\ngood river,yes\n"
_LONG = "the river finds the stone " * 200

_JSONL = [
    Malformed("json broken off", "a.jsonl", _GOOD + b'{"prompt": "a", "resp\n', "line 2", "not JSON"),
    Malformed("single quotes", "a.jsonl", _lines(GOOD, b"{'prompt': 'a'}\n", GOOD), "line 2", "not JSON"),
    Malformed("trailing comma", "a.jsonl", _lines(b'{"prompt": "a", "response": "b",}\n', GOOD), "line 1", "not JSON"),
    Malformed("two objects on a line", "a.jsonl", _lines(GOOD, b'{"a": 1} {"b": 2}\n'), "line 2", "Extra data"),
    Malformed("line break in a string", "a.jsonl", _lines(GOOD, b'{"prompt": "a\nb"}\n'), "line 2", "not JSON"),
    Malformed("plain words", "a.jsonl", _lines(GOOD, GOOD, b"hello there\n"), "line 3", "not JSON"),
    Malformed("a list for a row", "a.jsonl", _lines(GOOD, ["a", "b"]), "line 2", "must be an object"),
    Malformed("a number for a row", "a.jsonl", _lines(GOOD, 7), "line 2", "must be an object"),
    Malformed("null for a row", "a.jsonl", _lines(GOOD, b"null\n"), "line 2", "must be an object"),
    Malformed("latin 1", "a.jsonl", _lines(GOOD, b'{"prompt": "caf\xe9", "response": "b"}\n'), "line 2", "not UTF-8"),
    Malformed("gb 18030", "a.jsonl", _GOOD + '{"prompt": "你好"}\n'.encode("gb18030"), "line 2", "not UTF-8"),
    Malformed("utf 16", "a.jsonl", "\ufeff{}".encode("utf-16-le"), "line 1", "not UTF-8"),
    Malformed("binary", "a.jsonl", b"\x80\x04\x95\xff\xfe", "line 1", "not UTF-8"),
    Malformed("nested too deep", "a.jsonl", _GOOD + b"[" * 100_000, "line 2", "not JSON"),
    Malformed("missing answer", "a.jsonl", _lines(GOOD, {"prompt": "a"}), "line 2", "response is missing"),
    Malformed("null answer", "a.jsonl", _lines(GOOD, _changed(response=None)), "line 2", "response is null"),
    Malformed("null prompt", "a.jsonl", _lines(GOOD, b"\n", _changed(prompt=None)), "line 3", "prompt is null"),
    Malformed("an object for a text", "a.jsonl", _lines(GOOD, _changed(prompt={"a": 1})), "line 2", "holds no text"),
    Malformed("numbers for a text", "a.jsonl", _lines(GOOD, _changed(response=[1, 2])), "line 2", "holds no text"),
    Malformed("all empty", "a.jsonl", _lines(GOOD, _changed(prompt="", response="")), "line 2", "source and target are empty"),
    Malformed("empty answer", "a.jsonl", _lines(GOOD, _changed(response=" \n")), "line 2", "answer is empty"),
    Malformed("bad first row", "a.jsonl", _lines({"colour": "red"}, GOOD), "line 1", "prompt is missing"),
    Malformed("unknown columns", "a.jsonl", _lines({"colour": "red"}), "line 1", "none that brim understands"),
    Malformed("no column of that name", "a.jsonl", _GOOD, "line 1", "no row has the column 'question'",
              columns={"source": "question", "target": "response"}),
    Malformed("no rows", "a.jsonl", b"\n \n", "", "holds no rows"),
    Malformed("empty text", "a.jsonl", _lines({"text": "a stone"}, {"text": "  "}), "line 2", "text is empty"),
    Malformed("text for seq2seq", "a.jsonl", _lines({"text": "a stone"}), "line 1", "needs a source and a target", **_SEQ),
    Malformed("half a gzip file", "a.jsonl.gz", gzip.compress(_GOOD * 500, mtime=0)[:-9], "line ", "not a complete gzip"),
    Malformed("no gzip file", "a.jsonl.gz", _GOOD, "line 1", "not a complete gzip"),
    Malformed("a control sign in a string", "a.jsonl", _lines(GOOD, b'{"prompt": "a\x01b", "response": "c"}\n'), "line 2", "not JSON"),
    Malformed("a zero byte", "a.jsonl", _lines(GOOD, b'\x00\n', GOOD), "line 2", "not JSON"),
    Malformed("Python's words", "a.jsonl", _lines(GOOD, b'{"prompt": None, "response": "b"}\n'), "line 2", "not JSON"),
    Malformed("a comment", "a.jsonl", _lines(b"# prompts and answers\n", GOOD), "line 1", "not JSON"),
    Malformed("a wrong escape", "a.jsonl", _lines(GOOD, b'{"prompt": "C:\\data", "response": "b"}\n'), "line 2", "not JSON"),
    Malformed("a number too long", "a.jsonl", _lines(GOOD, b'{"prompt": ' + b"9" * 5000 + b', "response": "b"}\n'), "line 2", "not JSON"),
    Malformed("a conflict of git", "a.jsonl", _lines(GOOD, b"<<<<<<< HEAD\n", GOOD), "line 2", "not JSON"),
    Malformed("a row over two lines", "a.jsonl", _lines(GOOD, b'{"prompt": "a",\n "response": "b"}\n'), "line 2", "not JSON"),
    Malformed("empty target", "a.jsonl", _lines({"source": "a", "target": "b"}, {"source": "a", "target": ""}), "line 2",
              "answer is empty", **_SEQ),
    Malformed("a list for a class", "a.jsonl", _lines({"text": "a", "label": "b"}, {"text": "a", "label": ["b"]}), "line 2",
              "a word or a whole number", **_CLASS),
    Malformed("a class is null", "a.jsonl", _lines({"text": "a", "label": "b"}, {"text": "a", "label": None}), "line 2",
              "label is null", **_CLASS),
    Malformed("another spelling of a column", "a.jsonl", _lines(GOOD, {"Prompt": "a", "response": "b"}), "line 2", "prompt is missing"),
    Malformed("not a number", "a.jsonl", _lines(GOOD, b'{"prompt": NaN, "response": "b"}\n'), "line 2", "holds no text: NaN"),
    Malformed("a page of the web", "a.jsonl", b"<!DOCTYPE html>\n<html>\n", "line 1", "not JSON"),
    Malformed("a pointer of Git LFS", "a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "line 1", "not JSON"),
    Malformed("bad line in gzip", "a.jsonl.gz", gzip.compress(_lines(GOOD, b"{\n"), mtime=0), "line 2", "not JSON"),
]  # fmt: skip

_CHATS = [
    Malformed("messages are a text", "c.jsonl", _lines(_messages(*CHAT), {"messages": "hi"}), "line 2", "no list of messages"),
    Malformed("no role", "c.jsonl", _lines(_messages(*CHAT), _messages({"content": "hi"})), "line 2", "neither role nor from"),
    Malformed("no assistant", "c.jsonl", _lines(_messages(*CHAT), _messages(CHAT[0])), "line 2", "from the assistant"),
    Malformed("no messages", "c.jsonl", _lines(_messages(*CHAT), _messages()), "line 2", "no messages"),
    Malformed("a silent assistant", "c.jsonl", _lines(_messages(*CHAT), _messages(CHAT[0], {**CHAT[1], "content": ""})),
              "line 2", "answer is empty"),
    Malformed("a word among messages", "c.jsonl", _lines(_messages(*CHAT), _messages("hi", *CHAT)), "line 2", "no list of messages"),
    Malformed("a role that is a number", "c.jsonl", _lines(_messages(*CHAT), _messages({**CHAT[0], "role": 1}, CHAT[1])), "line 2",
              "neither role nor from"),
    Malformed("a number of contents", "c.jsonl", _lines(_messages(*CHAT), _messages(CHAT[0], {**CHAT[1], "content": [1]})), "line 2",
              "holds no text"),
    Malformed("messages are missing", "c.jsonl", _lines(_messages(*CHAT), {"id": 7}), "line 2", "messages is missing"),
    Malformed("turns without a word", "c.jsonl", _lines({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
              {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": " "}]}), "line 2", "answer is empty"),
    Malformed("a tool is called", "c.jsonl", _lines(_messages(*CHAT), _messages(*CHAT, {**CHAT[1], "tool_calls": [{"id": 1}]})),
              "line 2", "calls a tool"),
    Malformed("tools are offered", "c.jsonl", _lines(_messages(*CHAT), {**_messages(*CHAT), "tools": [{"type": "function"}]}),
              "line 2", "offers tools"),
]  # fmt: skip

_JSON = [
    Malformed("list broken off", "a.json", _document(GOOD, GOOD)[:-30], "line 3", "not JSON"),
    Malformed("list broken in the middle", "a.json", _document(GOOD, b'{"prompt": oops}', GOOD), "line 3", "not JSON"),
    Malformed("comma missing", "a.json", b"[" + _lines(GOOD, GOOD) + b"]", "line 2", "Expecting ','"),
    Malformed("something behind the list", "a.json", _document(GOOD) + b"[]", "line 4", "Extra data"),
    Malformed("a word among rows", "a.json", _document(GOOD, "word"), "line 3", "must be an object"),
    Malformed("a bad row of one line", "a.json", json.dumps([GOOD, GOOD, 7]).encode(), "row 3", "must be an object"),
    Malformed("latin 1 in a list", "a.json", _document(GOOD, b'{"prompt": "caf\xe9", "response": "b"}'), "line 3", "not UTF-8"),
    Malformed("two lists", "a.json", b'{"a": [1],\n "b": [2]}', "line 2", "several lists"),
    Malformed("two lists of one name", "a.json", b'{"a": [1],\n "a": [2]}', "line 2", "several lists"),
    Malformed("only a word", "a.json", b'\n"text"', "line 2", "must be an object"),
    Malformed("bad row in a wrapped list", "a.json", b'{"v": 1, "data":\n' + _document(GOOD, {"prompt": "a"}) + b"}", "line 4",
              "response is missing"),
    Malformed("lines with a bad first", "a.json", _lines(b"{prompt: 1}\n", GOOD, GOOD), "line 1", "not JSON"),
    Malformed("nothing", "a.json", b"", "", "holds no rows"),
]  # fmt: skip

_CSV = [
    Malformed("too many fields", "a.csv", _LABELLED + b"a,b,c\n", "line 3", "more fields", **_CLASS),
    Malformed("too few fields", "a.csv", _LABELLED + b"a\n", "line 3", "fewer fields", **_CLASS),
    Malformed("quotation never closed", "a.csv", _LABELLED + b'"a,b\nc,d\n', "line 3", "not CSV", **_CLASS),
    Malformed("text behind a quotation", "a.csv", _LABELLED + b'"a"b,no\n', "line 3", "not CSV", **_CLASS),
    Malformed("latin 1 in csv", "a.csv", _LABELLED + b'"a\nb",no\ncaf\xe9,no\n', "line 5", "not UTF-8", **_CLASS),
    Malformed("empty class", "a.csv", _LABELLED + b"a,\n", "line 3", "class is empty", **_CLASS),
    Malformed("no number for a class", "a.csv", _LABELLED + b"a,NaN\n", "line 3", "a word or a whole number", **_CLASS),
    Malformed(
        "two columns of one name", "a.csv", b"text,label,text\na,b,c\n", "line 1", "two columns have the name 'text'", **_CLASS
    ),
    Malformed("a blank text", "a.csv", _LABELLED + b'" ",no\n', "line 3", "text is empty", **_CLASS),
    Malformed("half a class", "a.csv", _LABELLED + b'a,"no\n', "line 3", "not CSV", **_CLASS),
    Malformed("semicolons", "a.csv", b"text;label\na;b\n", "line 2", "none that brim understands", **_CLASS),
    Malformed("an empty answer in csv", "a.csv", b"prompt,response\na,b\nc,\n", "line 3", "answer is empty"),
    Malformed("no class", "a.csv", b"text,colour\na,b\n", "line 2", "none that brim understands", **_CLASS),
    Malformed("only names", "a.csv", b"prompt,response\n", "", "holds no rows"),
]

_TABLES = [
    Malformed("null in parquet", "a.parquet", _table(GOOD, _changed(response=None)), "row 2", "response is null"),
    Malformed("no number in parquet", "a.parquet", _table(_changed(response=1.0), _changed(response=float("nan"))), "row 2",
              "holds no text: NaN"),
    Malformed("two columns of one name in parquet", "a.parquet", _twice("text"), "", "two columns have the name 'text'"),
    Malformed("bytes that are no text in parquet", "a.parquet", _bytes_as_text("parquet"), "row 2", "not UTF-8 text"),
    Malformed("bytes that are no text in arrow", "a.arrow", _bytes_as_text("arrow"), "row 2", "not UTF-8 text"),
    Malformed("half a parquet file", "a.parquet", _cut(_table(GOOD), 0.5), "", "not a Parquet file"),
    Malformed("null in arrow", "a.arrow", _table(GOOD, _changed(prompt=None), kind="arrow"), "row 2", "prompt is null"),
    Malformed("no arrow file", "a.arrow", b"none of it is arrow", "", "not an Arrow file"),
    Malformed("a number for a class", "a.parquet", _table({"text": "a", "label": 1.0}, {"text": "b", "label": 0.5}), "row 2",
              "a word or a whole number", **_CLASS),
]  # fmt: skip

_TEXTS = [
    Malformed("latin 1 in text", "a.txt", b"one\n\ntwo\ncaf\xe9\n", "line 4", "not UTF-8"),
    Malformed("an empty file in a folder", "texts", _folder(a__txt=b"one", b__txt=b"\n"), "b.txt", "text is empty"),
    Malformed("a bad row in a folder", "rows", _folder(a__jsonl=_GOOD, b__jsonl=_lines(GOOD, 7)), "b.jsonl, line 2", "an object"),
    Malformed("nothing in a folder", "none", _folder(a__xlsx=b""), "", "holds no data file"),
    Malformed("an unknown kind", "a.xlsx", b"PK", "", "does not know how to read"),
]

_OF_TOKENS = [
    Malformed("prompt too long", "a.jsonl", _lines(GOOD, _changed(prompt=_LONG)), "line 2", "too long", **_TOKENS),
    Malformed("too long in a list", "a.json", _document(GOOD, _changed(prompt=_LONG)), "line 3", "too long", **_TOKENS),
    Malformed("refused by the template", "c.jsonl", _lines(_messages(*CHAT), _messages({"role": "tool", "content": "x"}, *CHAT)),
              "line 2", "refuses the messages", **_TOKENS),
    Malformed("one class", "a.csv", _LABELLED + b"bad lamp,yes\n", "", "one class", **_CLASS, **_TOKENS),
]  # fmt: skip

STRUCTURAL = [*_JSONL, *_CHATS, *_JSON, *_CSV, *_TABLES, *_TEXTS]
ON_A_LINE = [bad for bad in STRUCTURAL if "line " in bad.place]
"""Those whose message names a line. Tables have rows, and of some files (none at all, no Parquet, an unknown kind) the whole is wrong."""
ALL = [*STRUCTURAL, *_OF_TOKENS]
