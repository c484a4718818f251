"""Rows as they are understood: the text, the messages or the class that a row gives to learn from, or why it gives nothing.

One set of columns holds for all rows. The first row that is good by it decides which; a bad first row does not.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from brim.errors import UsageError
from brim.locale import _
from brim.workload.columns import Layout, is_no_number, listed, no_such_column
from brim.workload.reading import no_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from brim.workload.columns import Message
    from brim.workload.formats import DocumentPart, Found
    from brim.workload.reading import Row, Rows
    from brim.workload.words import Task

_ROWS_TO_DECIDE_BY: Final = 100
_MOST_HELD: Final = 10_000
_MOST_HELD_BYTES: Final = 8 << 20
_ASSISTANT: Final = "assistant"
_NO_TOOLS: Final[tuple[Any, ...]] = (None, "", "[]", "null", [], {})


class BadRowError(ValueError):
    """Nothing can be learnt from this row; the text is the end of a sentence that begins with its place."""


class Piece(NamedTuple):
    """What one row gives to learn from."""

    source: str
    target: str = ""
    """Empty where nothing tells what is to be learnt from what is given."""
    messages: list[Message] | None = None
    """Of a chat; source and target are then the same chat as plain text."""
    label: str = ""
    """Its class, by name."""
    document: DocumentPart = ""
    """Whether it is plain text: a document, or its end; or a part of one."""

    @property
    def characters(self) -> int:
        """How much there is to tokenise."""
        return len(self.source) + len(self.target)


class Pieces:
    """The rows of a file or folder, each with what it gives, or with why it is bad."""

    def __init__(self, rows: Rows, *, task: Task | None, columns: Mapping[str, str] | None, task_is_given: bool = True) -> None:
        self._rows = rows
        self._task = task
        self._task_is_given = task_is_given
        self._named = Layout.named(columns, task) if columns else None
        self.layout: Layout | None = None
        """The columns that were understood; None before the first row."""
        self.unread_class: str | None = None
        """A column with classes beside the text, which is not read: the model learns the text."""

    def __iter__(self) -> Iterator[tuple[Found, Piece | str]]:
        rows = iter(self._rows)
        held = self._first(rows)
        if not held:
            raise no_rows(self._rows.name)
        self.layout = self._decided(held) if any(found.row is not None for found in held) else None
        for found in itertools.chain(held, rows):
            if self.layout is None and found.row is not None:
                self.layout = self._decided([found])
            yield found, self._piece(found)

    def _piece(self, found: Found) -> Piece | str:
        if found.fault or found.row is None:
            return found.fault
        assert self.layout is not None
        try:
            return piece_of(found.row, self.layout, self._task)._replace(document=found.document)
        except BadRowError as error:
            return str(error)

    def _first(self, rows: Iterator[Found]) -> list[Found]:
        """As many as decide what the columns mean, within reason. Rows that cannot be read decide nothing, and take little room."""
        held: list[Found] = []
        readable = 0
        while (
            readable < _ROWS_TO_DECIDE_BY
            and len(held) < _MOST_HELD
            and (not readable or self._rows.read_bytes < _MOST_HELD_BYTES)
        ):
            found = next(rows, None)
            if found is None:
                break
            held.append(found)
            readable += found.row is not None
        return held

    def _decided(self, held: list[Found]) -> Layout:
        """The columns of the first good row; where none is good, of the first that has columns that are understood."""
        fitting: Layout | None = None
        refused: tuple[Found, UsageError] | None = None
        for found in held:
            if found.row is None:
                continue
            try:
                layout = self._layout_of(found.row)
                fitting = fitting or layout
                piece_of(found.row, layout, self._task)
            except UsageError as error:
                refused = refused or (found, error)
            except BadRowError:
                continue
            else:
                if self._task == "causal-lm" and self._named is None:
                    # The class of the first row may be empty.
                    rows = (each.row for each in held if each.row is not None)
                    labelled = next((row for row in rows if layout.unread_class(row) is not None), found.row)
                    if not self._task_is_given:
                        layout.refuse_unread_class(labelled, self._rows.name)
                    self.unread_class = layout.unread_class(labelled)
                return self._suitable(layout, held)
        if fitting is None:
            raise self._not_understood(held, refused)
        return self._suitable(fitting, held)

    def _layout_of(self, row: Row) -> Layout:
        if self._named is None:
            return Layout.of(row, self._task)
        if self._named.missing(row) is not None:
            raise UsageError(_("The columns that were named are not all here."))
        return self._named.suited_to(row)

    def _suitable(self, layout: Layout, held: list[Found]) -> Layout:
        if self._task == "seq2seq" and not layout.has_target:
            text = _("A seq2seq model needs a source and a target, and there is only {name}.").format(name=layout.name)
            hint = _(
                "Give rows that have both, in JSON lines or CSV, and name the columns: --columns source=question,target=answer."
            )
            raise UsageError(_("{place}: {message}").format(place=_first_place(held), message=text), hint=hint)
        return layout

    def _not_understood(self, held: list[Found], refused: tuple[Found, UsageError] | None) -> UsageError:
        seen = dict.fromkeys(name for found in held for name in found.row or ())
        if self._named is not None:
            return no_such_column(_first_place(held), self._named.missing(seen) or self._named.name, seen)
        assert refused is not None
        found, error = refused
        text = _("{place}: {message}").format(place=found.place(), message=error.message)
        example = "text=review,label=stars" if self._task == "classification" else "source=question,target=answer"
        return UsageError(
            text, hint=_("Name the columns, for example --columns {example}, or rename them.").format(example=example)
        )


def _first_place(held: list[Found]) -> str:
    """Of the first row that could be read: there the columns can be seen."""
    return next(found for found in held if found.row is not None).place()


def piece_of(row: Row, layout: Layout, task: Task | None) -> Piece:
    """What this row gives. Raises BadRowError where that is nothing."""
    for name in layout.needed:
        if name not in row:
            raise BadRowError(_("the column {name} is missing; the row has {columns}").format(name=name, columns=listed(row)))
        if row[name] is None:
            raise BadRowError(_("the column {name} is null").format(name=name))
        if is_no_number(row[name]) and name != layout.label:
            text = _("The column {name} holds no text: {value}.").format(name=name, value=json.dumps(row[name]))
            raise BadRowError(_as_ending(text))
    try:
        return _chat(row, layout, task) if layout.is_chat else _plain(row, layout)
    except UsageError as error:
        raise BadRowError(_as_ending(error.message)) from error


def _as_ending(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].rstrip(".。")


def _plain(row: Row, layout: Layout) -> Piece:
    source, target = (whole_text(text) for text in (layout.parts(row).source, layout.parts(row).target))
    is_empty = not source.strip()
    if layout.target is None:
        if is_empty:
            raise BadRowError(_("the text is empty"))
        return Piece(source, label=_label_of(row[layout.label]) if layout.label is not None else "")
    if not target.strip():
        raise BadRowError(_("source and target are empty") if is_empty else _("the answer is empty"))
    return Piece(source, target)


def _label_of(value: Any) -> str:
    """A class by its name. Numbers with nothing behind the point are whole: tables have them where a cell was empty."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int) or (isinstance(value, str) and value.strip().lower() == "nan"):
        shown = json.dumps(value, ensure_ascii=False, default=str)[:60]
        raise BadRowError(_("a class must be a word or a whole number, and this is {value}").format(value=shown))
    name = whole_text(str(value)).strip()
    if not name:
        raise BadRowError(_("the class is empty"))
    return plain_name(name)


