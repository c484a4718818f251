"""A JSON document that is larger than the memory, value by value.

`json` understands a document only when it has all of it. Here the text is read as far as the next value needs, that value is decoded, and
what came before is forgotten. So a list of rows costs as much memory as its longest row, and every row knows the line on which it begins.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from brim.locale import _
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONGEST_ROW_BYTES: Final = 16 << 20
"""Of a line, or of one value. A parser and a tokenizer need up to a hundred times the size of a text, so a larger one is refused."""
_BYTES_AT_ONCE: Final = 1 << 18
_LONGEST_WORD: Final = 16
"""No word or escape of JSON is longer: an error that stands further from the end of what was read is no matter of reading on."""
_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_NO_TEXT: Final = re.compile("[\udc80-\udcff]")
"""How Python writes a byte that is not UTF-8, when it is told to go on."""
_DECODE: Final = json.JSONDecoder().raw_decode


class DocumentError(ValueError):
    """This is not a JSON document, from this line on."""

    def __init__(self, line: int, why: str, *, is_text: bool = True, is_json: bool = True) -> None:
        super().__init__(why)
        self.line = line
        self.why = why
        self.is_text = is_text
        """False: not even UTF-8 text."""
        self.is_json = is_json
        """False: `why` is no error of a JSON parser, but a whole fault."""


class Value(NamedTuple):
    """One value of a document."""

    line: int
    """On which it begins."""
    value: Any
    is_text: bool
    """Whether all of it was UTF-8 text."""


class Document:
    """Where one stands in a document."""

    def __init__(self, stream: BinaryIO, count_bytes: Callable[[int], None] = lambda _bytes: None) -> None:
        self._stream = stream
        self._count_bytes = count_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._line = 1
        self._counted = 0
        self._is_text = True
        self._ended = False
        self.taken = 0
        """Characters of all values up to here."""
        self._more()
        if self._text.startswith("\ufeff"):
            self._at = self._counted = 1

    @property
    def line(self) -> int:
        """On which the next value begins."""
        self.peek()
        return self._line_of(self._at)

    def peek(self) -> str:
        """The next character that is no blank; nothing at the end."""
        while True:
            self._at = _end_of_blanks(self._text, self._at)
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, sign: str) -> bool:
        """Go past this sign, if it is the next one."""
        if self.peek() != sign:
            return False
        self._at += 1
        return True

    def expect(self, sign: str) -> None:
        """Go past this sign, which must be the next one."""
        if not self.take(sign):
            raise self._error(f"Expecting {sign!r} delimiter", self._at)

    def value(self) -> Value:
        """The next value, whole."""
        line = self.line
        while True:
            try:
                found, end = _DECODE(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error) or not self._more_of_value(line):
                    raise self._error(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                # A number of more digits than Python converts; lists in lists in lists.
                raise self._error(str(error).partition("\n")[0].rstrip("."), self._at) from error
            else:
                # A number may go on where the text that was read ends, behind a point or an exponent that says nothing yet.
                may_go_on = isinstance(found, int | float) and end + _LONGEST_WORD > len(self._text)
                if not may_go_on or not self._more_of_value(line):
                    break
        if end - self._at > LONGEST_ROW_BYTES:
            raise DocumentError(line, too_long(), is_json=False)
        start, self._at = self._at, end
        self.taken += end - start
        return Value(line, found, self._is_text or _NO_TEXT.search(self._text, start, end) is None)

    def elements(self) -> Iterator[Value]:
        """The values of the list that comes next."""
        self.expect("[")
        if self.take("]"):
            return
        while True:
            yield self.value()
            if self.take("]"):
                return
            self.expect(",")

    def names(self) -> Iterator[str]:
        """The names in the object that comes next. After each, the caller takes its value: `value` or `elements`."""
        self.expect("{")
        if self.take("}"):
            return
        while True:
            if self.peek() != '"':
                raise self._error("Expecting property name enclosed in double quotes", self._at)
            name = self.value().value
            self.expect(":")
            yield name
            if self.take("}"):
                return
            self.expect(",")

    def end(self) -> None:
        """Nothing may follow."""
        if self.peek():
            raise self._error("Extra data", self._at)

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the error may only come from the text not having been read on. A string cannot run over the end of its line."""
        return error.msg.startswith("Unterminated string") or error.pos + _LONGEST_WORD > len(self._text)

    def _more_of_value(self, line: int) -> bool:
        """Read on in a value that has begun."""
        if len(self._text) - self._at > LONGEST_ROW_BYTES:
            raise DocumentError(line, too_long(), is_json=False)
        return self._more()

    def _more(self) -> bool:
        """Read on, and forget what was taken. As much again as is held: so a long value is not looked at again and again."""
        if self._ended:
            return False
        raw = self._stream.read(max(_BYTES_AT_ONCE, len(self._text) - self._at))
        self._count_bytes(len(raw))
        self._ended = not raw
        self._line_of(self._at)
        self._text = self._text[self._at :] + self._decoded(raw)
        self._at = self._counted = 0
        return True

    def _decoded(self, raw: bytes) -> str:
        state = self._decoder.getstate()
        try:
            return self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError:
            self._is_text = False
            self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
            self._decoder.setstate(state)
            return self._decoder.decode(raw, final=not raw)

    def _line_of(self, place: int) -> int:
        """Lines are counted once: places are asked for in their order."""
        self._line += self._text.count("\n", self._counted, place)
        self._counted = place
        return self._line

    def _error(self, why: str, place: int) -> DocumentError:
        is_text = self._is_text or _NO_TEXT.search(self._text, self._at, place + 1) is None
        return DocumentError(self._line_of(place), why, is_text=is_text)


def too_long() -> str:
    """The fault of a line or value above the limit."""
    return _("longer than {size}, the largest row that brim reads").format(size=format_bytes(LONGEST_ROW_BYTES))


def _end_of_blanks(text: str, start: int) -> int:
    found = _BLANKS.match(text, start)
    assert found is not None
    return found.end()
