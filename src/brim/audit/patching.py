"""Edits become the text of a file again: the edited characters change, and nothing else does.

Line ends, the encoding, a byte order mark, the layout of a notebook's JSON and the file's mode stay as they were. What would no longer
parse is not written, and several files are written all or not at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import tempfile
import tokenize
import tomllib
import warnings
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.audit.cells import Notebook, compiles, is_python
from brim.audit.editing import CannotFix, bare, edited, span_of, split_lines, unified
from brim.audit.fix_checks import FixChecks, by_file, compare_audits, without_stale_comments
from brim.audit.found import Edit, Found
from brim.errors import RunError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from brim.audit.source.module import Module, Source

    Audit = Callable[[Mapping[str, bytes]], list[Found]]
    """The findings that changed files would have."""


_MOST_PARSED: Final = 20_000_000
"""Characters that are parsed to check fixes one by one."""
_MOST_AUDITS: Final = 5
_CONTEXT_LINES: Final = 4


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
        """The lines with their ends."""
        return split_lines(self.text)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(map(len, self.lines))]

    def span(self, edit: Edit) -> tuple[int, int]:
        """The characters that an edit replaces."""
        return span_of(self.lines, self._starts, edit)


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
class FixPlan:
    """What one round of fixes would change."""

    changes: tuple[Change, ...] = ()
    fixed: tuple[Found, ...] = ()
    left: tuple[tuple[Found, str], ...] = ()
    """Findings whose fix was not taken, and why."""
    waiting: tuple[Found, ...] = ()
    """Those among them that another fix of the same place holds up until the next round."""

    @property
    def applicable(self) -> tuple[Found, ...]:
        """The findings that --fix would fix, in this round or in a later one."""
        return (*self.fixed, *self.waiting)


class Desk:
    """The audited files, read again as bytes when they are to be changed, and the checks of changes to them."""

    def __init__(self, sources: Mapping[str, Source], modules: Mapping[str, Module] | None = None) -> None:
        self._sources = sources
        self._originals: dict[str, Original] = {}
        self._parsed = 0
        self.checks = FixChecks(sources, modules or {})

    @property
    def is_exhausted(self) -> bool:
        """Whether so much was parsed for single fixes that the others are left out."""
        return self._parsed > _MOST_PARSED

    def original(self, file: str) -> Original:
        """The file on the disk, if it is still what was audited."""
        if file not in self._originals:
            self._originals[file] = self._read(file)
        return self._originals[file]

    def edits_of(self, found: Found) -> tuple[Edit, ...]:
        """The edits of a finding, checked, with the comments that they make stale. Raises CannotFix."""
        try:
            self.checks.refuse_harmful(found.edits)
        except RecursionError as error:
            raise CannotFix(_("The code is nested too deeply.")) from error
        return without_stale_comments(found.edits, self._sources)

    def change(self, file: str, edits: Iterable[Edit]) -> Change:
        """The file with these edits made. Raises CannotFix if it would no longer parse."""
        before, source = self.original(file), self._sources[file]
        wanted = list(edits)
        text = Notebook(before.text, source).edited(wanted) if source.cells else edited(before.text, wanted, before.lines)
        try:
            after = text.encode(before.encoding)
        except UnicodeEncodeError as error:
            raise CannotFix(_("The encoding {name} cannot hold the new text.").format(name=before.encoding)) from error
        if not _parses(file, text, after):
            raise CannotFix(_("The file would no longer parse."))
        return Change(file, before, after)

    def refusals(self, file: str, fixes: Sequence[Sequence[Edit]]) -> list[str]:
        """Of several fixes of a file: why each cannot be made, or an empty text.

        They are tried together first: to parse the file once for each would take too long.
        """
        if self.is_exhausted:
            return [_("There are too many fixes to check.")] * len(fixes)
        self._parsed += len(self.original(file).text)
        try:
            self.change(file, [edit for own in fixes for edit in own])
        except CannotFix as error:
            if len(fixes) == 1:
                return [str(error)]
            half = len(fixes) // 2
            return self.refusals(file, fixes[:half]) + self.refusals(file, fixes[half:])
        return [""] * len(fixes)

    def diff(self, file: str, edits: Sequence[Edit]) -> str:
        """The edits of one fix as a diff, without parsing; only the lines around them are looked at."""
        before, source = self.original(file), self._sources[file]
        if source.cells:
            if self.is_exhausted:
                raise CannotFix(_("There are too many fixes to check."))
            self._parsed += len(before.text)
            return unified(file, before.text, Notebook(before.text, source).edited(edits))
        first = max(1, min(edit.line for edit in edits) - _CONTEXT_LINES)
        last = max(edit.end_line for edit in edits) + _CONTEXT_LINES
        lines = before.lines[first - 1 : last]
        moved = [replace(edit, line=edit.line - first + 1, end_line=edit.end_line - first + 1) for edit in edits]
        return unified(file, "".join(lines), edited("".join(lines), moved, lines), first)

    def _read(self, file: str) -> Original:
        source = self._sources.get(file)
        if source is None:
            raise CannotFix(_("This file was not audited."))
        try:
            data = Path(file).read_bytes()
            encoding = encoding_of(file, data)
            text = data.decode(encoding)
        except (OSError, ValueError, LookupError, SyntaxError) as error:
            why = getattr(error, "strerror", None) or error
            raise CannotFix(_("Cannot read {path}: {why}.").format(path=file, why=why)) from error
        is_the_same = source.cells or [bare(line).replace("\f", " ") for line in split_lines(text)] == source.lines
        if not is_the_same or text.encode(encoding) != data:
            raise CannotFix(_("The file has changed since the audit, or its characters cannot be written back unchanged."))
        return Original(file, data, encoding, text)


def encoding_of(file: str, data: bytes) -> str:
    """Python files may name their encoding; all others are UTF-8. A byte order mark is kept by the codec's name."""
    if is_python(file):
        return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    return "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8"


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


