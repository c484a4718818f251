"""What a fix must pass: it changes something, reads only names and attributes that exist, and a second audit agrees.

The checks look at the statements that a fix changes, not at rules. They are cautious: a name or attribute that the project does not show
to exist counts as missing.
"""

from __future__ import annotations

import ast
import builtins
import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.editing import CannotFix, edited
from brim.audit.found import Found
from brim.audit.ignoring import comment_place
from brim.audit.source.module import Function, Module, keyword_of, last_name, start_line
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from brim.audit.found import Edit
    from brim.audit.source.module import Source

_WORD: Final = re.compile(r"[^\W\d]\w*|\d[\w.]*")
_CHAIN: Final = re.compile(r"[^\W\d][\w.]*")
_TARGET: Final = re.compile(r"(\w+)\s*=\s*$")
_DIRECTIVE: Final = re.compile(
    r"#\s*(?:noqa|type:|brim:|pylint:|pyright:|mypy:|fmt:|isort:|ruff:|pragma|nosec|shellcheck)", re.IGNORECASE
)
_COMMENTED: Final = frozenset({".py", ".pyw", ".ipynb", ".yaml", ".yml", ".toml", ".sh", ".bash"})
_PARSERS_OF_ARGUMENTS: Final = frozenset(
    {"parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_dict", "parse_json_file"}
)
_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class StatementChange:
    """One statement before and after the edits within it."""

    place: ast.AST
    """The statement in the file's own tree."""
    before: ast.Module
    after: ast.Module


class FixChecks:
    """The checks of single fixes in the files of one audit."""

    def __init__(self, sources: Mapping[str, Source], modules: Mapping[str, Module]) -> None:
        self._sources = sources
        self._modules = modules
        self._known: dict[str, _Known] = {}

    def refuse_harmful(self, edits: Sequence[Edit]) -> None:
        """Raise CannotFix if the edits change nothing, or read a name or an attribute that the project does not show to exist."""
        changes_something = False
        for edit in edits:
            source = self._sources.get(edit.file)
            old, new = (None if source is None else text_at(source, edit)), edit.text
            if source is not None and _replaces_boolean(source, edit):
                raise CannotFix(_("The fix would replace a boolean by another setting."))
            changes_something |= old != new and edit.file not in self._modules
        for change, module in self._changes(edits):
            changes_something |= ast.dump(change.before) != ast.dump(change.after)
            _refuse_assignment_to_itself(change)
            _refuse_unknown_names(change, self._of(module))
        if not changes_something:
            raise CannotFix(_("The fix changes nothing."))

    def deletes_code(self, edits: Sequence[Edit]) -> bool:
        """Whether edits take away statements, arguments or lines, and do not only replace them."""
        for edit in edits:
            source = self._sources.get(edit.file)
            if source is not None and not edit.text.strip() and _without_comments(text_at(source, edit)):
                return True
        return any(_count_statements(change.after) < _count_statements(change.before) for change, _module in self._changes(edits))

    def _changes(self, edits: Sequence[Edit]) -> Iterator[tuple[StatementChange, Module]]:
        for file, own in by_file(edits).items():
            if file in self._modules:
                yield from ((change, self._modules[file]) for change in changed_statements(self._modules[file], own))

    def _of(self, module: Module) -> _Known:
        return self._known.setdefault(module.source.file, _Known(module, self._modules.values()))


def without_stale_comments(edits: Sequence[Edit], sources: Mapping[str, Source]) -> tuple[Edit, ...]:
    """The edits, and the removal of comments behind them that describe what is no longer there."""
    made = list(edits)
    for edit in edits:
        source = sources.get(edit.file)
        if source is None or Path(edit.file).suffix.lower() not in _COMMENTED or not edit.text.strip():
            continue
        line = source.lines[edit.end_line - 1]
        place, _quote = comment_place(line[edit.end_column :], "")
        if place is None:
            continue
        place += edit.end_column
        if _is_stale(line[place:], text_at(source, edit), edit.text):
            start = max(edit.end_column, len(line[:place].rstrip()))
            made.append(replace(edit, line=edit.end_line, column=start, end_column=len(line), text=""))
    return tuple(made)


def _is_stale(comment: str, old: str, new: str) -> bool:
    """Whether a value went away, not only a name that has another spelling now."""
    if _DIRECTIVE.match(comment):
        return False
    had, has = _WORD.findall(old), _WORD.findall(new)
    gone = set(had) - set(has)
    if len(had) == len(has) == 1 and not had[0][0].isdigit() and had[0] not in {"True", "False", "None"}:
        return had[0] in _WORD.findall(comment)
    return bool(gone)


@dataclass(frozen=True)
class Rejection:
    """Fixes that a second audit does not agree with."""

    found: frozenset[Found]
    why: str


