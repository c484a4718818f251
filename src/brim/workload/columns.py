"""What the columns of a data set mean: which text the model is given, and which it learns to write."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from brim.workload.words import Task

Message = dict[str, Any]
"""`role` and `content`, whatever the data set calls them, and what else it says of a message, for the chat template."""


@dataclass(frozen=True)
class Example:
    """The text of one row."""

    source: str
    """What the model is given; all of the text where nothing tells what it is to learn."""
    target: str = ""

    @property
    def pieces(self) -> tuple[str, ...]:
        """Source and target as a decoder-only model reads them, one behind the other: no token reaches from one into the other."""
        return (f"{self.source}\n", self.target) if self.source and self.target else (self.source or self.target,)

    @property
    def text(self) -> str:
        """Source and target as one text."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Layout:
    """One set of columns that is understood."""

    source: tuple[str, ...]
    target: str | None = None
    optional: tuple[str, ...] = ()
    """Columns of the source that a row may lack."""
    is_chat: bool = False
    """Whether the source is a list of messages: the last one is the target if the assistant wrote it. A target goes on with the list."""
    label: str | None = None
    """The column with the class, where rows are to be classified."""

    @property
    def name(self) -> str:
        """The columns, as a person writes them."""
        names = [f"[{name}]" if name in self.optional else name for name in self.source]
        return "/".join([*names, *(name for name in (self.target, self.label) if name is not None)])

    @property
    def has_target(self) -> bool:
        """Whether rows tell what is to be learnt apart from what is given."""
        return self.is_chat or self.target is not None

    @staticmethod
    def of(row: Mapping[str, Any], task: Task | None = None) -> Layout:
        """The first set of columns that this row has; for a classifier, of those that hold a class."""
        layouts = _LABELLED if task == "classification" else _LAYOUTS
        for layout in layouts:
            if layout.fits(row):
                return layout.suited_to(row)
        text = _("The columns {found} are none that brim understands. It understands {known}.")
        known = ", ".join(layout.name for layout in layouts)
        raise UsageError(text.format(found=listed(row), known=known), hint=_("Rename the columns."))

    @staticmethod
    def labelled(row: Mapping[str, Any]) -> Layout:
        """For a classifier; the usual columns where no row has a class, for then only the text counts."""
        return next((layout for layout in _LABELLED if layout.fits(row)), None) or Layout.of(row)

    @staticmethod
    def named(columns: Mapping[str, str], task: Task | None = None) -> Layout:
        """The columns that the user named, by what they mean: `{"prompt": "q", "response": "a"}`."""
        usual = _usual(columns, task)
        own = replace(
            usual,
            source=tuple(columns[name] for name in usual.source if name in columns),
            target=columns.get(usual.target or ""),
            label=columns.get(usual.label or ""),
        )
        return replace(own, optional=tuple(columns[name] for name in usual.optional if name in columns))

    def missing(self, row: Mapping[str, Any]) -> str | None:
        """The first column, of those that the user named, that this row does not have."""
        return next((name for name in (*self.source, *self.needed) if name not in row), None)

    def parts(self, row: Mapping[str, Any]) -> Example:
        """The text of one row. No chat template is applied: that is the tokenizer's business."""
        if self.is_chat:
            return _last_is_target(self.messages(row))
        source = "\n".join(text for text in (self._text(row, name) for name in self.source) if text)
        return Example(source, self._text(row, self.target) if self.target else "")

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The messages of a row of a chat, with the roles `system`, `user`, `assistant`."""
        found: list[Message] = []
        for name in self.needed:
            value = row.get(name)
            if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
                raise UsageError(_("The column {name} holds no list of messages.").format(name=name))
            found += [_message(message, name) for message in value]
        return found

    def refuse_unread_class(self, row: Mapping[str, Any], data: str) -> None:
        """A class beside a text, and nobody said which of both is to be learnt: no language model is trained in silence."""
        label = self.unread_class(row)
        if label is not None:
            text = _(
                "{data} has a text and a class in each row (columns {text}, {label}), and this model would learn the text alone."
            )
            raise UsageError(
                text.format(data=data, text=self.source[0], label=label),
                hint=_("Write --task classification to learn the class, or --task causal-lm to learn the text."),
            )

    def unread_class(self, row: Mapping[str, Any]) -> str | None:
        """The column with a class that this row has beside its text, where the text alone is read."""
        if self.has_target or self.label is not None:
            return None
        beside = [one.label for one in _LABELLED if one.source == self.source and one.label is not None]
        return next((name for name in beside if row.get(name) is not None), None)

    def suited_to(self, row: Mapping[str, Any]) -> Layout:
        """The same; a chat, where source and target are two parts of one, as TRL writes it."""
        is_chat = self.target is not None and all(holds_messages(row.get(name)) for name in self.needed)
        return replace(self, is_chat=True) if is_chat else self

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether this row has the columns."""
        return all(name in row for name in self.needed)

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return tuple(name for name in (*self.source, self.target, self.label) if name is not None and name not in self.optional)

    def _text(self, row: Mapping[str, Any], name: str) -> str:
        if name not in row and name not in self.optional:
            text = _("The column {name} is missing here, and the first row has it. There are the columns {found}.")
            raise UsageError(text.format(name=name, found=listed(row)))
        return _text_of(row.get(name), name)