def diffs_of(found: Sequence[Found], desk: Desk) -> dict[Found, str]:
    """The fix of each finding as a diff, where it has one that passes the checks."""
    checked: dict[Found, dict[str, list[Edit]]] = {}
    for each in found:
        with contextlib.suppress(CannotFix):
            checked[each] = by_file(desk.edits_of(each))
    failing: set[Found] = set()
    for file in dict.fromkeys(file for own in checked.values() for file in own):
        mine = [each for each, own in checked.items() if file in own]
        refusals = _refusals(file, [checked[each][file] for each in mine], desk)
        failing |= {each for each, why in zip(mine, refusals, strict=True) if why}
    diffs: dict[Found, str] = {}
    for each, own in checked.items():
        if each not in failing:
            with contextlib.suppress(CannotFix):
                diffs[each] = "".join(desk.diff(file, edits) for file, edits in own.items())
    return {each: diff for each, diff in diffs.items() if diff}


def _refusals(file: str, fixes: Sequence[Sequence[Edit]], desk: Desk) -> list[str]:
    """Of each fix alone: why it cannot be made. A file that is gone or has changed takes none."""
    try:
        return desk.refusals(file, fixes)
    except CannotFix as error:
        return [str(error)] * len(fixes)


def plan_fixes(
    found: Sequence[Found], desk: Desk, is_allowed: Callable[[str], bool], audit: Audit | None = None, *, unsafe: bool = False
) -> FixPlan:
    """The safe fixes that can be made together, each whole or not at all. What overlaps an earlier one waits for the next round.

    `audit` returns the findings of changed files: a fix is taken only if its finding is gone then, and nothing else is new. `unsafe`
    adds the fixes that delete code or that a rule marks for review.
    """
    plan = _Plan(desk)
    for each in found:
        if each.edits and (each.is_safe or unsafe):
            try:
                _refuse_foreign((edit.file for edit in each.edits), is_allowed)
                plan.take(each, desk.edits_of(each), unsafe=unsafe)
            except CannotFix as error:
                plan.left.append((each, str(error)))
    changes = plan.changes()
    if audit is not None:
        changes = _confirmed(plan, changes, found, audit)
    return FixPlan(changes, tuple(plan.taken) if changes else (), tuple(plan.left), tuple(plan.waiting))


