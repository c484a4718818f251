"""One config file as doctor sees it: every key, its value, and where both stand.

YAML and JSON are read by one reader: PyYAML composes nodes, which know their lines, and never builds what an alias repeats. JSON with
comments or tabs, as DeepSpeed takes it, is blanked first, character by character, so that places stay true. Nothing here trusts a file:
its size, depth and number of keys are bounded, and what cannot be read is `Broken`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from brim.audit.found import Edit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.source.module import Source

LARGEST_CHARACTERS: Final = 128 * 1024
"""Training configs are short; tokenizers, indices of weights and logs are not, and are left alone."""
_MOST_NODES: Final = 20_000
_DEEPEST: Final = 12
_BOM: Final = "\ufeff"
_BREAKS: Final = str.maketrans(dict.fromkeys("\x85\u2028\u2029", " "))  # line ends to YAML alone
_JSON_PARTS: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|(?<=[\s,{\[])#[^\n]*|\t', re.DOTALL)
_LAST_COMMA: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')
_WHOLE: Final = re.compile(r"[-+]?[0-9]{1,18}")
_REAL: Final = re.compile(r"[-+]?(?:[0-9]{1,60}\.?[0-9]{0,60}|\.[0-9]{1,60})(?:[eE][-+]?[0-9]{1,4})?")
_WORDS: Final[dict[str, bool | None]] = {
    "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "null": None, "~": None, "": None,
}  # fmt: skip


class Broken(Exception):  # noqa: N818 (it is caught two lines further, and never shown)
    """A text that is neither YAML nor JSON."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Span:
    """A piece of text. Lines from 1, columns from 0."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key and its value."""

    name: str
    """Dotted, from the top of the file: `zero_optimization.stage`."""
    value: Any
    """A number, a word, True, False, None; a list or a dict of such."""
    file: str
    key: Span
    of_value: Span
    is_json: bool
    is_plain: bool
    """Whether the value is one scalar that stands on the line of its key."""
    is_text_to_yaml: bool = False
    """Whether PyYAML takes for text what looks like a number: `1e-5` has no point, and `1.0e5` no sign."""

    @property
    def line(self) -> int:
        """Of the key."""
        return self.key.line

    @property
    def last_name(self) -> str:
        """The key itself, without the sections that it stands in."""
        return self.name.rpartition(".")[2]

    def set_to(self, value: object) -> tuple[Edit, ...]:
        """An edit that puts another value here, written as the file's format writes it; none where it stands elsewhere (an alias)."""
        return (self._edit(self.of_value, written(value, is_json=self.is_json)),) if self.is_plain else ()

    def rename(self, name: str) -> tuple[Edit, ...]:
        """An edit that gives the key another name."""
        return (self._edit(self.key, f'"{name}"' if self.is_json else name),)

    def delete(self) -> tuple[Edit, ...]:
        """An edit that takes the line away; none where the comma before or behind it would have to go too."""
        if self.is_json or not self.is_plain:
            return ()
        return (Edit(file=self.file, line=self.line, column=0, end_line=self.line + 1, end_column=0, text=""),)

    def _edit(self, span: Span, text: str) -> Edit:
        return Edit(
            file=self.file,
            line=span.line,
            column=span.column,
            end_line=span.end_line,
            end_column=span.end_column,
            text=text,
        )


@dataclass
class Tree:
    """All keys of a file, by their dotted names."""

    entries: dict[str, Entry] = field(default_factory=dict)
    repeated: list[tuple[Entry, Entry]] = field(default_factory=list)
    """Keys that stand twice: the one that is lost, and the one that holds."""


def written(value: object, *, is_json: bool) -> str:
    """A value as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"' if is_json else value
    return "null" if value is None else str(value)


def shown(value: object) -> str | int | float | bool | None:
    """A value as a finding holds it."""
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def read(source: Source) -> Tree | None:
    """The keys of a file; None where it holds no mapping. Raises `Broken`."""
    import yaml

    text = source.text.translate(_BREAKS)
    shift = 1 if text.startswith(_BOM) else 0
    text = text[shift:]
    is_json = text.lstrip().startswith("{")
    if is_json:
        text = _JSON_PARTS.sub(_blank, text)
        if source.file.lower().endswith(".json"):
            _refuse_no_json(text)
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_node() if loader.check_node() else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        raise Broken(mark.line + 1 if mark is not None else 1, str(why)) from error
    except (RecursionError, ValueError, TypeError, AttributeError) as error:
        raise Broken(1, type(error).__name__) from error
    if not isinstance(node, yaml.MappingNode):
        return None
    return _Reader(source.file, shift, is_json).read(node)


def refuse_broken(source: Source) -> None:
    """Raise `Broken` where a file cannot be read by any reader of its kind."""
    if source.file.lower().endswith(".toml"):
        try:
            tomllib.loads(source.text)
        except tomllib.TOMLDecodeError as error:
            place = re.search(r"\(at line (\d+), column \d+\)", str(error))
            raise Broken(int(place[1]) if place else source.text.count("\n") + 1, str(error).partition(" (at ")[0]) from error
    else:
        read(source)


def _refuse_no_json(text: str) -> None:
    """YAML takes more than JSON: a value that is missing would be null. A comma too many is what DeepSpeed's reader takes."""
    try:
        json.loads(_LAST_COMMA.sub(_blank_comma, text), strict=False)
    except json.JSONDecodeError as error:
        raise Broken(error.lineno, error.msg) from error
    except (ValueError, RecursionError) as error:
        raise Broken(1, type(error).__name__) from error