def compare_audits(
    before: Sequence[Found], after: Sequence[Found], fixed: Sequence[Found], edits: Mapping[str, Sequence[Edit]]
) -> Rejection | None:
    """The fixes to give up, because their finding is still there or another one is new; None if there are none."""
    had, has = (Counter((each.rule, each.file) for each in some) for some in (before, after))
    removed = Counter((each.rule, each.file) for each in fixed)
    for rule, file in sorted(has):
        key = (rule, file)
        if has[key] <= had[key] - removed[key]:
            continue
        lines = {each.line for each in after if (each.rule, each.file) == key}
        mine = [each for each in fixed if (each.rule, each.file) == key]
        left = [each for each in mine if line_after(each.line, edits.get(file, ())) in lines]
        if left:
            return Rejection(frozenset(left), _("The finding would remain."))
        culprits = mine or [each for each in fixed if any(edit.file == file for edit in each.edits)] or list(fixed)
        text = _("A second audit would report {rule} in {file}.")
        return Rejection(frozenset(culprits), text.format(rule=rule, file=file))
    return None


def line_after(line: int, edits: Iterable[Edit]) -> int:
    """Where a line is after the edits."""
    return line + sum(
        edit.text.count("\n") - (edit.end_line - edit.line)
        for edit in edits
        if edit.end_line < line or (edit.end_line == line and edit.line < line)
    )


def by_file(edits: Iterable[Edit]) -> dict[str, list[Edit]]:
    """The edits of each file."""
    found: dict[str, list[Edit]] = {}
    for edit in edits:
        found.setdefault(edit.file, []).append(edit)
    return found


def text_at(source: Source, edit: Edit) -> str:
    """The text that an edit replaces."""
    lines = source.lines[edit.line - 1 : edit.end_line]
    if not lines:
        return ""
    if len(lines) < edit.end_line - edit.line + 1:
        return "\n".join([lines[0][edit.column :], *lines[1:]])
    if len(lines) == 1:
        return lines[0][edit.column : edit.end_column]
    return "\n".join([lines[0][edit.column :], *lines[1:-1], lines[-1][: edit.end_column]])


def changed_statements(module: Module, edits: Sequence[Edit]) -> Iterator[StatementChange]:
    """The innermost statement around each edit, parsed again with the edits within it."""
    groups: dict[tuple[int, int], tuple[ast.AST, list[Edit]]] = {}
    for edit in edits:
        last = edit.end_line - 1 if edit.end_column == 0 and edit.end_line > edit.line else edit.end_line
        node = _innermost(module, edit.line, last)
        if node is not None:
            span = (start_line(node), getattr(node, "end_lineno", last) or last)
            groups.setdefault(span, (node, []))[1].append(edit)
    for (first, last), (node, own) in groups.items():
        text = "\n".join(module.lines[first - 1 : last]) + "\n"
        moved = [replace(edit, line=edit.line - first + 1, end_line=edit.end_line - first + 1) for edit in own]
        new = edited(text, moved)
        indent = text[: len(text) - len(text.lstrip())]
        head = "if 1:\n" if indent else ""
        new = new if _without_comments(new) else f"{indent}pass\n"
        try:
            yield StatementChange(node, ast.parse(head + text), ast.parse(head + new))
        except SyntaxError:  # it shares its line with another statement, as `elif` does: only that it changes is known
            yield StatementChange(node, ast.Module([], []), ast.Module([ast.Pass()], []))


def _innermost(module: Module, first: int, last: int) -> ast.AST | None:
    """The smallest statement that holds these lines."""
    found: ast.AST | None = None
    blocks: list[list[ast.AST]] = [list(module.tree.body)]
    while blocks:
        block = blocks.pop()
        index = bisect_right(block, first, key=start_line) - 1
        if index >= 0 and (getattr(block[index], "end_lineno", 0) or 0) >= last:
            found = block[index]
            blocks = [inner for name in _BLOCKS if (inner := getattr(found, name, None)) and isinstance(inner, list)]
    return found


def _count_statements(tree: ast.AST) -> int:
    return sum(isinstance(each, ast.stmt) and not isinstance(each, ast.Pass) for each in ast.walk(tree))


def _replaces_boolean(source: Source, edit: Edit) -> bool:
    """Whether True or False becomes a setting of another name, which may hold anything."""
    if text_at(source, edit).strip() not in {"True", "False"} or not _CHAIN.fullmatch(edit.text.strip()):
        return False
    target = _TARGET.search(source.lines[edit.line - 1][: edit.column])
    return edit.text.strip() not in {"True", "False"} and (target is None or target[1] != edit.text.strip().rpartition(".")[2])


def _without_comments(text: str) -> str:
    return "".join(line.partition("#")[0].strip() for line in text.split("\n"))


def _refuse_assignment_to_itself(change: StatementChange) -> None:
    for node in ast.walk(change.after):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in [ast.unparse(each) for each in node.targets]:
            raise CannotFix(_("The fix would assign {name} to itself.").format(name=ast.unparse(node.value)))


def _refuse_unknown_names(change: StatementChange, known: _Known) -> None:
    """Names and attributes that only the new text reads must exist."""
    for name in sorted(_names(change.after) - _names(change.before)):
        if name not in known.names:
            raise CannotFix(_("{name} is not defined in this file.").format(name=name))
    for chain in sorted(_chains(change.after) - _chains(change.before)):
        if not known.has_attribute(chain, change.place):
            owner, _dot, attribute = chain.rpartition(".")
            text = _("{owner} is not known to have the attribute {attribute}.")
            raise CannotFix(text.format(owner=owner, attribute=attribute))