def _confirmed(plan: _Plan, changes: tuple[Change, ...], found: Sequence[Found], audit: Audit) -> tuple[Change, ...]:
    """The changes that a second audit agrees with; the others are dropped from the plan."""
    for _round in range(_MOST_AUDITS):
        if not changes:
            return ()
        after = audit({change.file: change.after for change in changes})
        rejection = compare_audits(found, after, list(plan.taken), plan.edits)
        if rejection is None:
            return changes
        plan.drop(rejection.found, rejection.why)
        changes = plan.changes()
    plan.drop(list(plan.taken), _("A second audit does not confirm the fix."))
    return ()


@dataclass
class _Plan:
    """The fixes taken so far."""

    desk: Desk
    taken: dict[Found, dict[str, list[Edit]]] = field(default_factory=dict)
    left: list[tuple[Found, str]] = field(default_factory=list)
    waiting: list[Found] = field(default_factory=list)
    _spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _edits: set[Edit] = field(default_factory=set)

    @property
    def edits(self) -> dict[str, list[Edit]]:
        """All edits that are taken, by file, each once."""
        return by_file(dict.fromkeys(edit for own in self.taken.values() for edits in own.values() for edit in edits))

    def take(self, found: Found, edits: Sequence[Edit], *, unsafe: bool) -> None:
        """Add a fix, or let it wait if it overlaps one that is taken."""
        if not unsafe and self.desk.checks.deletes_code(found.edits):
            raise CannotFix(_("The fix deletes code: `--fix --unsafe` applies it."))
        wanted = by_file(edits)
        if not self._edits.issuperset(edits):
            spans = [(file, self.desk.original(file).span(edit)) for file, own in wanted.items() for edit in own]
            if any(_meets(span, self._spans.get(file, [])) for file, span in spans):
                self.waiting.append(found)
                raise CannotFix(_("Another fix changes the same place."))
            for file, span in spans:
                insort(self._spans.setdefault(file, []), span)
        self._edits.update(edits)
        self.taken[found] = wanted

    def drop(self, found: Iterable[Found], why: str) -> None:
        """Give up fixes that were taken."""
        for each in found:
            del self.taken[each]
            self.left.append((each, why))

    def changes(self) -> tuple[Change, ...]:
        """The changed files; fixes that keep a file from being parsed are given up on the way."""
        for file in list(self.edits):
            mine = [each for each, own in self.taken.items() if file in own]
            refusals = self.desk.refusals(file, [self.taken[each][file] for each in mine])
            for each, why in zip(mine, refusals, strict=True):
                if why:
                    self.drop([each], why)
        made = [self.desk.change(file, edits) for file, edits in sorted(self.edits.items())]
        return tuple(change for change in made if change.after != change.before.data)


def _meets(span: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a span of characters overlaps one of a sorted list, or begins where one begins."""
    place = bisect_left(spans, span)
    behind, before = spans[place : place + 1], spans[place - 1 : place] if place else ()
    return any(each[0] < span[1] or each[0] == span[0] for each in behind) or any(
        each[1] > span[0] or each[0] == span[0] for each in before
    )


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
            text = _("Cannot write {path}: {why}. No file was changed.")
            raise RunError(text.format(path=path, why=error.strerror or error)) from error
        raise
    finally:
        for temporary, _path, _change in staged:
            temporary.unlink(missing_ok=True)


def _refuse_stale(path: Path, change: Change) -> None:
    if path.read_bytes() != change.before.data:
        raise RunError(_("{path} changed during the audit. No file was changed.").format(path=change.file))


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


def _refuse_foreign(files: Iterable[str], is_allowed: Callable[[str], bool]) -> None:
    for file in files:
        if not is_allowed(file):
            raise CannotFix(_("{path} is outside of the targets.").format(path=file))


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
