"""Rules, sources and findings as tests need them: independent of what the real rules say today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brim.audit.found import Edit, Found
from brim.audit.rules import RULES
from brim.audit.rules.rule import Rule
from brim.audit.source.module import Source


def rule(name: str, **facts: Any) -> Rule:
    """A rule with plausible texts."""
    given = {
        "group": "batch",
        "severity": "high",
        "title": "The batch size is held down",
        "why": "You set 64. The code takes 2. Nothing says so.",
        "fix": "Use the setting.",
        "sources": ("https://docs.pytorch.org/docs/stable/data.html",),
        "bad": {"train.py": "size = min(config.batch_size, 2)\n"},
        "good": {"train.py": "size = config.batch_size\n"},
        **facts,
    }
    return Rule(name=name, **given)


def add_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rules that are in nobody's way: test-high, test-medium, test-low."""
    monkeypatch.setitem(RULES, "test-high", rule("test-high"))
    monkeypatch.setitem(RULES, "test-medium", rule("test-medium", severity="medium", group="loading"))
    monkeypatch.setitem(RULES, "test-low", rule("test-low", severity="low", group="step"))


def found(file: str = "train.py", line: int = 1, **facts: Any) -> Found:
    """A finding of one line."""
    return Found(**{"rule": "test-high", "file": file, "line": line, "end_line": line, "message": "It is held at 2.", **facts})


def edit(file: str, line: int, column: int, end_column: int, text: str, *, end_line: int | None = None) -> Edit:
    """An edit, of one line if nothing else is said."""
    return Edit(file=file, line=line, column=column, end_line=end_line or line, end_column=end_column, text=text)


def source_of(path: Path, data: bytes | None = None) -> Source:
    """A file as the audit reads it; written first if its content is given."""
    from brim.audit.source.files import notebook, python_text

    if data is not None:
        path.write_bytes(data)
    read = path.read_bytes()
    if path.suffix == ".ipynb":
        return notebook(str(path), read)
    text = python_text(read) if path.suffix == ".py" else read.decode("utf-8-sig").replace("\r\n", "\n")
    return Source(str(path), text)