def plain_name(name: str) -> str:
    """One spelling for what tables write in several ways: true, True and TRUE."""
    return name.lower() if name.lower() in {"true", "false"} else name


def _chat(row: Row, layout: Layout, task: Task | None) -> Piece:
    messages = layout.messages(row)
    if not messages:
        raise BadRowError(_("there are no messages"))
    if any(message.get("tool_calls") or message.get("function_call") for message in messages):
        raise BadRowError(_("a message calls a tool, and brim does not train on these"))
    if row.get("tools") not in _NO_TOOLS:
        raise BadRowError(_("the row offers tools, and brim does not train on these"))
    for message in messages:
        message |= {name: whole_text(value) for name, value in message.items() if isinstance(value, str)}
    answers = [place for place, message in enumerate(messages) if message["role"] == _ASSISTANT]
    if not answers:
        raise BadRowError(_("no message is from the assistant"))
    if not any(messages[place]["content"].strip() for place in answers):
        raise BadRowError(_("the answer is empty"))
    # As plain text, the last answer is what is learnt, and nothing can be learnt from what follows it.
    last = answers[-1]
    source = "\n".join(message["content"] for message in messages[:last] if message["content"])
    target = messages[last]["content"]
    if task == "seq2seq" and not target.strip():
        raise BadRowError(_("the answer is empty"))
    return Piece(source, target, messages)


def whole_text(text: str) -> str:
    """Half of a surrogate pair is legal in JSON and in Python, and no text for a tokenizer."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
