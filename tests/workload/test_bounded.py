"""Whatever is given as data or comes with a tokenizer: it is refused in words, at once, and within little memory."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.errors import UsageError
from brim.workload import chats
from brim.workload.chats import ChatRenderer, TemplateRefusalError
from brim.workload.documents import LONGEST_ROW_BYTES
from brim.workload.lengths import measure_lengths
from brim.workload.reading import Rows, sources_of
from tests.trainer.data.test_prepare import jsonl, prepared
from tests.trainer.data.tokenizers_here import CHATML, MARKED, tokenizer

LONG = b"x" * (LONGEST_ROW_BYTES + 10)
MOST_BYTES = 2 << 30
HI = [{"role": "user", "content": "hi"}]
PROGRAM = """
import re, resource, sys
{body}
# Not RUSAGE_SELF: at exec a process inherits the peak of the one that started it.
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024)
"""


def peak_of(body: str, *arguments: str) -> int:
    """Largest resident memory of a process that runs this, and of its children."""
    text = PROGRAM.replace("{body}", body)
    ended = subprocess.run([sys.executable, "-c", text, *arguments], check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout.split()[-1])


READ = """
from brim.errors import UsageError
from brim.workload.lengths import measure_lengths
try:
    measure_lengths(sys.argv[1])
except UsageError as error:
    assert sys.argv[2] in str(error), error
else:
    assert sys.argv[2] == "read"
"""


def test_a_pipe_a_socket_a_device_and_nothing_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "b.jsonl"))
        for path, kind in ((tmp_path / "a.jsonl", "a pipe"), (tmp_path / "b.jsonl", "a socket"), (Path("/dev/zero"), "a device")):
            with pytest.raises(UsageError, match=f"is {kind}, and brim reads data more than once"):
                Rows(path)
    for nothing in ("", "  ", [], ["a.jsonl", ""]):
        with pytest.raises(UsageError, match="--data is empty"):
            sources_of(nothing)
    with pytest.raises(UsageError, match="twice"):
        Rows([tmp_path, tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "' + LONG + b'"}\n', "line 2"),
        ("a.jsonl", b'{"text": "a"}\n' + LONG, "line 2"),
        ("a.json", b'[{"text": "a"},\n{"text": "' + LONG + b'"}]', "line 2"),
        ("a.json", b'[{"text": 1.' + b"0" * len(LONG) + b"}]", "line 1"),
        ("a.json", b'{"about": ["' + LONG + b'"],\n "rows": []}', "line 1"),
        ("a.json", b'{"a": "' + LONG[:-20] + b'",\n "b": "' + LONG[:-20] + b'", "rows": [{"text": "a"}]}', "line 2"),
        ("a.csv", b"text\na\n" + LONG + b"\n", "line 3"),
        ("a.csv", b'text\na\n"' + b'a\n","' * (LONGEST_ROW_BYTES // 4), "line 3"),
        ("a.txt", b"one\ntwo\n" + LONG + b"\n", "line 3"),
    ],
    ids=["string", "line", "value", "number", "list", "members", "field", "fields", "text"],
)
def test_a_row_above_the_limit_is_refused_with_its_line(tmp_path: Path, name: str, content: bytes, place: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        list(Rows(path))
    assert f"{name}, {place}: longer than 16.0 MiB" in caught.value.message


@pytest.mark.long
@pytest.mark.parametrize("kind", ["line", "gzip line", "gzip lines", "gzip blanks", "csv", "json", "dense", "text folder"])
def test_no_file_takes_much_memory(tmp_path: Path, kind: str) -> None:
    path, said = tmp_path / "a.jsonl", "longer than"
    if kind == "line":
        with path.open("wb") as file:
            file.write(b'{"text": "')
            file.truncate(1 << 30)
    elif kind.startswith("gzip"):
        path = tmp_path / "a.jsonl.gz"
        unit = {"gzip line": b"x" * (1 << 20), "gzip lines": b'{"text": "a"}\n' * (1 << 16), "gzip blanks": b"\n" * (1 << 20)}[
            kind
        ]
        with gzip.open(path, "wb", compresslevel=9) as packed:
            for _ in range(1 << 9):
                packed.write(unit)
        said = said if kind == "gzip line" else "unpack to more than"
    elif kind == "csv":
        path = tmp_path / "a.csv"
        path.write_bytes(b'text\n"' + b'a\n","' * (100 << 18))
    elif kind == "json":
        path = tmp_path / "a.json"
        path.write_bytes(b'{"a": [' + b'{"b":[]},' * (3 << 20) + b"{}]}")
        said = "columns"
    elif kind == "dense":
        path.write_bytes((b'{"text": "a", "b": [' + b'{"a":0},' * (2 * LONGEST_ROW_BYTES // 17) + b"0]}\n") * 20)
        said = "read"
    else:
        (tmp_path / "texts").mkdir()
        path, said = tmp_path / "texts", "read"
        (path / "a.txt").write_bytes(b"the river finds the stone and the lamp\n" * (3 << 20))
    assert peak_of(READ, str(path), said) < MOST_BYTES


def test_a_pipe_that_a_saved_data_set_names_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.arrow")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pytest.raises(UsageError, match="is a pipe"):
        Rows(tmp_path)


FIRST_ROW = """
from brim.workload.reading import Rows
next(iter(Rows(sys.argv[1])))
"""


def parquet(path: Path, text: str, rows: int) -> Path:
    """The same text in every row, stored once."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet as pq

    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    return path


