"""Which Python a file needs that the running one cannot parse.

The newer constructs are rewritten to older ones line by line. If the file parses then, they were the only reason. A file that does not
parse even so is not valid in any Python that is known here.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import dataclass, field
from typing import Final

_START: Final = re.compile(r"(?P<prefix>[A-Za-z]{0,3})(?P<quote>'''|\"\"\"|'|\")")
_TYPE_ALIAS: Final = re.compile(r"^(\s*)type\s+(\w+)\s*(\[.*?\])?\s*=(?!=)", re.MULTILINE)
_GENERIC: Final = re.compile(r"^(\s*(?:async\s+def|def|class)\s+\w+)\s*\[", re.MULTILINE)
_BARE_EXCEPT: Final = re.compile(r"^(\s*except)\s+([\w.]+(?:\s*,\s*[\w.]+)+)\s*:", re.MULTILINE)
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
Version = tuple[int, int]


def needed_version(text: str) -> Version | None:
    """The lowest Python version that can parse the text; None if the running one can, or none is known that could."""
    running = sys.version_info[:2]
    rewriter = _Rewriter(text)
    rewriter.run()
    if rewriter.is_unclosed or not rewriter.needed or max(rewriter.needed) <= running or not _parses(rewriter.result):
        return None
    return max(rewriter.needed)


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@dataclass
class _Rewriter:
    """A text without newer syntax, with the same number of lines."""

    text: str
    result: str = ""
    needed: set[Version] = field(default_factory=set)
    is_unclosed: bool = False
    """Whether a string has no end."""

    def run(self) -> None:
        """Replace template strings and nested f-strings first: they may hold anything."""
        text = self._without_strings()
        text = self._replaced(_TYPE_ALIAS, r"\1\2 =", text, (3, 12))
        text = self._without_parameters(text)
        self.result = self._replaced(_BARE_EXCEPT, r"\1 (\2):", text, (3, 14))

    def _replaced(self, pattern: re.Pattern[str], new: str, text: str, version: Version) -> str:
        made, count = pattern.subn(new, text)
        if count:
            self.needed.add(version)
        return made

    def _without_strings(self) -> str:
        """The text with every string replaced by an empty one; those that need a newer Python are noted."""
        parts, place = [], 0
        while place < len(self.text):
            letter = self.text[place]
            if letter == "#":
                place = self._line_end(place)
                continue
            match = (
                _START.match(self.text, place)
                if letter in "'\"" or (letter.isalpha() and not self._is_inside_word(place))
                else None
            )
            if match is None:
                parts.append(letter)
                place += 1
                continue
            end = self._string_end(match)
            whole = self.text[place:end]
            self.is_unclosed |= len(whole) < len(match[0]) + len(match["quote"]) or not whole.endswith(match["quote"])
            if set(match["prefix"].lower()) & set("ft") and not _parses(whole):
                self.needed.add((3, 14) if "t" in match["prefix"].lower() else (3, 12))
            prefix = "b" if "b" in match["prefix"].lower() else ""
            lines = whole.count("\n")
            parts.append(f'{prefix}"""' + "\n" * lines + '"""' if lines else f'{prefix}""')
            place = end
        return "".join(parts)

    def _is_inside_word(self, place: int) -> bool:
        return place > 0 and (self.text[place - 1].isalnum() or self.text[place - 1] == "_")

    def _line_end(self, place: int) -> int:
        end = self.text.find("\n", place)
        return len(self.text) if end < 0 else end

    def _string_end(self, start: re.Match[str]) -> int:
        """Where a string ends; of an f-string with all that its braces hold."""
        quote, prefix = start["quote"], start["prefix"].lower()
        is_formatted = "f" in prefix or "t" in prefix
        place = start.end()
        while place < len(self.text):
            if self.text.startswith(quote, place):
                return place + len(quote)
            letter = self.text[place]
            if letter == "\\":
                place += 2
            elif is_formatted and letter == "{":
                place = place + 2 if self.text.startswith("{{", place) else self._field_end(place + 1, quote)
            elif letter == "\n" and len(quote) == 1:
                return place
            else:
                place += 1
        return len(self.text)

    def _field_end(self, place: int, quote: str) -> int:
        """Where `{...}` of an f-string ends: its expression, and the format behind a colon."""
        depth = 0
        while place < len(self.text):
            letter = self.text[place]
            match = (
                _START.match(self.text, place)
                if letter in "'\"" or (letter.isalpha() and not self._is_inside_word(place))
                else None
            )
            if match is not None:
                place = self._string_end(match)
            elif letter == "#":
                place = self._line_end(place)
            elif letter in "([{":
                depth, place = depth + 1, place + 1
            elif letter == "}" and depth == 0:
                return place + 1
            elif letter in ")]}":
                depth, place = depth - 1, place + 1
            elif letter == ":" and depth == 0:
                return self._format_end(place + 1, quote)
            else:
                place += 1
        return place

    def _format_end(self, place: int, quote: str) -> int:
        while place < len(self.text) and not self.text.startswith(quote, place):
            if self.text[place] == "}":
                return place + 1
            place = self._field_end(place + 1, quote) if self.text[place] == "{" else place + 1
        return place

    def _without_parameters(self, text: str) -> str:
        """`def f[T](x)` and `class A[T]` without what stands in the brackets."""
        parts, place = [], 0
        for match in _GENERIC.finditer(text):
            end = _bracket_end(text, match.end() - 1)
            if match.start() < place or end is None:
                continue
            inside = text[match.end() : end - 1]
            self.needed.add((3, 13) if "=" in inside else (3, 12))
            parts += [text[place : match.end() - 1], "\\\n" * inside.count("\n")]
            place = end
        return "".join([*parts, text[place:]])


def _bracket_end(text: str, start: int) -> int | None:
    """Behind the bracket that closes the one at `start`."""
    waiting: list[str] = []
    for place in range(start, len(text)):
        letter = text[place]
        if letter in _CLOSING:
            waiting.append(_CLOSING[letter])
        elif waiting and letter == waiting[-1]:
            waiting.pop()
            if not waiting:
                return place + 1
    return None
