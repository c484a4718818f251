"""One pass over the rows: chunk by chunk to tokens, and the tokens to the files of a new folder."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from brim.locale import _
from brim.records.runs import DataCard, LossOn
from brim.trainer.data.bad import BadRows, nothing_left
from brim.trainer.data.classes import Classes
from brim.trainer.data.encoding import Encoder
from brim.trainer.data.pieces import Piece, Pieces
from brim.trainer.data.sequences import Tokens, maker_for
from brim.trainer.data.store import Writer, building, write_card
from brim.workload.lengths import Lengths
from brim.workload.reading import Rows
from brim.workload.words import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from brim.workload.formats import Found

    Progress = Callable[[int, int], None]
    Chunk = list[tuple[Found, Piece | str]]

_CHARACTERS_AT_ONCE: Final = 1 << 18
_ROWS_AT_ONCE: Final = 2048
_PROGRESS_SECONDS: Final = 0.25


@dataclass(frozen=True)
class Job:
    """What is asked for."""

    rows: Rows
    encoder: Encoder
    task: Task
    columns: dict[str, str]
    max_length: int
    target_length: int | None
    loss_on: LossOn
    labels: tuple[str, ...]
    model_labels: tuple[str, ...]
    task_is_given: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """All that shapes the tokens beside the data and the tokenizer."""
        return {
            "task": self.task,
            "columns": self.columns,
            "max_length": self.max_length,
            "target_length": self.target_length,
            "loss_on": self.loss_on if self.task == "causal-lm" else None,
            "labels": self.labels,
            "model_labels": self.model_labels if self.task == "classification" else (),
            "vocabulary": self.encoder.vocabulary,
        }


def build(folder: Path, job: Job, max_bad: int, progress: Progress | None) -> DataCard:
    """Fill this folder, or leave nothing."""
    with building(folder) as temporary:
        writer = Writer(temporary, job.task)
        try:
            card = _Pass(job, writer, max_bad).run(folder, progress)
        finally:
            writer.close()
        write_card(card, temporary)
    return card


class _Pass:
    """What is counted and kept while rows are read."""

    def __init__(self, job: Job, writer: Writer, max_bad: int) -> None:
        self._job = job
        self._writer = writer
        self._pieces = Pieces(job.rows, task=job.task, columns=job.columns, task_is_given=job.task_is_given)
        self._bad = BadRows(job.rows, max_bad)
        self._classes = Classes(job.labels, job.model_labels)
        self._make = maker_for(
            job.task, job.encoder, max_length=job.max_length, target_length=job.target_length, loss_on=job.loss_on
        )
        self._sequences = self._tokens = self._learnt = self._longest = self._cut = self._cut_tokens = 0

    def run(self, folder: Path, progress: Progress | None) -> DataCard:
        """All rows. The folder is only named."""
        for chunk in _reported(_chunks(self._pieces), self._job.rows, progress):
            kept = self._kept(chunk)
            # Where the data will be refused, rows are still counted.
            if kept and not self._bad.are_too_many:
                self._write(kept)
        notes = self._make.finish()
        self._bad.check()
        if not self._sequences:
            raise nothing_left(self._job.rows.name, self._bad.first, self._bad.count)
        self._writer.finish()
        return replace(self._card(folder), notes=(*notes, *self._unread()))

    def _unread(self) -> Iterator[str]:
        if self._pieces.unread_class is not None:
            text = _(
                "The column {name} is not read: a causal model learns the text. To learn the classes: --task classification."
            )
            yield text.format(name=self._pieces.unread_class)

    def _kept(self, chunk: Chunk) -> list[Tokens]:
        """The sequences of these rows, without the bad ones, which are told in the order of the rows."""
        made = iter(self._make([piece for _found, piece in chunk if isinstance(piece, Piece)]))
        kept: list[Tokens] = []
        for found, piece in chunk:
            sequences = next(made) if isinstance(piece, Piece) else piece
            if isinstance(sequences, list) and self._job.task == "classification":
                label = sequences[0].label
                sequences = self._classes.describe_unknown(label) if self._classes.number(label) is None else sequences
            if isinstance(sequences, list):
                kept += sequences
            else:
                self._bad.add(found, sequences)
        return kept

    def _write(self, kept: list[Tokens]) -> None:
        task = self._job.task
        self._writer.append_parts("ids", "offsets", [tokens.ids for tokens in kept])
        if task == "causal-lm":
            self._writer.append("supervised", np.concatenate([_mask(tokens) for tokens in kept]))
            # A decoder cannot learn its first token: nothing stands before it.
            self._learnt += sum(end - max(start, 1) for tokens in kept for start, end in tokens.learnt if end > 1)
        elif task == "seq2seq":
            self._writer.append_parts("targets", "target_offsets", [tokens.target for tokens in kept])
            self._learnt += sum(len(tokens.target) for tokens in kept)
        else:
            assert self._pieces.layout is not None
            self._classes.check_size(self._job.rows.name, self._pieces.layout.label or "")
            self._writer.append("classes", [self._classes.number(tokens.label) or 0 for tokens in kept])
            self._learnt += len(kept)
        self._count(kept)

    def _count(self, kept: list[Tokens]) -> None:
        self._sequences += len(kept)
        self._tokens += sum(tokens.size for tokens in kept)
        self._longest = max(self._longest, *(tokens.longest for tokens in kept))
        self._cut += sum(tokens.longest > tokens.size for tokens in kept)
        self._cut_tokens += sum(tokens.longest - tokens.size for tokens in kept)

    def _card(self, folder: Path) -> DataCard:
        job = self._job
        if job.task == "classification":
            self._classes.check_number(job.rows.name)
            self._writer.rewrite("classes", self._classes.final)
        assert self._pieces.layout is not None
        sources = self._writer.lengths("offsets")
        targets = self._writer.lengths("target_offsets") if job.task == "seq2seq" else np.zeros_like(sources)
        return DataCard(
            source=job.rows.name,
            fingerprint=folder.name,
            folder=str(folder),
            task=job.task,
            columns=self._pieces.layout.name,
            tokenizer=job.encoder.name,
            max_length=job.max_length,
            target_length=job.target_length,
            sequences=self._sequences,
            tokens=self._tokens,
            supervised_tokens=self._learnt,
            longest_tokens=self._longest,
            cut=self._cut,
            cut_tokens=self._cut_tokens,
            skipped=self._bad.count,
            bad_rows=tuple(self._bad.first),
            labels=self._classes.names,
            lengths=Lengths(job.rows.name, sources, targets, job.encoder.name, exact=True).histogram(),
        )


def _mask(tokens: Tokens) -> Any:
    mask = np.zeros(len(tokens.ids), np.bool_)
    for start, end in tokens.learnt:
        mask[start:end] = True
    return mask


def _chunks(pieces: Iterable[tuple[Found, Piece | str]]) -> Iterator[Chunk]:
    """By characters and by rows: a row may be a word or a book."""
    chunk: Chunk = []
    characters = 0
    for found, piece in pieces:
        # The row itself is no longer needed.
        chunk.append((found._replace(row=None), piece))
        characters += piece.characters if isinstance(piece, Piece) else 0
        if characters >= _CHARACTERS_AT_ONCE or len(chunk) >= _ROWS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _reported(chunks: Iterator[Chunk], rows: Rows, progress: Progress | None) -> Iterator[Chunk]:
    """The same, and a few times a second a word on how far one has come."""
    told = time.monotonic()
    for chunk in chunks:
        yield chunk
        if progress is not None and time.monotonic() - told >= _PROGRESS_SECONDS:
            told = time.monotonic()
            progress(rows.done_bytes, rows.total_bytes)
    if progress is not None:
        progress(rows.total_bytes, rows.total_bytes)