def test_a_parquet_file_that_repeats_a_long_text_takes_little_memory(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", "a" * (1 << 20), 1024)
    assert path.stat().st_size < 10_000
    assert peak_of(FIRST_ROW, str(path)) < 1 << 30
    assert sum(1 for _found in Rows(parquet(tmp_path / "b.parquet", "a", 3000))) == 3000


def test_a_row_of_a_table_above_the_limit_is_refused_with_its_number(tmp_path: Path) -> None:
    rows = iter(Rows(parquet(tmp_path / "a.parquet", LONG.decode(), 2)))
    with pytest.raises(UsageError) as caught:
        next(rows)
    assert "a.parquet, row 1: longer than 16.0 MiB" in caught.value.message


TOKENISE = """
from brim.trainer.data.prepare import prepare_data
from brim.trainer.loading import load_tokenizer
prepare_data(sys.argv[1], tokenizer=load_tokenizer(sys.argv[2]), tokenizer_name="words", task="causal-lm", max_length=128,
             cache=sys.argv[3], say=print, max_bad=1)
"""


@pytest.mark.long
@pytest.mark.parametrize("column", ["text", "messages"])
def test_a_row_as_large_as_may_be_is_tokenised_within_the_memory(tmp_path: Path, column: str) -> None:
    tokenizer(template=CHATML).save_pretrained(tmp_path / "words")
    size = LONGEST_ROW_BYTES - 200 if column == "text" else chats.MOST_CHARACTERS - 200
    long = "qx zj " * (size // 6)
    values: list[Any] = ["a stone", long]
    if column == "messages":
        values = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": value}] for value in values]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({column: value}) + "\n" for value in values))
    assert peak_of(TOKENISE, str(tmp_path / "a.jsonl"), str(tmp_path / "words"), str(tmp_path / "cache")) < MOST_BYTES


RENDER = """
from brim.errors import UsageError
from brim.workload import chats
from tests.trainer.data.test_prepare import jsonl, prepared
from tests.trainer.data.tokenizers_here import tokenizer
chats.MOST_SECONDS = 1
try:
    text = chats.ChatRenderer(tokenizer(template=sys.argv[1]), "words").render([{"role": "user", "content": "hi"}])
except (UsageError, chats.TemplateRefusalError) as error:
    assert sys.argv[2] in str(error), error
else:
    raise SystemExit(f"rendered {len(text)} characters")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'x' * 10**10 }}", "more than 512 MiB"),
        ("{% for m in messages %}{{ m['content']|center(10**10) }}{% endfor %}", "more than 512 MiB"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
            "more than 512 MiB",
        ),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
        ("{{ 'x' * 5000000 }}", "writes 5,000,000 characters"),
        ("{" + "{ [" * 5000, ""),
    ],
    ids=["product", "filter", "doubling", "loops", "output", "nesting"],
)
def test_no_template_takes_much_memory_or_time(template: str, said: str) -> None:
    assert peak_of(RENDER, template, said) < MOST_BYTES


def test_a_template_is_rendered_as_transformers_does_it_and_refuses_as_it_does() -> None:
    words = tokenizer(template=CHATML)
    renderer = ChatRenderer(words, "words")
    for invite in (False, True):
        assert renderer.render(HI, invite=invite) == words.apply_chat_template(HI, tokenize=False, add_generation_prompt=invite)
    with pytest.raises(TemplateRefusalError, match="no tools here"):
        renderer.render([{"role": "tool", "content": "x"}])
    assert renderer.render([{"role": "user", "content": "你好 \ud83d \u2028"}]) == "<|user|>你好 \ud83d \u2028</s>"
    renderer.close()
    text, spans = ChatRenderer(tokenizer(template=MARKED), "words").render_marked([*HI, {"role": "assistant", "content": "a!b"}])
    assert [text[start:end] for start, end in spans] == ["a!b</s>"]


def test_a_renderer_that_nobody_has_leaves_no_process_behind() -> None:
    renderer = ChatRenderer(tokenizer(template=CHATML), "words")
    renderer.render(HI)
    assert renderer._child is not None
    pid = renderer._child._pid
    del renderer
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_template_that_exceeds_a_limit_is_no_bad_row(tmp_path: Path) -> None:
    words = tokenizer(template="{{ 'x' * 10**10 }}")
    data = jsonl(tmp_path / "a.jsonl", *[{"messages": [*HI, {"role": "assistant", "content": "a"}]}] * 3)
    with pytest.raises(UsageError, match="The chat template of words was stopped: it takes more than 512 MiB"):
        prepared(data, words, max_bad=3)
    words.save_pretrained(tmp_path / "words")
    with pytest.raises(UsageError, match="was stopped: it takes more than 512 MiB"):
        measure_lengths(data, tokenizer=str(tmp_path / "words"))
