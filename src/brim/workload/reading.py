"""Rows of a data set on this disk: JSON lines, JSON, Parquet, CSV, Arrow, a folder that `datasets` saved, or a folder of such files.

Rows come one at a time, so that a file may be larger than the memory; only a JSON document, which has to be read to its end before it can
be understood, is held whole. What is wrong with a file is told once, with the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import textwrap
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Row = dict[str, Any]

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SPLITS_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"
# Written beside the data by `datasets` and by the Hub: facts about the rows, no rows.
_NO_DATA: Final = frozenset({_SPLITS_FILE, _STATE_FILE, "dataset_info.json", "dataset_infos.json"})
_ROWS_AT_ONCE: Final = 1024
_BOM: Final = "\ufeff"


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a file or folder, in its order. A wrong path is told now, a wrong row when it is reached."""
    path = Path(path)
    return _with_rows(path, [(file, _reader_of(file)) for file in _files(path)])


def _with_rows(path: Path, readers: list[tuple[Path, Callable[[Path], Iterator[Row]]]]) -> Iterator[Row]:
    empty = True
    for file, reader in readers:
        with _told_as_ours(file):
            for row in reader(file):
                empty = False
                yield row
    if empty:
        raise UsageError(_("{path} holds no rows.").format(path=path))


@contextmanager
def _told_as_ours(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(_("{path} is not a complete gzip file: {why}.").format(path=path, why=_one_line(error))) from error
    except OSError as error:
        raise UsageError(_("Cannot read {path}: {why}.").format(path=path, why=error.strerror or _one_line(error))) from error


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return _files_of_folder(path)
    if path.exists():
        return [path]
    given = str(path)
    if _HUB_ID.fullmatch(given) and _extension(path) not in _READERS:
        text = _("{given} is not on this disk. It looks like a data set of the Hub, and brim reads local files.")
        command = f"hf download {given} --repo-type dataset --local-dir {path.name}"
        hint = _("Download it with `{command}` and give the folder {folder}.")
        raise UsageError(text.format(given=given), hint=hint.format(command=command, folder=path.name))
    raise UsageError(_("There is no file or folder {path}.").format(path=given))


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / _SPLITS_FILE).is_file():
        return _files_of_folder(_split_of(folder))
    if (folder / _STATE_FILE).is_file():
        names = _json_document(folder / _STATE_FILE).get("_data_files") or []
        if not isinstance(names, list) or not all(
            isinstance(name, dict) and isinstance(name.get("filename"), str) for name in names
        ):
            raise UsageError(_("{path} does not list its data files.").format(path=folder / _STATE_FILE))
        return [folder / name["filename"] for name in names]
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    known = [
        path
        for path in inside
        if _extension(path) in _READERS and path.name not in _NO_DATA and not any(part.startswith(".") for part in path.parts)
    ]
    if not known:
        raise UsageError(_("{path} holds no data file. brim reads {known}.").format(path=folder, known=", ".join(_READERS)))
    # The Hub's way of telling splits apart: train-00000-of-00001.parquet, or a folder train/. Test rows are not trained on.
    training = [path for path in known if any(part.lower().startswith("train") for part in path.parts)]
    return [folder / path for path in training or known]


def _split_of(folder: Path) -> Path:
    splits = _json_document(folder / _SPLITS_FILE).get("splits") or []
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise UsageError(_("{path} does not list its splits.").format(path=folder / _SPLITS_FILE))
    if "train" in splits:
        return folder / "train"
    if len(splits) == 1:
        return folder / str(splits[0])
    text = _("{path} has no split named train; it has {splits}.").format(path=folder, splits=", ".join(splits) or _("none"))
    raise UsageError(text, hint=_("Give the folder of the split that is to be trained on."))


def _json_document(path: Path) -> Row:
    with _told_as_ours(path):
        document = _parse("".join(line for _number, line in _lines(path)), path)
    if not isinstance(document, dict):
        raise _no_object(str(path), document)
    return document