def _names(tree: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _chains(tree: ast.AST) -> set[str]:
    """`a.b.c` as it is read, without methods that are called: those belong to libraries, and rules know them."""
    called = {id(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    return {
        ast.unparse(each)
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Load)
        and id(each) not in called
        and _root(each) is not None
    }


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


class _Known:
    """What a project shows about names and the attributes of objects."""

    def __init__(self, module: Module, modules: Collection[Module]) -> None:
        self._module = module
        self._modules = modules
        self._used: dict[tuple[ast.AST, str], bool] = {}
        self._kinds: dict[tuple[ast.AST, str], str | None] = {}

    @cached_property
    def names(self) -> set[str]:
        """Every name that the file binds somewhere."""
        found = set(dir(builtins)) | set(self._module.imports)
        for node in ast.walk(self._module.tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, Function | ast.ClassDef | ast.ExceptHandler):
                found.add(node.name or "")
        return found

    def has_attribute(self, chain: str, place: ast.AST) -> bool:
        """Whether the object has it: the same is used elsewhere, its class has it, or a command line argument defines it."""
        root, *attributes = chain.split(".")
        if root in self._module.imports:
            return True
        around = self._scopes(root, place)
        if any(self._uses(scope, chain) for scope in around):
            return True
        if len(attributes) != 1:
            return False
        if root == "self":
            return any(isinstance(each, ast.ClassDef) and self._class_has(each, attributes[0]) for each in around)
        owner = next((kind for scope in around if (kind := self._kind_of(root, scope))), None)
        if owner in _PARSERS_OF_ARGUMENTS:
            return self._is_argument(attributes[0])
        return owner is not None and any(
            isinstance(node, ast.ClassDef) and node.name == owner and self._class_has(node, attributes[0])
            for module in self._modules
            for node in ast.walk(module.tree)
        )

    def _scopes(self, root: str, place: ast.AST) -> list[ast.AST]:
        """The functions and classes around the change, and the file where the name is not one of theirs."""
        around = [each for each in (place, *self._module.above(place)) if isinstance(each, Function | ast.ClassDef)]
        scopes: list[ast.AST] = []
        for each in around:
            scopes.append(each)
            if root != "self" and isinstance(each, Function) and root in _bound_in(each):
                return scopes
        return scopes if root == "self" else [*scopes, self._module.tree]

    def _uses(self, scope: ast.AST, chain: str) -> bool:
        if (scope, chain) not in self._used:
            name = chain.rpartition(".")[2]
            alike = (each for each in ast.walk(scope) if isinstance(each, ast.Attribute) and each.attr == name)
            self._used[scope, chain] = any(ast.unparse(each) == chain for each in alike)
        return self._used[scope, chain]

    def _kind_of(self, name: str, scope: ast.AST) -> str | None:
        """The class that a name has an instance of in a scope, or the method that parsed a command line into it."""
        if (scope, name) not in self._kinds:
            self._kinds[scope, name] = _kind_of(name, scope)
        return self._kinds[scope, name]

    def _class_has(self, node: ast.ClassDef, attribute: str) -> bool:
        for each in ast.walk(node):
            if isinstance(each, ast.AnnAssign | ast.Assign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                if any(last_name(target) == attribute for target in targets):
                    return True
            elif isinstance(each, Function) and each.name == attribute:
                return True
        bases = {last_name(each) for each in node.bases}
        return any(
            isinstance(each, ast.ClassDef) and each is not node and each.name in bases and self._class_has(each, attribute)
            for module in self._modules
            for each in module.tree.body
        )

    def _is_argument(self, attribute: str) -> bool:
        """Whether the file defines it with add_argument, or a dataclass of it has the field."""
        for node in ast.walk(self._module.tree):
            if isinstance(node, ast.Call) and last_name(node.func) in {"add_argument", "add_bool_arg", "option"}:
                spelled = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                given = keyword_of(node, "dest")
                dest = given.value.value if given is not None and isinstance(given.value, ast.Constant) else None
                if dest == attribute or (dest is None and attribute in {each.lstrip("-").replace("-", "_") for each in spelled}):
                    return True
            elif isinstance(node, ast.ClassDef) and node.decorator_list and self._class_has(node, attribute):
                return True
        return False


def _bound_in(function: ast.AST) -> set[str]:
    """Arguments and names that a function assigns."""
    return {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)} | {
        each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _kind_of(name: str, scope: ast.AST) -> str | None:
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) and node.arg == name and node.annotation is not None:
            return last_name(node.annotation) or None
        if isinstance(node, ast.AnnAssign) and last_name(node.target) == name:
            return last_name(node.annotation) or None
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == name for target in node.targets for each in ast.walk(target)
        ):
            calls = [each for each in ast.walk(node.value) if isinstance(each, ast.Call)]
            if calls:
                return last_name(calls[0].func) or None
    return None
