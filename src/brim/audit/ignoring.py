"""`# brim: ignore[rule]`: comments that suppress findings.

It counts on the line of the finding, on the first line of its statement, and on a line of its own above either. Only comments
count: the same words inside a string are a string.
"""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.rules import RULES, nearest_rules
from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from brim.audit.found import Found
    from brim.audit.source.module import Source

FILE_LINES: Final = 10
"""How far down `# brim: ignore-file` counts."""
_WORDS: Final = re.compile(
    r"#\s*brim:\s*ignore(?P<file>-file)?(?![\w-])\s*(?:(?P<open>\[)(?P<rules>[^\]]*)(?P<close>\])?)?", re.I
)
_HEREDOC: Final = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_LAYOUT: Final = frozenset({tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER})

Comment = tuple[int, str, bool]
"""Line from 1, text, and whether it has the line to itself."""


@dataclass
class Wishes:
    """What the comments of one file ask for. None in place of names: every rule."""

    everywhere: list[frozenset[str] | None] = field(default_factory=list)
    by_line: dict[int, list[frozenset[str] | None]] = field(default_factory=dict)
    own_lines: set[int] = field(default_factory=set)
    """Lines that hold nothing but a comment."""
    first_line: dict[int, int] = field(default_factory=dict)
    """Of a line inside a statement: the line that the statement begins in."""
    notes: list[str] = field(default_factory=list)

    def hold_back(self, rule: str, line: int) -> bool:
        """Whether a finding of this rule in this line is meant."""
        asked = list(self.everywhere)
        for begin in {line, self.first_line.get(line, line)}:
            asked += self.by_line.get(begin, [])
            above = begin - 1
            while above in self.own_lines:
                asked += self.by_line.get(above, [])
                above -= 1
        return any(names is None or rule in names for names in asked)


def hold_back(found: Iterable[Found], sources: Mapping[str, Source]) -> tuple[list[Found], int, list[str]]:
    """The findings that are left, how many were held back, and notes about comments that name no rule."""
    wishes = {file: wishes_of(source) for file, source in sources.items() if "brim:" in source.text.lower()}
    kept, count = [], 0
    for each in found:
        own = wishes.get(each.file)
        if own is not None and own.hold_back(each.rule, each.line):
            count += 1
        else:
            kept.append(each)
    return kept, count, [note for own in wishes.values() for note in own.notes]


def wishes_of(source: Source) -> Wishes:
    """Read the comments of a file."""
    wishes = Wishes()
    suffix = Path(source.file).suffix.lower()
    if suffix in {".py", ".pyw", ".ipynb"}:
        wishes.first_line = _first_lines(source.text)
    for line, text, is_alone in _READERS.get(suffix, _no_comments)(source.text):
        if is_alone:
            wishes.own_lines.add(line)
        for match in _WORDS.finditer(text):
            _take(match, line, source.file, wishes)
    return wishes


def _take(match: re.Match[str], line: int, file: str, wishes: Wishes) -> None:
    """One comment's wish, and a note where it says nothing that can be done."""
    if match["open"] and not match["close"]:
        text = _("{file}:{line}: `# brim: ignore[` has no closing bracket and is ignored.")
        wishes.notes.append(text.format(file=file, line=line))
        return
    names = (
        None if match["rules"] is None else frozenset(word.strip().lower() for word in match["rules"].split(",") if word.strip())
    )
    for name in sorted(names or ()):
        if name not in RULES:
            wishes.notes.append(_unknown(name, file, line))
    if match["file"]:
        if line <= FILE_LINES:
            wishes.everywhere.append(names)
        else:
            text = _("{file}:{line}: `# brim: ignore-file` is ignored below line {count}.")
            wishes.notes.append(text.format(file=file, line=line, count=FILE_LINES))
    else:
        wishes.by_line.setdefault(line, []).append(names)


def _unknown(name: str, file: str, line: int) -> str:
    text = _("{file}:{line}: unknown rule {name!r} in a comment.").format(file=file, line=line, name=name)
    nearest = nearest_rules(name)
    return sentences(text, _("Nearest: {names}.").format(names=", ".join(nearest)) if nearest else "")


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """As far as the text can be read."""
    try:
        yield from tokenize.generate_tokens(io.StringIO(text).readline)
    except (tokenize.TokenError, SyntaxError):
        return


def _first_lines(text: str) -> dict[int, int]:
    """Of every line of a statement that takes several: where it begins. Of a compound statement that is its head only."""
    found: dict[int, int] = {}
    begin = 0
    for token in _tokens(text):
        if token.type in _LAYOUT or (token.type == tokenize.COMMENT and not begin):
            continue
        begin = begin or token.start[0]
        if token.type == tokenize.NEWLINE:
            found |= dict.fromkeys(range(begin + 1, token.start[0] + 1), begin)
            begin = 0
    return found


def _python_comments(text: str) -> Iterator[Comment]:
    for token in _tokens(text):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, not token.line[: token.start[1]].strip()


def _yaml_comments(text: str) -> Iterator[Comment]:
    """What stands behind a `#` that no scalar holds."""
    import yaml

    try:
        scalars = [token for token in yaml.scan(text, yaml.SafeLoader) if isinstance(token, yaml.ScalarToken)]
    except yaml.YAMLError:
        return
    held = [(token.start_mark.index, token.end_mark.index) for token in scalars]
    start = 0
    for line, content in enumerate(text.split("\n"), start=1):
        for match in re.finditer(r"(?:^|(?<=\s))#.*", content):
            place = start + match.start()
            if not any(begin <= place < end for begin, end in held):
                yield line, match[0], not content[: match.start()].strip()
                break
        start += len(content) + 1


def _shell_comments(text: str) -> Iterator[Comment]:
    """What stands behind a `#` at the start of a word, outside quotes and here-documents. TOML is alike enough."""
    quote, document = "", ""
    for line, content in enumerate(text.split("\n"), start=1):
        if document:
            document = "" if content.strip() == document else document
            continue
        place, quote = comment_place(content, quote)
        code = content if place is None else content[:place]
        if place is not None:
            yield line, content[place:], not code.strip()
        if not quote and (match := _HEREDOC.search(code)):
            document = match[2]


def comment_place(content: str, quote: str) -> tuple[int | None, str]:
    """Where the comment of a line begins, and which quotation is open at the line's end."""
    escaped = False
    for place, letter in enumerate(content):
        if escaped:
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (place == 0 or content[place - 1] in " \t;"):
            return place, ""
    return None, quote


def _no_comments(_text: str) -> Iterator[Comment]:
    return iter(())


_READERS: Final[dict[str, Callable[[str], Iterator[Comment]]]] = {
    ".py": _python_comments,
    ".pyw": _python_comments,
    ".ipynb": _python_comments,
    ".yaml": _yaml_comments,
    ".yml": _yaml_comments,
    ".sh": _shell_comments,
    ".bash": _shell_comments,
    ".toml": _shell_comments,
}