def fits_itself(members: Mapping[str, Any]) -> bool:
    """Whether an object of JSON is a row, rather than something that holds rows. Of its lists, the first value is enough."""
    return any(
        layout.fits(members)
        and all(not isinstance(members[name], list) or holds_messages(members[name]) for name in layout.needed)
        for layout in _LAYOUTS
    )


def holds_messages(value: Any) -> bool:
    """Whether this is a list of messages, by its first one."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and not {"role", "from"}.isdisjoint(value[0])


def is_no_number(value: Any) -> bool:
    """NaN and the infinities: how tables write that a cell is empty."""
    return isinstance(value, float) and not math.isfinite(value)


_LAYOUTS: Final = (
    Layout(("messages",), is_chat=True),
    Layout(("conversations",), is_chat=True),
    Layout(("conversation",), is_chat=True),
    Layout(("instruction", "input"), "output", optional=("input",)),
    Layout(("instruction", "context"), "response", optional=("context",)),
    Layout(("prompt",), "response"),
    Layout(("prompt",), "completion"),
    Layout(("question", "context"), "answer", optional=("context",)),
    Layout(("source",), "target"),
    Layout(("input",), "output"),
    Layout(("text",)),
    Layout(("sentence",)),
)
"""In the order in which they are tried. A column `label` beside `text` is a class, not a text, and adds no tokens."""

_LABELLED: Final = tuple(
    Layout((text,), label=label) for text in ("text", "sentence") for label in ("label", "labels", "class", "category")
)
"""For classifiers, in the order in which they are tried."""

_NAMED: Final = (*_LAYOUTS, *_LABELLED, Layout(("source",), label="label"))
_SOURCES: Final = ("source", "prompt", "instruction", "question", "input")
_TARGETS: Final = ("target", "response", "completion", "output", "answer")
MEANINGS: Final = tuple(
    dict.fromkeys(name for layout in _NAMED for name in (*layout.source, layout.target, layout.label) if name)
)
"""What a column can be said to hold: all names that are understood by themselves."""
_MOST_LISTED: Final = 30

_OWN: Final = frozenset({"role", "from", "content", "value", "text"})
"""Keys of a message that are read here; others are the template's."""
_ROLES: Final = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


def _message(message: Mapping[str, Any], column: str) -> Message:
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise UsageError(_("A message in the column {name} has neither role nor from.").format(name=column))
    # Tables give every message all keys, with nothing in those that it does not have.
    others = {name: value for name, value in message.items() if name not in _OWN and value is not None}
    return {"role": _ROLES.get(role, role), "content": _text_of(_content(message), column), **others}