def _extension(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def _reader_of(path: Path) -> Callable[[Path], Iterator[Row]]:
    reader = _READERS.get(_extension(path))
    if reader is None:
        text = _("brim does not know how to read {path}. It reads {known}, and folders of these.")
        raise UsageError(text.format(path=path, known=", ".join(_READERS)))
    return reader


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line with its number. Read as bytes: only so is it known which line is not UTF-8."""
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                text = _("{path}, line {line}: this is not UTF-8 text (byte {byte}).")
                hint = _("Save the file as UTF-8.")
                raise UsageError(text.format(path=path, line=number, byte=error.start + 1), hint=hint) from error
            yield number, text.removeprefix(_BOM) if number == 1 else text


def _parse(text: str, path: Path, line: int | None = None) -> Any:
    """`line` where the text is one line of a file; an error of a whole document tells its line itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = line or getattr(error, "lineno", 1)
        why = getattr(error, "msg", None) or _one_line(error)
        raise UsageError(_("{path}, line {line}: this is not JSON: {why}.").format(path=path, line=line, why=why)) from error


def _no_object(place: str, value: object) -> UsageError:
    text = _("{place}: a row must be an object with named columns, and this is {value}.")
    return UsageError(text.format(place=place, value=textwrap.shorten(json.dumps(value, ensure_ascii=False), 40)))


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if line.strip():
            row = _parse(line, path, number)
            if not isinstance(row, dict):
                raise _no_object(_("{path}, line {line}").format(path=path, line=number), row)
            yield row


def _json(path: Path) -> Iterator[Row]:
    """One list of rows, or an object that holds one; many files of this name hold JSON lines, so these are read too."""
    if _holds_json_lines(path):
        yield from _json_lines(path)
        return
    text = "".join(line for _number, line in _lines(path))
    if not text.strip():
        return
    for number, row in enumerate(_rows_of_document(path, _parse(text, path)), 1):
        if not isinstance(row, dict):
            raise _no_object(_("{path}, row {row}").format(path=path, row=number), row)
        yield row


def _holds_json_lines(path: Path) -> bool:
    filled = (line for _number, line in _lines(path) if line.strip())
    try:
        return isinstance(json.loads(next(filled, "")), dict) and next(filled, None) is not None
    except (ValueError, RecursionError):
        return False


def _rows_of_document(path: Path, document: Any) -> list[Any]:
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        raise _no_object(str(path), document)
    lists = [name for name, value in document.items() if isinstance(value, list)]
    if len(lists) == 1:
        found: list[Any] = document[lists[0]]
        return found
    if not lists:
        return [document]
    text = _("{path} holds several lists ({names}), and brim cannot tell which one has the rows.")
    raise UsageError(text.format(path=path, names=", ".join(lists)), hint=_("Save the rows as one list, or as JSON lines."))


def _csv(path: Path) -> Iterator[Row]:
    # The limit is the process's, 128 KiB a field, and long texts are what is read here.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader((line for _number, line in _lines(path)), strict=True)
    try:
        for row in reader:
            if None in row:
                text = _("{path}, line {line}: more fields than the {count} columns of the first line.")
                raise UsageError(text.format(path=path, line=reader.line_num, count=len(reader.fieldnames or ())))
            yield row
    except csv.Error as error:
        # Where the row begins: a quotation mark that is never closed is only found out at the file's end.
        text = _("{path}, line {line}: this is not CSV: {why}.")
        raise UsageError(text.format(path=path, line=reader.line_num + 1, why=_one_line(error))) from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise UsageError(_("{path} is not a Parquet file: {why}.").format(path=path, why=_one_line(error))) from error


def _arrow(path: Path) -> Iterator[Row]:
    """The files of `datasets.save_to_disk` and of its cache. Mapped, so that rows are loaded when they are asked for."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()
    except pa.ArrowException as error:
        raise UsageError(_("{path} is not an Arrow file: {why}.").format(path=path, why=_one_line(error))) from error


_READERS: Final[dict[str, Callable[[Path], Iterator[Row]]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".arrow": _arrow,
}
