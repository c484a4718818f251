"""One Python file as doctor sees it: its text, its tree, who stands in whom, and what its imported names mean."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from brim.audit.found import Edit, Found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.records.findings import Confidence, InForce, Severity

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
N = TypeVar("N", bound=ast.AST)


@dataclass(frozen=True)
class Source:
    """The text of one file."""

    file: str
    """The path as it is shown: relative to where doctor was called, if it lies below."""
    text: str
    cells: tuple[int, ...] = ()
    """Of a notebook: the first line of each code cell in `text`, from 1."""
    notes: tuple[str, ...] = ()
    """What of it was not read."""

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, without their ends."""
        return self.text.split("\n")


@dataclass
class Module:
    """A parsed file."""

    source: Source
    name: str
    """Dotted, from the root of the project: `trainer.loop`."""
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    """Local name -> what it stands for: `{"DataLoader": "torch.utils.data.DataLoader", "np": "numpy"}`. Relative imports are resolved."""

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, without their ends."""
        return self.source.lines

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Of each node: the node that it stands in."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, as `ast.walk` gives them; walked once."""
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call of the file."""
        return [each for each in self.nodes if isinstance(each, ast.Call)]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that this one stands in, the nearest first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def enclosing(self, node: ast.AST, *kinds: type[N]) -> N | None:
        """The nearest node of such a kind around this one."""
        return next((each for each in self.above(node) if isinstance(each, kinds)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that a node is part of; the node itself if it is one."""
        if isinstance(node, ast.stmt):
            return node
        found = self.enclosing(node, ast.stmt)
        assert found is not None
        return found

    def text_of(self, node: ast.AST) -> str:
        """The source text of a node, as it stands in the file."""
        line: int | None = getattr(node, "lineno", None)
        end: int | None = getattr(node, "end_lineno", None)
        if line is None or end is None or end > len(self.lines):
            return ast.unparse(node)
        # `ast.get_source_segment` splits the whole file each time; here it is split once.
        first: int = self.column(line, getattr(node, "col_offset", 0))
        last: int = self.column(end, getattr(node, "end_col_offset", 0))
        if line == end:
            return self.lines[line - 1][first:last]
        return "\n".join([self.lines[line - 1][first:], *self.lines[line : end - 1], self.lines[end - 1][:last]])

    def dotted(self, node: ast.AST) -> str | None:
        """`a.b.c` as text, imported names resolved: `DataLoader` -> `torch.utils.data.DataLoader`. None if it is no such chain."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        parts.append(self.imports.get(node.id, node.id))
        return ".".join(reversed(parts))

    def column(self, line: int, byte_column: int) -> int:
        """`ast` counts columns in UTF-8 bytes; editors and edits count characters."""
        text = self.lines[line - 1]
        return byte_column if text.isascii() else len(text.encode()[:byte_column].decode(errors="replace"))

    def replace(self, node: ast.AST, text: str) -> Edit:
        """An edit that puts `text` in the place of an expression or statement."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return Edit(
            file=self.source.file,
            line=node.lineno,
            column=self.column(node.lineno, node.col_offset),
            end_line=node.end_lineno,
            end_column=self.column(node.end_lineno, node.end_col_offset),
            text=text,
        )

    def delete_lines(self, first: int, last: int) -> Edit:
        """An edit that takes whole lines away."""
        return Edit(file=self.source.file, line=first, column=0, end_line=last + 1, end_column=0, text="")

    def found(
        self,
        rule: str,
        node: ast.AST,
        message: str,
        *,
        until: ast.AST | None = None,
        confidence: Confidence = "high",
        severity: Severity | None = None,
        in_force: tuple[InForce, ...] = (),
        edits: tuple[Edit, ...] = (),
        is_safe: bool = False,
    ) -> Found:
        """A finding about a node (up to the end of `until`)."""
        line = getattr(node, "lineno", 1)
        return Found(
            rule=rule,
            file=self.source.file,
            line=line,
            end_line=getattr(until or node, "end_lineno", None) or line,
            message=message,
            confidence=confidence,
            severity=severity,
            in_force=in_force,
            edits=edits,
            is_safe=is_safe,
        )


def start_line(node: ast.AST) -> int:
    """The first line of a statement, its decorators included; of a `case` that of its pattern."""
    placed = node.pattern if isinstance(node, ast.match_case) else node
    lines: list[int] = [each.lineno for each in getattr(node, "decorator_list", ())]
    return min([getattr(placed, "lineno", 1), *lines])


def is_test(module: Module) -> bool:
    """Whether a file holds tests, by where it lies in the project and how it is called."""
    *folders, name = module.name.split(".")
    return bool({"test", "tests"} & set(folders)) or name.startswith("test_") or name.endswith("_test") or name == "conftest"


def functions_of(tree: ast.AST) -> Iterator[Function]:
    """Every function and method below a node."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def calls_of(tree: ast.AST) -> Iterator[ast.Call]:
    """Every call below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node


def last_name(node: ast.AST) -> str:
    """The last part of a name or attribute chain: `optimizer.step` -> `step`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword_of(call: ast.Call, name: str) -> ast.keyword | None:
    """The keyword argument of that name."""
    return next((each for each in call.keywords if each.arg == name), None)


def walk_here(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node except the bodies of functions and classes that are defined inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield from walk_here(child)
