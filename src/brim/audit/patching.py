"""Edits become the text of a file again: the edited characters change, and nothing else does.

Line ends, the encoding, a byte order mark, the layout of a notebook's JSON and the file's mode stay as they were. What would no longer
parse is not written, and several files are written all or not at all.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import json
import math
import os
import re
import stat
import tempfile
import textwrap
import tokenize
import tomllib
import warnings
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.audit.cells import Notebook, compiles, is_python
from brim.audit.editing import CannotMend, bare, edited, split_lines
from brim.audit.found import Found
from brim.errors import RunError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from brim.audit.found import Edit
    from brim.audit.source.module import Source


_MANY_LINES: Final = 200
"""Longer files are not compiled and compared as a whole for every finding."""
_MOST_NEAR: Final = 40
_CONTEXT: Final = 3
_AROUND: Final = "async def around():\n    while True:\n"
"""What a statement may be compiled in: `return`, `break` and `await` mean something there."""


@dataclass(frozen=True)
class Original:
    """A file as it lies on the disk."""

    file: str
    data: bytes
    encoding: str
    text: str
    """With the line ends that it has."""

    @cached_property
    def lines(self) -> list[str]:
        """The text in lines, with their ends."""
        return split_lines(self.text)

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """First and last line of each statement, the outer ones first."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(self.text)
        spans = set()
        for each in ast.walk(tree):
            if isinstance(each, ast.stmt):
                decorators = [its.lineno for its in getattr(each, "decorator_list", [])]
                spans.add((min([each.lineno, *decorators]), each.end_lineno or each.lineno))
        return sorted(spans, key=lambda span: (span[0], -span[1]))

    def blocks_around(self, first: int, last: int) -> list[tuple[int, int]]:
        """Those that hold these lines, the smallest first."""
        end = bisect_right(self.blocks, (first, math.inf))
        near = self.blocks[max(0, end - _MOST_NEAR) : end]
        return sorted((span for span in near if span[0] <= first and last <= span[1]), key=lambda span: span[1] - span[0])[:4]


@dataclass(frozen=True)
class Change:
    """A file before and after."""

    file: str
    before: Original
    after: bytes
    name: str = ""
    """What the diff calls the file, where that is not its path as it is shown."""

    @property
    def diff(self) -> str:
        """The change as a unified diff, for `git apply` and `patch -p1`."""
        return unified(self.name or self.file, self.before.text, self.after.decode(self.before.encoding))

    def below(self, root: Path) -> Change:
        """The same change, its file named from a folder that it lies in."""
        return replace(self, name=_absolute(self.file).relative_to(root).as_posix())


@dataclass(frozen=True)
class Mending:
    """What one round would change."""

    changes: tuple[Change, ...]
    mended: tuple[Found, ...]
    left: tuple[tuple[Found, str], ...]
    """Findings whose patch was not taken, and why."""


class Desk:
    """The files that were looked at, read once more as bytes when somebody wants to change them."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._originals: dict[str, Original] = {}

    def original(self, file: str) -> Original:
        """The file on the disk, if it still is what was looked at."""
        if file not in self._originals:
            self._originals[file] = self._read(file)
        return self._originals[file]

    def change(self, file: str, edits: Iterable[Edit]) -> Change:
        """The file with these edits made."""
        before, source = self.original(file), self._sources[file]
        wanted = list(edits)
        text = Notebook(before.text, source).edited(wanted) if source.cells else edited(before.text, wanted)
        try:
            after = text.encode(before.encoding)
        except UnicodeEncodeError as error:
            raise CannotMend(_("The encoding {name} cannot hold the new text.").format(name=before.encoding)) from error
        if not _parses(file, text, after):
            raise CannotMend(_("The file would no longer parse."))
        return Change(file, before, after)

    def preview(self, file: str, edits: Sequence[Edit]) -> str:
        """The diff of these edits. Of a long Python file only the statement around them is compiled."""
        before = self.original(file)
        if is_python(file) and len(before.lines) > _MANY_LINES:
            first, last = _span_of(edits)
            for block in before.blocks_around(first, last):
                local = _local_diff(before, block, edits)
                if local is not None:
                    return local
        return self.change(file, edits).diff

    def _read(self, file: str) -> Original:
        source = self._sources.get(file)
        if source is None:
            raise CannotMend(_("This file was not looked at."))
        try:
            data = Path(file).read_bytes()
            encoding = encoding_of(file, data)
            text = data.decode(encoding)
        except (OSError, ValueError, LookupError, SyntaxError) as error:
            why = getattr(error, "strerror", None) or error
            raise CannotMend(_("Cannot read {path}: {why}.").format(path=file, why=why)) from error
        is_the_same = source.cells or [bare(line).replace("\f", " ") for line in split_lines(text)] == source.text.split("\n")
        if not is_the_same or text.encode(encoding) != data:
            raise CannotMend(_("The file is not what was looked at, or its characters do not survive being read and written."))
        return Original(file, data, encoding, text)


def encoding_of(file: str, data: bytes) -> str:
    """Python files may name their encoding; all others are UTF-8. A byte order mark is kept by the codec's name."""
    if is_python(file):
        return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    return "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"


