"""Every kind of data file gives the same rows, one at a time, and what is wrong with one is said once, with the file and the line."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from brim.errors import UsageError
from brim.workload.reading import Rows, read_rows

ROWS = [{"prompt": "What is 1 + 1?", "response": "2"}, {"prompt": "你好\n吗", "response": 'say "hi", \u2028 or not'}]


def lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: Path) -> Path:
    """The rows in the format that the file's name says."""
    name = path.name.lower()
    if name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines(ROWS).encode()))
    elif name.endswith(".csv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    elif name.endswith((".parquet", ".arrow")):
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet

        table = pa.Table.from_pylist(ROWS)
        if name.endswith(".parquet"):
            parquet.write_table(table, path, row_group_size=1)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer_:
                writer_.write_table(table)
    else:
        path.write_text(lines(ROWS) if name.endswith(".jsonl") else json.dumps(ROWS), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.b.jsonl.gz", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    assert list(read_rows(write(tmp_path / name))) == ROWS


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS, indent=2),
        json.dumps({"version": 1, "data": ROWS}),
        lines(ROWS),
        "\n" + lines(ROWS),
        "\ufeff" + json.dumps(ROWS),
        "\ufeff" + lines(ROWS).replace("\n", "\r\n\r\n"),
    ],
    ids=[
        "list",
        "object with one list",
        "lines",
        "lines after a blank one",
        "list with a BOM",
        "lines with BOM, CRLF and blank lines",
    ],
)
def test_a_json_file_may_be_a_list_an_object_with_one_or_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode())
    assert list(read_rows(path)) == ROWS


def test_one_object_without_a_list_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0]))
    assert list(read_rows(tmp_path / "a.json")) == ROWS[:1]


def test_a_csv_file_with_a_bom_and_a_very_long_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufefftext\n" + "x" * 200_000 + "\n", encoding="utf-8")
    assert [len(row["text"]) for row in read_rows(tmp_path / "a.csv")] == [200_000]


def test_a_folder_gives_all_its_files_in_order_and_the_training_split_where_there_is_one(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.parquet", ".hidden.jsonl", "README.md"):
        write(tmp_path / name)
    assert list(read_rows(tmp_path)) == ROWS * 2
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000-of-00001.parquet")
    write(tmp_path / "data" / "test-00000-of-00001.parquet")
    assert list(read_rows(tmp_path)) == ROWS


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["hotel.jsonl", "trainstation.jsonl"], ["hotel.jsonl", "trainstation.jsonl"]),
        (["a.jsonl", "trainer_state.json", "config.json", "tokenizer_config.json"], ["a.jsonl"]),
        (["data.jsonl", "test.jsonl", "x/validation-0.jsonl", "latest.jsonl"], ["data.jsonl", "latest.jsonl"]),
        (["train.jsonl", "training_2.jsonl", "train_dev.jsonl", "y.jsonl"], ["train.jsonl", "training_2.jsonl"]),
        (["test/train.jsonl", "train/x.jsonl"], ["train/x.jsonl"]),
        (["test.jsonl"], ["test.jsonl"]),
        (["a.txt", "config.json", "vocab.txt"], ["a.txt"]),
    ],
    ids=["no whole word", "files of a model", "tests without a train", "both words", "folders", "only a test", "texts"],
)
def test_of_a_folder_what_is_named_for_training_is_read_and_never_a_test_beside_it(
    tmp_path: Path, names: list[str], read: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert [str(file.relative_to(tmp_path)) for file in Rows(tmp_path).files] == read


def test_what_of_a_folder_is_passed_over_is_known_by_its_kind(tmp_path: Path) -> None:
    for name in (
        "train.jsonl",
        "b.tsv",
        "c.tsv",
        "d.csv.gz",
        "notes.txt",
        "config.json",
        "test.csv",
        "y.jsonl",
        "README.md",
        ".x",
    ):
        (tmp_path / name).write_text("x")
    assert Rows(tmp_path).passed_over == (".tsv", "config.json", ".csv.gz", ".txt", "test", "y.jsonl")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"prompt": "a", "response": "b", "tags": ["x", "y"], "history": []},
    ],
    ids=["messages", "lists beside the columns"],
)
def test_an_object_that_is_a_row_itself_is_that_row(tmp_path: Path, row: dict[str, object]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(row, indent=1))
    assert list(read_rows(tmp_path / "a.json")) == [row]


