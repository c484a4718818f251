"""Rows to tokens, once: read, checked, tokenised and cut into a memory-mapped folder of the cache, found again by its fingerprint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.locale import _, sentences
from brim.machine.host import cache_folder
from brim.trainer.data.bad import listed, too_many
from brim.trainer.data.build import Job, build
from brim.trainer.data.classes import are_numbers
from brim.trainer.data.encoding import Encoder
from brim.trainer.data.fingerprint import fingerprint
from brim.trainer.data.pieces import Pieces
from brim.trainer.data.store import stored
from brim.workload.reading import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from brim.records.runs import DataCard, LossOn
    from brim.trainer.data.build import Progress
    from brim.workload.reading import Given
    from brim.workload.words import Task

_MOST_KINDS: Final = 8
_CHATS: Final = frozenset({"messages", "conversations", "conversation"})


def prepare_data(
    data: Given,
    *,
    tokenizer: Any,
    tokenizer_name: str,
    task: Task,
    task_is_given: bool = True,
    columns: Mapping[str, str] | None = None,
    max_length: int,
    target_length: int | None = None,
    loss_on: LossOn = "answer",
    max_bad: int = 0,
    labels: Sequence[str] = (),
    model_labels: Sequence[str] = (),
    vocabulary: int | None = None,
    cache: Path | None = None,
    say: Callable[[str], None],
    progress: Progress | None = None,
) -> DataCard:
    """The tokens of a data set, from the cache if they are there. Raises one UsageError if there are more bad rows than `max_bad`.

    `task_is_given`: whether a person chose the task; where a model's own task leaves a column with classes unread, it is asked for.
    `labels`: the classes, where they are known (evaluation). `model_labels`: those that the model's head already tells apart
    (`classes.labels_of`): where they are the data's, they keep their numbers. `vocabulary`: words that the model knows. `cache`: the
    folder in which the folders of tokens lie, instead of brim's own. `progress` gets the bytes that were read and those that there are.
    """
    job = Job(
        rows=Rows(data),
        encoder=Encoder(tokenizer, tokenizer_name, vocabulary),
        task=task,
        columns=dict(columns or {}),
        max_length=max_length,
        target_length=(target_length or max_length) if task == "seq2seq" else None,
        loss_on=loss_on,
        labels=tuple(labels),
        model_labels=() if labels else tuple(model_labels),
        task_is_given=task_is_given,
    )
    with job.encoder.ready():
        if task != "classification":
            job.encoder.check_end()
        name = fingerprint(job.rows, job.encoder, job.settings)
        folder = ((cache_folder() / "data") if cache is None else Path(cache)).absolute() / name
        kept = _kept(folder, job)
        if kept is not None and not task_is_given:
            # Tokens in the cache may have been made when the task was given.
            next(iter(Pieces(job.rows, task=task, columns=job.columns, task_is_given=False)))
        card = build(folder, job, max_bad, progress) if kept is None else kept
    if card.skipped > max_bad:
        raise too_many(job.rows.name, card.bad_rows, card.skipped, max_bad)
    notes = (*card.notes, *_notes(card, job.encoder))
    card = dataclasses.replace(card, source=job.rows.name, folder=str(folder), tokenizer=tokenizer_name, notes=notes)
    for sentence in _told(card, job.rows, is_new=kept is None):
        say(sentence)
    return card


def _kept(folder: Path, job: Job) -> DataCard | None:
    """What is in the cache. Bad rows are told by the file's name: under another name they are looked for again."""
    card = stored(folder)
    names = [Path(source).name for source in job.rows.sources]
    is_named_so = card is not None and (card.source == job.rows.name or [Path(card.source).name] == names)
    return None if card is not None and card.skipped and not is_named_so else card


def _notes(card: DataCard, encoder: Encoder) -> Iterator[str]:
    if encoder.end is None and (card.task == "causal-lm" or (card.task == "seq2seq" and not encoder.target_trailing)):
        yield _("The tokenizer has no end token, so the model does not learn where an answer ends.")
    if card.task == "causal-lm" and card.columns in _CHATS and not getattr(encoder.tokenizer, "chat_template", None):
        yield _(
            "The tokenizer has no chat template: messages are joined by line breaks, without their roles, and the last answer is learnt."
        )
    if card.labels and are_numbers(card.labels) and card.labels != tuple(map(str, range(len(card.labels)))):
        numbers = ", ".join(f"{name} → {number}" for number, name in enumerate(card.labels[:5]))
        yield _("The classes are numbered from 0 without gaps: {numbers}.").format(numbers=numbers)
    if card.is_much_cut:
        text = _(
            "{cut:,} of {sequences:,} sequences are too long and are cut: {lost:,} of {all:,} tokens ({share:.1%}) are not trained on. "
            "The longest sequence has {longest:,} tokens, and --seq-len is {allowed:,}."
        )
        yield text.format(
            cut=card.cut, sequences=card.sequences, lost=card.cut_tokens, all=card.tokens + card.cut_tokens,
            share=card.cut_share, longest=card.longest_tokens, allowed=card.max_length,
        )  # fmt: skip


def _told(card: DataCard, rows: Rows, *, is_new: bool) -> Iterator[str]:
    text = (
        _("{path}: {sequences:,} sequences, {tokens:,} tokens in total (columns: {columns}).")
        if is_new
        else _("{path}: {sequences:,} sequences, {tokens:,} tokens in total (columns: {columns}), read from the cache.")
    )
    line = text.format(path=card.source, sequences=card.sequences, tokens=card.tokens, columns=card.columns)
    yield sentences(line, *_of_folder(rows))
    yield from _of_documents(card, rows)
    if card.skipped:
        text = _("Bad rows that are left out: {count:,}.").format(count=card.skipped)
        yield "\n".join([text, *listed(card.bad_rows, card.skipped)])


def _of_documents(card: DataCard, rows: Rows) -> Iterator[str]:
    """By which rule text was parted, and what became of long documents."""
    rules = {
        "text_lines": _("{path}: each line is a document, for no blank lines stand between them."),
        "text_paragraphs": _("{path}: documents have blank lines between them."),
        "text_file": _("{path}: a document."),
    }
    told = [(file, rules[kind]) for file, kind in zip(rows.files, rows.kinds, strict=True) if kind in rules]
    for file, text in told[:_MOST_KINDS]:
        yield text.format(path=file)
    if len(told) > _MOST_KINDS:
        yield _("and {count:,} more").format(count=len(told) - _MOST_KINDS)
    if told and card.task == "causal-lm":
        text = _(
            "Documents are read in blocks of up to {length:,} tokens, so nothing is cut off; different documents are never joined."
        )
        yield text.format(length=card.max_length)


def _of_folder(rows: Rows) -> Iterator[str]:
    """What of a folder was read, and what was not."""
    if len(rows.files) > len(rows.sources):
        yield _("Files that were read: {count:,}.").format(count=len(rows.files))
    if rows.passed_over:
        kinds = ", ".join(rows.passed_over[:_MOST_KINDS]) + (", ..." if len(rows.passed_over) > _MOST_KINDS else "")
        yield _("Passed over in the folder: {kinds}.").format(kinds=kinds)
