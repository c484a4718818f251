"""Chats, as the tokenizer's template writes them, and where in that text the assistant speaks.

A template writes a chat from its beginning. So the text of the first messages, with the template's own invitation to answer, is the
beginning of the text of all; where it ends, the answer begins. Templates that write earlier messages otherwise once later ones follow
(thoughts that are left out) break this rule. They may mark the answers themselves. If they do not, the chat is written once more with
stand-ins for the answers: what stands around these stands around the answers too. A chat in which not even this finds them is a bad row,
and a template for which that holds of every chat can only have all its tokens learnt.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from brim.errors import UsageError
from brim.locale import _
from brim.trainer.data.pieces import BadRowError
from brim.workload.chats import THOUGHTS_END, ChatRenderer, TemplateRefusalError, is_open as is_open_chat, spoken

if TYPE_CHECKING:
    from brim.trainer.data.encoding import Span
    from brim.workload.columns import Message

_STAND_IN: Final = "\ue0b1{number}\ue0b2"
"""For an answer: characters that no data set has, and that no template changes."""
_HOPELESS: Final = 100
"""Chats in which no answer was found, before any in which one was: nobody waits for the rest."""
_MARK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A chat as the model reads it."""

    text: str
    answers: list[Span]
    """From where to where in the text the assistant speaks."""
    is_open: bool = False
    """Whether the chat ends with an answer and nothing tells that it has ended."""


class ChatTemplate:
    """The template of one tokenizer."""

    def __init__(self, tokenizer: Any, name: str, *, learns_all: bool) -> None:
        self._renderer = ChatRenderer(tokenizer, name)
        self._name = name
        self._learns_all = learns_all
        self._has_marks = (
            tokenizer.is_fast and isinstance(tokenizer.chat_template, str) and _MARK.search(tokenizer.chat_template) is not None
        )
        self._understood = self._not_understood = 0

    def render(self, messages: list[Message]) -> Rendered:
        """The text of a chat. Raises BadRowError where the template refuses it, or does not let its answers be found."""
        try:
            text = self._write(messages)
        except TemplateRefusalError as error:
            why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise BadRowError(_("the chat template refuses the messages: {why}").format(why=why)) from error
        is_open = is_open_chat(messages[-1], text)
        if self._learns_all:
            return Rendered(text, [(0, len(text))], is_open=is_open)
        answers = self._answers(messages, text)
        if answers is None and self._has_marks:
            return Rendered(*self._renderer.render_marked(messages), is_open=is_open)
        answers = self._between_stand_ins(messages, text) if answers is None else answers
        if answers is None:
            self._not_understood += 1
            if self._not_understood >= _HOPELESS:
                self.finish()
            raise BadRowError(_("the chat template does not let the answers be found in its text"))
        self._understood += 1
        return Rendered(text, answers, is_open=is_open)

    def finish(self) -> None:
        """All chats were rendered. Raises UsageError where answers could be found in none of them."""
        self._renderer.close()
        if self._not_understood and not self._understood:
            raise UsageError(
                _("The chat template of {name} does not let answers be told from questions.").format(name=self._name),
                hint=_("Learn all tokens with --loss-on all, or put generation marks around the answers in the template."),
            )

    def _write(self, messages: list[Message], *, invite: bool = False) -> str:
        return self._renderer.render(messages, invite=invite)

    def _answers(self, messages: list[Message], text: str) -> list[Span] | None:
        """None where the text of the first messages is not the beginning of the text of all."""
        found: list[Span] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                before = self._write(messages[:place], invite=True) if place else self._opening(messages[:1], text)
                so_far = self._write(messages[: place + 1]) if place + 1 < len(messages) else text
            except TemplateRefusalError:
                return None
            if not (text.startswith(so_far) and so_far.startswith(before)):
                return None
            found.append((len(before), len(so_far)))
        return found

    def _between_stand_ins(self, messages: list[Message], text: str) -> list[Span] | None:
        """None where what stands around the stand-ins does not stand in the text, in the same order."""
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        marks = {place: _STAND_IN.format(number=place) for place in places}
        others = [_standing_in(message, marks[place]) if place in marks else message for place, message in enumerate(messages)]
        try:
            parts = _parts(self._write(others), list(marks.values()))
            ends = [self._write(others[: place + 1]).partition(marks[place])[2] for place in places]
        except TemplateRefusalError:
            return None
        if parts is None or not text.startswith(parts[0]):
            return None
        invitation = self._invitation(others)
        found: list[Span] = []
        done, at = 0, len(parts[0])
        for place, after, end in zip(places, parts[1:], ends, strict=True):
            close = _found(text, at, after, spoken(messages[place]), is_last=place == places[-1])
            if close is None:
                return None
            # Thoughts that the template writes before an answer are the assistant's too: all that follows the invitation.
            before, invited, _thoughts = text[done:at].rpartition(invitation) if invitation else ("", "", "")
            start = done + len(before) + len(invited) if invited else at
            done = len(text) if place + 1 == len(messages) else close + _common(after, end)
            found.append((start, done))
            at = close + len(after)
        return found

    def _invitation(self, messages: list[Message]) -> str:
        """What the template writes where an answer is to begin; nothing where it does not say."""
        place = next((place for place, message in enumerate(messages) if place and message["role"] == "assistant"), 0)
        try:
            return self._write(messages[:place], invite=True).removeprefix(self._write(messages[:place])) if place else ""
        except TemplateRefusalError:
            return ""

    def _opening(self, first: list[Message], text: str) -> str:
        """What stands before an answer that nobody asked for: up to and with the invitation."""
        invitation = self._write(first, invite=True).removeprefix(self._write(first))
        return text[: text.find(invitation) + len(invitation)] if invitation in text else text[:0]


def _standing_in(message: Message, mark: str) -> Message:
    """The same message with other words; thoughts stay, for a template looks for them."""
    thoughts, end, spoken = str(message["content"]).rpartition(THOUGHTS_END)
    blanks = spoken[: len(spoken) - len(spoken.lstrip())]
    return {**message, "content": f"{thoughts}{end}{blanks}{mark}" if end else mark}


def _parts(text: str, marks: list[str]) -> list[str] | None:
    """What stands around the marks; None unless each stands there once, in this order."""
    parts: list[str] = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        part, _mark, text = text.partition(mark)
        parts.append(part)
    return [*parts, text]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _found(text: str, start: int, after: str, spoken: str, *, is_last: bool) -> int | None:
    """Where the answer ends that begins here: where what follows it begins."""
    if is_last:
        end = len(text) - len(after)
        return end if text.endswith(after) and end >= start else None
    # An answer may hold what follows it; its own words are looked for first.
    own = text.find(spoken, start)
    end = text.find(after, own + len(spoken) if own >= 0 else start)
    end = text.find(after, start) if end < 0 else end
    return end if end >= start and after else None
