"""How each kind of data file is read: row by row, each with its place, and with what is wrong about it.

What is wrong with one row is said beside it, and the next one is read. What is wrong with a whole file (half of a gzip file, a JSON list
that breaks off, a quotation mark that is never closed) is raised: nobody knows what would have followed.

Memory is bounded, whatever a file holds: no line, value or row above `LONGEST_ROW_BYTES` is read to its end, and a gzip file that
expands like nothing that people write is refused.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import sys
import textwrap
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NamedTuple, cast

from brim.errors import UsageError
from brim.locale import _
from brim.sizes import format_bytes
from brim.workload.columns import fits_itself
from brim.workload.documents import LONGEST_ROW_BYTES, Document, DocumentError, too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from brim.workload.documents import Value

    Reader = Callable[[Path, "Meter"], Iterator["Found"]]

Row = dict[str, Any]

_LONGEST_FIRST_LINE: Final = 1 << 22
_LINES_TO_JUDGE_BY: Final = 10
_BOM: Final = "\ufeff"
_MOST_EXPANSION: Final = 200
"""Of a gzip file. Rows of text come to 3-10, the same row a million times to 200-1000, which is also what a bomb has."""


DocumentPart = Literal["", "whole", "part"]
"""Of plain text: a document, or its end; a part that the next row goes on with. Empty: rows of any other kind."""


class Found(NamedTuple):
    """What stands at one place of the data."""

    path: Path
    unit: Literal["line", "row", "file"]
    number: int
    """Of the line on which it begins; of the row, where there are no lines or where several rows share one."""
    row: Row | None
    """None where there is none to be had."""
    fault: str = ""
    """Why it is bad, as the end of a sentence; empty where it is not. A CSV row that ends early is bad, and still a row."""
    hint: str | None = None
    document: DocumentPart = ""

    def place(self, path: str | Path | None = None) -> str:
        """As a person looks it up; `path` where the file is to be called otherwise."""
        name = self.path if path is None else path
        if self.unit == "line":
            return _("{path}, line {line}").format(path=name, line=self.number)
        return _("{path}, row {row}").format(path=name, row=self.number) if self.unit == "row" else str(name)


class Meter:
    """How far one has come."""

    def __init__(self) -> None:
        self.finished_bytes = 0
        """Of the files that are done with, as they lie on the disk."""
        self.read_bytes = 0
        """Of all rows, as they are when unpacked."""
        self.tell: Callable[[], int] = lambda: 0
        """Bytes of the file that is being read."""

    def count(self, read_bytes: int) -> None:
        """So many more were read."""
        self.read_bytes += read_bytes

    def finish(self, file: Path) -> None:
        """This file is done with."""
        self.tell = lambda: 0
        self.finished_bytes += file.stat().st_size


@contextlib.contextmanager
def told_as_ours(path: Path) -> Iterator[None]:
    """What is wrong with a file as a whole, as one sentence that names it."""
    try:
        yield
    except DocumentError as error:
        fault, hint = (_no_json(error.why), None) if error.is_text else (_("this is not UTF-8 text"), save_as_utf8())
        fault = fault if error.is_json else error.why
        place = Found(path, "line", error.line, None).place()
        raise UsageError(_("{place}: {fault}.").format(place=place, fault=fault), hint=hint) from error
    except OSError as error:
        raise UsageError(_("Cannot read {path}: {why}.").format(path=path, why=error.strerror or one_line(error))) from error


def read_document(path: Path) -> Row:
    """A small JSON file that holds one object."""
    with told_as_ours(path), path.open("rb") as stream:
        document = Document(stream)
        value = document.value().value
        document.end()
    if not isinstance(value, dict):
        raise UsageError(_("{place}: {fault}.").format(place=path, fault=_no_object(value)))
    return value


def one_line(error: Exception) -> str:
    """The first line of what a library says, as the end of a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _no_json(why: str) -> str:
    return _("this is not JSON: {why}").format(why=why)


def _no_object(value: object) -> str:
    shown = textwrap.shorten(json.dumps(value, ensure_ascii=False), 40)
    return _("a row must be an object with named columns, and this is {value}").format(value=shown)


def save_as_utf8() -> str:
    """The advice for a file in another encoding."""
    return _("Save the file as UTF-8.")


@contextlib.contextmanager
def _opened(path: Path, meter: Meter) -> Iterator[BinaryIO]:
    with path.open("rb") as raw:
        meter.tell = raw.tell
        try:
            if path.suffix.lower() == ".gz":
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast("BinaryIO", unpacked)
            else:
                yield raw
        finally:
            meter.tell = lambda: 0


class Line(NamedTuple):
    """One line of a text."""

    number: int
    text: str
    fault: str = ""
    """Where it is not UTF-8; the text then holds what could be read of it."""


