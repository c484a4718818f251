"""A first look at the data, before anything heavy is loaded: what is wrong with rows as such is told within a second or two.

What only a tokenizer can tell (a prompt that fills the whole length, a chat template that refuses) comes out in `prepare`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.trainer.data.bad import BadRows, nothing_left
from brim.trainer.data.pieces import Pieces
from brim.workload.reading import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.workload.reading import Given
    from brim.workload.words import Task

CHECKED_BYTES: Final = 32 << 20


def check_file(data: Given, *, task: Task | None, columns: Mapping[str, str] | None, max_bad: int) -> None:
    """Look at the first `CHECKED_BYTES` of the data. Raises one UsageError that lists the bad rows, if there are more than `max_bad`."""
    rows = Rows(data)
    bad = BadRows(rows, max_bad)
    good, is_all = 0, True
    for found, piece in Pieces(rows, task=task, columns=columns):
        if isinstance(piece, str):
            bad.add(found, piece)
        else:
            good += 1
        if rows.read_bytes > CHECKED_BYTES:
            is_all = False
            break
    bad.check(is_all=is_all)
    if not good and is_all:
        raise nothing_left(rows.name, bad.first, bad.count)
