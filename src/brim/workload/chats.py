"""What a tokenizer's chat template makes of messages, as far as counting and training must agree on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from brim.workload.columns import Message

THOUGHTS_END: Final = "</think>"


def refusals() -> tuple[type[Exception], ...]:
    """What a template raises when it is given messages that it was not written for."""
    import jinja2

    return (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def spoken(message: Message) -> str:
    """What is said aloud: without the thoughts before it."""
    return str(message["content"]).rpartition(THOUGHTS_END)[2].strip()


def is_open(last: Message, text: str) -> bool:
    """Whether a chat ends with an answer, and nothing in its text tells that it has ended: it then gets the end token."""
    answer = spoken(last)
    return last["role"] == "assistant" and bool(answer) and text.rstrip().endswith(answer)