def lines_of(path: Path, meter: Meter) -> Iterator[Line]:
    """Every line. Read as bytes: only so is it known which one is not UTF-8."""
    number = unpacked = 0
    is_packed = path.suffix.lower() == ".gz"
    with _opened(path, meter) as file:
        while raw := _next_line(path, file, number + 1):
            number += 1
            meter.read_bytes += len(raw)
            unpacked += len(raw)
            if is_packed and unpacked > max(LONGEST_ROW_BYTES, _MOST_EXPANSION * meter.tell()):
                text = _("{path}: {packed} of this gzip file unpack to more than {unpacked}, so brim does not read it.")
                raise UsageError(
                    text.format(path=path, packed=format_bytes(meter.tell()), unpacked=format_bytes(unpacked)),
                    hint=_("If these are your rows, unpack the file first: gunzip {path}.").format(path=path),
                )
            try:
                text, fault = raw.decode("utf-8"), ""
            except UnicodeDecodeError as error:
                text = raw.decode("utf-8", "replace")
                fault = _("this is not UTF-8 text (byte {byte})").format(byte=error.start + 1)
            yield Line(number, text.removeprefix(_BOM) if number == 1 else text, fault)


def _next_line(path: Path, file: BinaryIO, number: int) -> bytes:
    try:
        line = file.readline(LONGEST_ROW_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        place = Found(path, "line", number, None).place()
        raise UsageError(
            _("{place}: this is not a complete gzip file: {why}.").format(place=place, why=one_line(error))
        ) from error
    if len(line) > LONGEST_ROW_BYTES:
        raise row_too_long(Found(path, "line", number, None))
    return line


def row_too_long(found: Found) -> UsageError:
    """What is said of a row above the limit."""
    hint = _("Split it into several rows, or shorten it: what is longer than --seq-len is cut anyway.")
    return UsageError(_("{place}: {fault}.").format(place=found.place(), fault=too_long()), hint=hint)


def json_lines(path: Path, meter: Meter) -> Iterator[Found]:
    """An object a line; blank lines are none."""
    for number, line, fault in lines_of(path, meter):
        if fault:
            yield Found(path, "line", number, None, fault, save_as_utf8())
        elif line.strip():
            yield _json_line(path, number, line)


def _json_line(path: Path, number: int, line: str) -> Found:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Found(path, "line", number, None, _no_json(getattr(error, "msg", None) or one_line(error)))
    if not isinstance(row, dict):
        return Found(path, "line", number, None, _no_object(row))
    return Found(path, "line", number, row)


def json_rows(path: Path, meter: Meter) -> Iterator[Found]:
    """One list of rows, or an object that holds one; many files of this name hold JSON lines, so these are read too."""
    if _holds_json_lines(path):
        yield from json_lines(path, meter)
        return
    with _opened(path, meter) as stream:
        document = Document(stream, meter.count)
        first = document.peek()
        if first == "[":
            yield from _elements(path, document)
        elif first == "{":
            yield from _rows_of_object(path, document)
        elif first:
            line, value, _is_text = document.value()
            yield Found(path, "line", line, None, _no_object(value))
        document.end()


def _holds_json_lines(path: Path) -> bool:
    """Whether a line of it is a row by itself, and not the only one. A first line that is broken does not decide it."""
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(_LONGEST_FIRST_LINE), b"")
        filled = itertools.islice((line.removeprefix(_BOM.encode()) for line in lines if line.strip()), _LINES_TO_JUDGE_BY)
        first = next(filled, b"")
        if _is_whole(first):
            return next(filled, None) is not None
        # The rows of a list stand on lines of their own too; but then the first line opens the list.
        is_broken = first.lstrip().startswith(b"{") and not _goes_on(first)
        return is_broken and any(line.startswith(b"{") and _is_whole(line) for line in filled)


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _goes_on(line: bytes) -> bool:
    """Whether the line is the beginning of something: wrong only in that it ends."""
    text = line.decode("utf-8", "replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except (ValueError, RecursionError):
        return False
    return False


def _elements(path: Path, document: Document) -> Iterator[Found]:
    """The rows of a list. Where two share a line, as in a file without line breaks, the line would not tell them apart."""
    before = 0
    for number, value in enumerate(document.elements(), 1):
        yield _element(path, number, value, is_alone=value.line > before)
        before = value.line


def _element(path: Path, number: int, value: Value, *, is_alone: bool) -> Found:
    where: tuple[Literal["line", "row"], int] = ("line", value.line) if is_alone else ("row", number)
    if not value.is_text:
        return Found(path, *where, None, _("this is not UTF-8 text"), save_as_utf8())
    if not isinstance(value.value, dict):
        return Found(path, *where, None, _no_object(value.value))
    return Found(path, *where, value.value)


def _rows_of_object(path: Path, document: Document) -> Iterator[Found]:
    """The list in an object, looked for before: a second list may stand behind it, and then nobody knows which one is meant."""
    with path.open("rb") as stream:
        lists, rest, line = _members(path, Document(stream))
    if not lists or fits_itself({**rest, **lists}):
        yield _element(path, 1, document.value(), is_alone=True)
        return
    if len(lists) > 1:
        text = _("{place}: this is one more of several lists ({names}), and brim cannot tell which one has the rows.")
        place = Found(path, "line", line, None).place()
        raise UsageError(text.format(place=place, names=", ".join(lists)), hint=_("Save the rows as one list, or as JSON lines."))
    for _name in document.names():
        if document.peek() == "[":
            yield from _elements(path, document)
        else:
            document.value()


def _members(path: Path, document: Document) -> tuple[dict[str, list[Any]], Row, int]:
    """The lists, of which only the first value is kept; everything else; and the line on which the last list begins."""
    lists: dict[str, list[Any]] = {}
    rest: Row = {}
    line = kept = 0
    for name in document.names():
        kept += len(name)
        before = document.taken
        if document.peek() == "[":
            line = document.line
            name = name if name not in lists else _("{name}, again").format(name=name)
            lists[name] = []
            for value in document.elements():
                if not lists[name]:
                    lists[name] = [value.value]
                    kept += document.taken - before
        else:
            rest[name] = document.value().value
            kept += document.taken - before
        if kept > LONGEST_ROW_BYTES:
            raise row_too_long(Found(path, "line", document.line, None))
    return lists, rest, line


def csv_rows(path: Path, meter: Meter) -> Iterator[Found]:
    """The first line names the columns; a row may go over several lines."""
    # The limit is the process's, 128 KiB a field, and long texts are what is read here.
    csv.field_size_limit(sys.maxsize)
    no_text: dict[int, str] = {}
    size = _RowSize()
    lines = _noting(path, lines_of(path, meter), no_text, size)
    reader = csv.reader(lines, strict=True)
    columns: list[str] | None = None
    while True:
        # Where the row begins: a quotation mark that is never closed is only found out at the file's end.
        start = size.start = reader.line_num + 1
        size.bytes = 0
        found = _csv_record(path, reader, start, no_text)
        if found is None:
            return
        if not isinstance(found, Found) and not found:
            continue  # a blank line
        if columns is None:
            if isinstance(found, Found):
                # Without names there are no rows.
                raise UsageError(_("{place}: {fault}.").format(place=found.place(), fault=found.fault), hint=found.hint)
            columns = found
            refuse_repeated(Found(path, "line", start, None).place(), columns)
        else:
            yield found if isinstance(found, Found) else _csv_row(path, start, columns, found)


def refuse_repeated(place: str, columns: list[str]) -> None:
    """Of two columns with one name, nobody knows which one is meant. Columns without a name are not asked for."""
    counts = Counter(columns)
    repeated = next((name for name in columns if name and counts[name] > 1), None)
    if repeated is not None:
        fault = _("two columns have the name {name!r}").format(name=repeated)
        raise UsageError(_("{place}: {fault}.").format(place=place, fault=fault), hint=_("Rename or remove one of them."))


@dataclass
class _RowSize:
    """Of the row of a CSV file that is being read: a quotation mark may make it go over any number of lines."""

    start: int = 1
    bytes: int = 0


def _noting(path: Path, lines: Iterable[Line], no_text: dict[int, str], size: _RowSize) -> Iterator[str]:
    for number, line, fault in lines:
        size.bytes += len(line)
        if size.bytes > LONGEST_ROW_BYTES:
            raise row_too_long(Found(path, "line", size.start, None))
        if fault:
            no_text[number] = fault
        yield line


def _csv_record(path: Path, reader: Any, start: int, no_text: dict[int, str]) -> list[str] | Found | None:
    """The fields of the next row, or what is wrong with it; None at the end."""
    try:
        fields: list[str] | None = next(reader, None)
    except csv.Error as error:
        no_text.clear()
        fault = _("this is not CSV: {why}").format(why=one_line(error))
        if "unexpected end" in str(error):
            # The rest of the file went into this row.
            place = Found(path, "line", start, None).place()
            raise UsageError(_("{place}: {fault}.").format(place=place, fault=fault)) from error
        return Found(path, "line", start, None, fault)
    if no_text:
        fault = next(iter(no_text.values()))
        no_text.clear()
        return Found(path, "line", start, None, fault, save_as_utf8())
    return fields


def _csv_row(path: Path, line: int, columns: list[str], fields: list[str]) -> Found:
    count = len(columns)
    if len(fields) > count:
        fault = _("more fields than the {count} columns of the first line").format(count=count)
        return Found(path, "line", line, None, fault)
    row: Row = dict(zip(columns, [*fields, *[None] * (count - len(fields))], strict=True))
    fault = _("fewer fields than the {count} columns of the first line").format(count=count) if len(fields) < count else ""
    return Found(path, "line", line, row, fault)
