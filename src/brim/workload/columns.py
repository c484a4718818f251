"""What the columns of a data set mean: which text the model is given, and which it learns to write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Message = dict[str, str]
"""`role` and `content`, whatever the data set calls them."""


@dataclass(frozen=True)
class Example:
    """The text of one row."""

    source: str
    """What the model is given; all of the text where nothing tells what it is to learn."""
    target: str = ""

    @property
    def text(self) -> str:
        """Source and target as one sequence, as a decoder-only model reads it."""
        return "\n".join(part for part in (self.source, self.target) if part)


@dataclass(frozen=True)
class Layout:
    """One set of columns that is understood."""

    source: tuple[str, ...]
    target: str | None = None
    optional: tuple[str, ...] = ()
    """Columns of the source that a row may lack."""
    is_chat: bool = False
    """Whether the source is a list of messages: the last one is the target if the assistant wrote it."""

    @property
    def name(self) -> str:
        """The columns, as a person writes them."""
        names = [f"[{name}]" if name in self.optional else name for name in self.source]
        return "/".join([*names, *([self.target] if self.target else [])])

    @property
    def has_target(self) -> bool:
        """Whether rows tell what is to be learnt apart from what is given."""
        return self.is_chat or self.target is not None

    @staticmethod
    def of(row: Mapping[str, Any]) -> Layout:
        """The first set of columns that this row has."""
        for layout in _LAYOUTS:
            if layout.fits(row):
                return layout
        text = _("The columns {found} are none that brim understands. It understands {known}.")
        known = ", ".join(layout.name for layout in _LAYOUTS)
        raise UsageError(text.format(found=", ".join(map(str, row)) or _("(none)"), known=known), hint=_("Rename the columns."))

    def parts(self, row: Mapping[str, Any]) -> Example:
        """The text of one row. No chat template is applied: that is the tokenizer's business."""
        if self.is_chat:
            return _last_is_target(self.messages(row))
        source = "\n".join(text for text in (self._text(row, name) for name in self.source) if text)
        return Example(source, self._text(row, self.target) if self.target else "")

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The messages of a row of a chat, with the roles `system`, `user`, `assistant`."""
        (name,) = self.source
        value = row.get(name)
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise UsageError(_("The column {name} holds no list of messages.").format(name=name))
        return [_message(message, name) for message in value]

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether this row has the columns."""
        needed = [name for name in (*self.source, self.target) if name is not None and name not in self.optional]
        return all(name in row for name in needed)

    def _text(self, row: Mapping[str, Any], name: str) -> str:
        if name not in row and name not in self.optional:
            raise UsageError(_("The column {name} is missing here, and the first row has it.").format(name=name))
        return _text_of(row.get(name), name)


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

_ROLES: Final = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


def _message(message: Mapping[str, Any], column: str) -> Message:
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise UsageError(_("A message in the column {name} has neither role nor from.").format(name=column))
    return {"role": _ROLES.get(role, role), "content": _text_of(_content(message), column)}


def _last_is_target(messages: list[Message]) -> Example:
    given = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    return Example(_joined(given), _joined(messages[len(given) :]))


def _joined(messages: Iterable[Message]) -> str:
    return "\n".join(message["content"] for message in messages if message["content"])


def _text_of(value: Any, column: str) -> str:
    """Text, a number or nothing; or a list, as TRL and the Hub have it: messages, or the parts of one (a picture has no text)."""
    if value is None:
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