def _last_is_target(messages: list[Message]) -> Example:
    """The last answer is what is learnt, and nothing is learnt from what follows it."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return Example(_joined(messages))
    return Example(_joined(messages[: answers[-1]]), _joined([messages[answers[-1]]]))


def _joined(messages: Iterable[Message]) -> str:
    return "\n".join(message["content"] for message in messages if message["content"])


def _text_of(value: Any, column: str) -> str:
    """Text, a number or nothing; or a list, as TRL and the Hub have it: messages, or the parts of one (a picture has no text)."""
    if value is None or is_no_number(value):
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(part, str | dict) for part in value):
        texts = (part if isinstance(part, str) else _text_of(_content(part), column) for part in value)
        return "\n".join(text for text in texts if text)
    text = _("The column {name} holds no text: {value}.")
    raise UsageError(text.format(name=column, value=json.dumps(value, ensure_ascii=False, default=str)[:60]))


def _content(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in ("content", "value", "text") if name in part), None)


def _usual(columns: Mapping[str, str], task: Task | None) -> Layout:
    """The layout whose columns are called as the user calls his."""
    for meaning, own in columns.items():
        if meaning not in MEANINGS:
            text = _("A column cannot be named as {meaning!r}. brim knows {known}.")
            hint = _("Write what it means first: {own}={meaning}.") if own in MEANINGS else ""
            known = ", ".join(MEANINGS)
            raise UsageError(text.format(meaning=meaning, known=known), hint=hint.format(own=own, meaning=meaning) or None)
    _refuse_shared(columns)
    names = set(columns)
    found = next((layout for layout in _NAMED if layout.fits(columns) and names <= {*layout.source, *layout.needed}), None)
    if found is None and len(names) == 2 and len(names & set(_SOURCES)) == 1 and len(names & set(_TARGETS)) == 1:
        found = Layout(tuple(names & set(_SOURCES)), next(iter(names & set(_TARGETS))))
    if found is None:
        raise _incomplete(columns)
    if task is not None and (found.label is not None) != (task == "classification"):
        text = (
            _("A classifier needs a column with the class.")
            if task == "classification"
            else _("A column with a class is for classifiers, and the task is {task}.").format(task=task)
        )
        raise UsageError(text, hint=_("Name the text and the class: text=review,label=stars."))
    return found


def _refuse_shared(columns: Mapping[str, str]) -> None:
    """One column cannot be both what the model is given and what it learns."""
    for own in columns.values():
        meanings = [meaning for meaning, column in columns.items() if column == own]
        if len(meanings) > 1:
            text = _("--columns names the column {name!r} twice: as {meanings}.")
            raise UsageError(text.format(name=own, meanings=listed(meanings)), hint=_("Name another column for each of them."))


def _incomplete(columns: Mapping[str, str]) -> UsageError:
    """Of columns that are no layout: which one is missing, where the others tell."""
    given = ",".join(f"{meaning}={own}" for meaning, own in columns.items())
    names = set(columns)
    before = next((layout for layout in _NAMED if layout.target and names <= {*layout.source}), None)
    behind = next((layout for layout in _NAMED if len(names) == 1 and names <= {layout.target, layout.label}), None)
    if before is not None:
        text = _("--columns {given}: the column that the model learns to write is missing.")
        return UsageError(
            text.format(given=given), hint=_("Add it: --columns {more}.").format(more=f"{given},{before.target}=COLUMN")
        )
    if behind is not None:
        text = _("--columns {given}: the column with the input of the model is missing.")
        more = f"{behind.source[0]}=COLUMN,{given}"
        return UsageError(text.format(given=given), hint=_("Add it: --columns {more}.").format(more=more))
    text = _("--columns {given}: these meanings cannot be combined.")
    hint = _("Name messages alone, text alone, source and target, or text and label.")
    return UsageError(text.format(given=given), hint=hint)


def no_such_column(place: str, name: str, seen: Iterable[str]) -> UsageError:
    """A column that the user named, and no row has."""
    text = _("{place}: no row has the column {name!r}. There are the columns {seen}.")
    return UsageError(text.format(place=place, name=name, seen=listed(seen)))


def listed(names: Iterable[str]) -> str:
    """Names of columns, of which a file may have any number."""
    shown = list(map(str, itertools.islice(names, _MOST_LISTED + 1)))
    if len(shown) > _MOST_LISTED:
        shown[-1] = "..."
    return ", ".join(shown) or _("(none)")