def _blank_comma(match: re.Match[str]) -> str:
    text = match[0]
    return text if text.startswith('"') else f" {text[1:]}"


def _blank(match: re.Match[str]) -> str:
    """Comments and tabs as blanks, strings as they are."""
    text = match[0]
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


class _Reader:
    def __init__(self, file: str, shift: int, is_json: bool) -> None:
        self.file = file
        self.shift = shift
        self.is_json = is_json
        self.left = _MOST_NODES
        self.tree = Tree()

    def read(self, node: Any) -> Tree:
        self._mapping(node, "", 0)
        return self.tree

    def _mapping(self, node: Any, prefix: str, depth: int) -> None:
        if depth > _DEEPEST:
            return
        own: set[str] = set()
        for key, value, merged in self._pairs(node, 0):
            if self.left <= 0:
                return
            self.left -= 1
            name = f"{prefix}{key.value}"
            entry = self._entry(name, key, value)
            if name in self.tree.entries:
                if merged:
                    continue  # what is merged fills in what is not there
                if name in own:
                    self.tree.repeated.append((self.tree.entries[name], entry))
            own.add(name)
            self.tree.entries[name] = entry
            if hasattr(value, "value") and value.id == "mapping":
                self._mapping(value, f"{name}.", depth + 1)

    def _entry(self, name: str, key: Any, value: Any) -> Entry:
        return Entry(
            name=name,
            value=self._value(value, 0),
            file=self.file,
            key=self._span(key),
            of_value=self._span(value),
            is_json=self.is_json,
            is_plain=value.id == "scalar" and value.start_mark.line == value.end_mark.line == key.start_mark.line,
            is_text_to_yaml=not self.is_json and value.id == "scalar" and value.tag.endswith(":str") and _is_real(_scalar(value)),
        )

    def _span(self, node: Any) -> Span:
        start, end = node.start_mark, node.end_mark
        return Span(
            line=start.line + 1,
            column=start.column + (self.shift if start.line == 0 else 0),
            end_line=end.line + 1,
            end_column=end.column + (self.shift if end.line == 0 else 0),
        )

    def _value(self, node: Any, depth: int) -> Any:
        self.left -= 1
        if depth > _DEEPEST or self.left <= 0:
            return None
        if node.id == "scalar":
            return _scalar(node)
        if node.id == "sequence":
            return [self._value(each, depth + 1) for each in node.value[: max(0, self.left)]]
        found: dict[str, Any] = {}
        for key, value, merged in self._pairs(node, 0):
            if not merged or key.value not in found:
                found[key.value] = self._value(value, depth + 1)
        return found

    def _pairs(self, node: Any, depth: int) -> Iterator[tuple[Any, Any, bool]]:
        """Keys and values of a mapping; those that `<<` brings last, and marked."""
        merges: list[Any] = []
        for key, value in node.value:
            if key.id != "scalar":
                continue
            if key.tag == "tag:yaml.org,2002:merge":
                merges += value.value if value.id == "sequence" else [value]
            else:
                yield key, value, False
        for merge in merges:
            self.left -= 1
            if depth > _DEEPEST or self.left <= 0:
                return
            if merge.id == "mapping":
                for key, value, _merged in self._pairs(merge, depth + 1):
                    yield key, value, True


def _scalar(node: Any) -> Any:
    """As PyYAML reads it, and `1e-5` as the number that everybody means by it."""
    text: str = node.value
    if node.style in {"'", '"', "|", ">"}:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    plain = text.replace("_", "") if text[:1].isdigit() else text
    if _WHOLE.fullmatch(plain):
        return int(plain)
    return float(plain) if _REAL.fullmatch(plain) else text


def _is_real(value: object) -> bool:
    return isinstance(value, float)