def unified(file: str, before: str, after: str, *, after_lines: int = 0) -> str:
    """A unified diff between two texts of one file, or between parts of them that stand after so many lines."""
    old, new = ([line for line in re.split(r"(?<=\n)", text) if line] for text in (before, after))
    lines: Iterable[str] = difflib.unified_diff(old, new, *_names(file))
    if after_lines:
        lines = (
            _HUNK.sub(lambda hunk: f"@@ -{int(hunk[1]) + after_lines}{hunk[2]} +{int(hunk[3]) + after_lines}{hunk[4]} @@", line)
            for line in lines
        )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _local_diff(before: Original, block: tuple[int, int], edits: Sequence[Edit]) -> str | None:
    """The diff of edits within one block, if the block alone still compiles; None where that cannot be said."""
    start, end = max(0, block[0] - 1 - _CONTEXT), min(len(before.lines), block[1] + _CONTEXT)
    old = before.lines[start:end]
    moved = [replace(each, line=each.line - start, end_line=each.end_line - start) for each in edits]
    text = edited("".join(old), moved)
    new = [line for line in split_lines(text) if line]
    old = [line for line in old if line]
    above, below = block[0] - 1 - start, max(0, start + len(old) - block[1])
    code = textwrap.dedent("".join(new[above : len(new) - below]))
    if not code.strip():
        return None
    try:
        text.encode(before.encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiles(_AROUND + textwrap.indent(code, " " * 8))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    first, last = _span_of(edits)
    top, tail = max(start, first - 1 - _CONTEXT), max(0, start + len(old) - last - _CONTEXT)
    window = (old[top - start : len(old) - tail], new[top - start : len(new) - tail])
    return unified(before.file, *("".join(each) for each in window), after_lines=top)


def _span_of(edits: Sequence[Edit]) -> tuple[int, int]:
    """The first and the last line that edits touch."""
    ends = [each.end_line - (each.end_column == 0 and each.end_line > each.line) for each in edits]
    return min(each.line for each in edits), max(ends)


_HUNK: Final = re.compile(r"^@@ -(\d+)((?:,\d+)?) \+(\d+)((?:,\d+)?) @@")


def root_of(files: Iterable[str]) -> Path:
    """The folder that a diff's paths are relative to: the one that we are in, if all files lie in it, else that of their repository.

    git refuses paths with `..` in them, and passes over files outside of the folder that it is called in.
    """
    here = Path.cwd()
    paths = [_absolute(file) for file in files]
    if all(here in path.parents for path in paths):
        return here
    shared = Path(os.path.commonpath([path.parent for path in paths]))
    return next((folder for folder in (shared, *shared.parents) if (folder / ".git").exists()), shared)


def _absolute(file: str) -> Path:
    """Without `..`, and with its links as they are: git does not follow them."""
    return Path(os.path.normpath(Path.cwd() / file))


def patch_of(edits: Sequence[Edit], desk: Desk) -> str | None:
    """The edits of one finding as a diff; None if they cannot be made."""
    try:
        return "".join(desk.preview(file, own) for file, own in _by_file(edits).items()) or None
    except CannotMend:
        return None


def plan_mending(found: Iterable[Found], desk: Desk, is_allowed: Callable[[str], bool]) -> Mending:
    """Take the safe patches one after another, each whole or not at all; what meets an earlier one waits for the next round."""
    taken: dict[str, list[Edit]] = {}
    changes: dict[str, Change] = {}
    mended, left = [], []
    for each in found:
        if not (each.is_safe and each.edits):
            continue
        try:
            wanted = _by_file(each.edits)
            _refuse_foreign(wanted, is_allowed)
            new = {file: desk.change(file, [*taken.get(file, ()), *own]) for file, own in wanted.items()}
        except CannotMend as error:
            left.append((each, str(error)))
            continue
        changes |= new
        for file, own in wanted.items():
            taken.setdefault(file, []).extend(own)
        mended.append(each)
    real = tuple(change for _file, change in sorted(changes.items()) if change.after != change.before.data)
    return Mending(real, tuple(mended) if real else (), tuple(left))


def write_changes(changes: Sequence[Change]) -> None:
    """Write all files, or leave all as they were."""
    staged: list[tuple[Path, Path, Change]] = []
    replaced: list[tuple[Path, Change]] = []
    path = Path()
    try:
        for change in changes:
            path = Path(change.file).resolve()
            _refuse_stale(path, change)
            staged.append((_stage(path, change.after), path, change))
        for temporary, path, change in staged:
            temporary.replace(path)
            replaced.append((path, change))
    except BaseException as error:
        for path, change in replaced:
            path.write_bytes(change.before.data)
        if isinstance(error, OSError):
            text = _("Cannot write {path}: {why}. All files are as they were.")
            raise RunError(text.format(path=path, why=error.strerror or error)) from error
        raise
    finally:
        for temporary, _path, _change in staged:
            temporary.unlink(missing_ok=True)


def _refuse_stale(path: Path, change: Change) -> None:
    if path.read_bytes() != change.before.data:
        raise RunError(_("{path} has changed meanwhile. Nothing was written.").format(path=change.file))


def _stage(path: Path, data: bytes) -> Path:
    """The new content beside the old, with the old one's mode and owner."""
    if not os.access(path, os.W_OK):
        raise PermissionError(13, os.strerror(13))
    had = path.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(OSError):  # only root may give files away
            os.chown(name, had.st_uid, had.st_gid)
        Path(name).chmod(stat.S_IMODE(had.st_mode))
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _by_file(edits: Iterable[Edit]) -> dict[str, list[Edit]]:
    found: dict[str, list[Edit]] = {}
    for edit in edits:
        found.setdefault(edit.file, []).append(edit)
    return found


def _refuse_foreign(files: Iterable[str], is_allowed: Callable[[str], bool]) -> None:
    for file in files:
        if not is_allowed(file):
            raise CannotMend(_("{path} lies outside of what doctor was asked to look at.").format(path=file))


def _names(file: str) -> tuple[str, str]:
    """The two names at the head of a diff. A tab ends a name with blanks, as git writes it."""
    name = file.lstrip("/") + ("\t" if " " in file else "")
    return f"a/{name}", f"b/{name}"


def _parses(file: str, text: str, data: bytes) -> bool:
    """Whether a file of this kind can be read; a launcher is taken as it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parse = _PARSERS.get(Path(file).suffix.lower())
            if parse is not None:
                parse(text, data)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _parse_yaml(text: str, _data: bytes) -> None:
    """Well-formed is enough: tags of the user's own program are none of ours."""
    import yaml

    try:
        for _event in yaml.parse(text, yaml.SafeLoader):
            pass
    except yaml.YAMLError as error:
        raise ValueError from error


_PARSERS: Final[dict[str, Callable[[str, bytes], Any]]] = {
    ".py": lambda _text, data: compiles(data),
    ".pyw": lambda _text, data: compiles(data),
    ".ipynb": lambda text, _data: Notebook.check(text),
    ".json": lambda text, _data: json.loads(text),
    ".toml": lambda text, _data: tomllib.loads(text.replace("\r\n", "\n")),
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}