def test_what_datasets_saved_is_read_without_importing_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "whole", num_shards=2)
    datasets.DatasetDict({"test": whole.select([1]), "train": whole.select([0])}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"a": whole, "b": whole}).save_to_disk(tmp_path / "unnamed")
    assert list(read_rows(tmp_path / "whole")) == ROWS
    assert list(read_rows(tmp_path / "splits")) == ROWS[:1]
    with pytest.raises(UsageError, match="no split named train; it has a, b"):
        read_rows(tmp_path / "unnamed")
    code = f"import sys; from brim.workload.reading import read_rows; list(read_rows({str(tmp_path / 'whole')!r})); assert 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_come_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_text((json.dumps({"text": "x" * 1000}) + "\n") * 20_000)
    tracemalloc.start()
    count = sum(1 for _row in read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 1_000_000


def test_a_broken_row_is_told_only_when_it_is_reached(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(ROWS) + "{", encoding="utf-8")
    assert list(itertools.islice(read_rows(path), 2)) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "a.jsonl holds no rows."),
        ("a.jsonl", b"\n \n", "a.jsonl holds no rows."),
        ("a.json", b"", "a.json holds no rows."),
        ("a.json", b"[]", "a.json holds no rows."),
        ("a.csv", b"prompt,response\n", "a.csv holds no rows."),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl, line 2: this is not JSON: Expecting value."),
        ("a.json", b'{"a": 1}\n{"a": \n', "a.json, line 2: this is not JSON"),
        ("a.json", b'[{"a": 1},\n {"a": oops}]', "a.json, line 2: this is not JSON"),
        ("a.json", b"[" * 100_000, "a.json, line 1: this is not JSON"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xff"}\n', "a.jsonl, line 3: this is not UTF-8 text (byte 8)."),
        ("a.jsonl", "\ufeff{}".encode("utf-16-le"), "a.jsonl, line 1: this is not UTF-8 text (byte 1)."),
        ("a.csv", b"a,b\n1,2\n\xff,2\n", "a.csv, line 3: this is not UTF-8 text"),
        ("a.jsonl", b'{"a": 1}\n["a"]\n', 'a.jsonl, line 2: a row must be an object with named columns, and this is ["a"].'),
        ("a.json", b'[{"a": 1}, 7]', "a.json, row 2: a row must be an object with named columns, and this is 7."),
        ("a.json", b'"text"', "a.json, line 1: a row must be an object"),
        ("a.json", b'{"a": [1], "b": [2]}', "a.json, line 1: this is one more of several lists (a, b)"),
        ("a.csv", b"a,b\n1,2,3\n", "a.csv, line 2: more fields than the 2 columns"),
        ("a.csv", b'a,b\n1,2\n1,"2\n3,4\n', "a.csv, line 3: this is not CSV: unexpected end of data."),
        ("a.parquet", b"PAR1 no", "a.parquet is not a Parquet file"),
        ("a.arrow", b"none of it is arrow", "a.arrow is not an Arrow file"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz, line 1: this is not a complete gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-12], "this is not a complete gzip file"),
        ("a.xlsx", b"", "It reads .jsonl, .jsonl.gz, .json, .parquet, .csv, .arrow"),
        ("noextension", b"", "It reads .jsonl"),
    ],
)  # fmt: skip
def test_every_fault_is_one_clear_error(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        list(read_rows(path))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_path_that_is_not_there_is_told_before_the_first_row(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no file or folder .*nowhere.jsonl"):
        read_rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="holds no data file. brim reads .jsonl"):
        read_rows(tmp_path)


def test_a_hub_id_is_met_with_the_command_that_downloads_it() -> None:
    with pytest.raises(UsageError, match="looks like a data set of the Hub") as caught:
        read_rows("tatsu-lab/alpaca")
    assert "hf download tatsu-lab/alpaca --repo-type dataset --local-dir alpaca" in (caught.value.hint or "")


def test_a_time_beyond_the_calendar_stands_in_nobodys_way(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"text": ["a", "b"], "when": pa.array([0, 1 << 40], pa.int64()).cast(pa.timestamp("s"))})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [row["text"] for row in read_rows(tmp_path / "a.parquet")] == ["a", "b"]
