"""Source text as the checks get it: parsed, with its imports resolved, alone or as a project of several files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from textwrap import dedent

from brim.audit.found import Edit, Found
from brim.audit.source.module import Module, Source
from brim.audit.source.project import Project

Check = Callable[[Module, Project], Iterator[Found]]


def module_of(text: str, name: str = "train") -> Module:
    """One file, as if it stood at `NAME.py`."""
    text = dedent(text)
    tree = ast.parse(text)
    imports: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                imports[each.asname or each.name.partition(".")[0]] = each.name if each.asname else each.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return Module(Source(name.replace(".", "/") + ".py", text), name, tree, imports)


def project_of(*modules: Module, gpu: str | None = None) -> Project:
    """A project of these files."""
    return Project(modules=list(modules), gpu=gpu)


def found_by(checks: tuple[Check, ...], project: Project) -> list[Found]:
    """All that these checks find in a project."""
    return [each for module in project.modules for check in checks for each in check(module, project)]


def names(found: list[Found]) -> list[str]:
    """The rules that found something, each once."""
    return sorted({each.rule for each in found})


def mended(text: str, edits: tuple[Edit, ...]) -> str:
    """The text of one file after the edits of a finding."""
    lines = dedent(text).split("\n")
    for edit in sorted(edits, key=lambda each: (each.line, each.column), reverse=True):
        before, after = lines[edit.line - 1][: edit.column], lines[edit.end_line - 1][edit.end_column :]
        lines[edit.line - 1 : edit.end_line] = (before + edit.text + after).split("\n")
    return "\n".join(lines)
