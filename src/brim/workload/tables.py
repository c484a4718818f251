"""Rows of tables: Parquet and Arrow. They have numbers and no lines."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _
from brim.workload.documents import LONGEST_ROW_BYTES
from brim.workload.formats import Found, one_line, refuse_repeated, row_too_long

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from brim.workload.formats import Meter, Row

_ROWS_AT_ONCE: Final = 1024
_BYTES_AT_ONCE: Final = 1 << 26
_BUFFER_BYTES: Final = 1 << 20


def parquet_rows(path: Path, meter: Meter) -> Iterator[Found]:
    """One page after another."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        # Pages as they are needed, for a row group may be as large as the file; and by one thread, for each keeps memory of its own.
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            refuse_repeated(str(path), file.schema_arrow.names)
            rows = max(1, file.metadata.num_rows)
            yield from _batches(path, _parquet_batches(file), meter, rows)
    except pa.ArrowException as error:
        raise UsageError(_("{path} is not a Parquet file: {why}.").format(path=path, why=one_line(error))) from error


def _parquet_batches(file: Any) -> Iterator[Any]:
    """So many rows at a time as take no more than `_BYTES_AT_ONCE`: a small file may hold one long text a million times."""
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        # With a dictionary, each row may be the longest value of the column, which is no longer than all that is stored of it.
        row_bytes = sum(
            column.total_uncompressed_size
            if column.has_dictionary_page
            else column.total_uncompressed_size // max(1, group.num_rows)
            for column in columns
        )
        rows = min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, row_bytes)))
        yield from file.iter_batches(rows, row_groups=[number], use_threads=False)


def arrow_rows(path: Path, meter: Meter) -> Iterator[Found]:
    """The files of `datasets.save_to_disk` and of its cache. Mapped, so that rows are loaded when they are asked for."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as batches:
            refuse_repeated(str(path), batches.schema.names)
            meter.tell = file.tell
            yield from _batches(path, batches, meter)
    except pa.ArrowException as error:
        raise UsageError(_("{path} is not an Arrow file: {why}.").format(path=path, why=one_line(error))) from error
    finally:
        meter.tell = lambda: 0


def _batches(path: Path, batches: Iterable[Any], meter: Meter, total: int | None = None) -> Iterator[Found]:
    """Rows of Arrow's batches; `total` where the file does not tell how far it was read."""
    number = 0
    size_bytes = path.stat().st_size
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            part = batch.slice(start, _ROWS_AT_ONCE)
            meter.count(part.nbytes)
            if total is not None:
                done_bytes = size_bytes * number // total
                meter.tell = lambda done_bytes=done_bytes: done_bytes  # type: ignore[misc]
            if part.nbytes > LONGEST_ROW_BYTES:
                _refuse_long_row(path, number, part)
            for row in _rows_of(part):
                number += 1
                yield Found(path, "row", number, *((row, "") if isinstance(row, dict) else (None, row)))


def _refuse_long_row(path: Path, before: int, part: Any) -> None:
    number = next((place for place in range(part.num_rows) if part.slice(place, 1).nbytes > LONGEST_ROW_BYTES), None)
    if number is not None:
        raise row_too_long(Found(path, "row", before + number + 1, None))


def _rows_of(part: Any) -> list[Row | str]:
    """Rows of a batch; of one that cannot be had, why. Text need not be UTF-8 there, and a time may lie beyond Python's calendar."""
    with contextlib.suppress(ValueError, OverflowError):  # of one value among thousands
        rows: list[Row | str] = part.to_pylist()
        return rows
    return [_row_of(part, place) for place in range(part.num_rows)]


def _row_of(part: Any, place: int) -> Row | str:
    row: Row = {}
    for name, column in zip(part.schema.names, part.columns, strict=True):
        try:
            row[name] = column[place].as_py()
        except UnicodeDecodeError:
            return _("the column {name} is not UTF-8 text").format(name=name)
        except (ValueError, OverflowError):
            row[name] = None  # no text to learn from, and nothing that stands in its way
    return row
