"""Which config keys the project's own code names: a key that it reads is not dead, and one that it sets is not what the file says."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from brim.audit.source.module import Module


@dataclass(frozen=True)
class _Names:
    """The names of one file, by what is done with them."""

    read: frozenset[str]
    stored: frozenset[str]
    passed: frozenset[str]


@dataclass
class CodeNames:
    """The keys that a project's Python files name. A file is searched only when its text has the name that is asked for."""

    modules: Sequence[Module] = ()
    _known: dict[int, _Names] = field(default_factory=dict, repr=False)

    def reads(self, key: str) -> bool:
        """Whether code reads the key: `cfg["a"]["key"]`, `cfg.get("key")`, `cfg.key`, a field of an own class, a flag."""
        return any(key in names.read for names in self._with(key))

    def stores(self, key: str) -> bool:
        """Whether code changes the key: `cfg["key"] = 4`, `cfg.key = 4`."""
        return any(key in names.stored for names in self._with(key))

    def passes(self, key: str) -> bool:
        """Whether code gives the key to a call, as `TrainingArguments(key=4)` does."""
        return any(key in names.passed for names in self._with(key))

    def mentions(self, *words: str) -> bool:
        """Whether some file has one of these words; true where there is no code to ask."""
        return not self.modules or any(word in module.source.text for module in self.modules for word in words)

    def _with(self, key: str) -> list[_Names]:
        spelt = re.compile(rf"\b(?:{re.escape(key)}|{re.escape(key.replace('_', '-'))})\b")
        return [self._of(module) for module in self.modules if spelt.search(module.source.text)]

    def _of(self, module: Module) -> _Names:
        if id(module) not in self._known:
            self._known[id(module)] = _names_in(module.tree)
        return self._known[id(module)]


def _names_in(tree: ast.Module) -> _Names:
    read: set[str] = set()
    stored: set[str] = set()
    passed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            (read if isinstance(node.ctx, ast.Load) else stored).add(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
            stored.add(str(node.slice.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            read.add(node.value.lstrip("-").replace("-", "_"))
        elif isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            read.update(target.id for target in fields if isinstance(target, ast.Name))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            passed.add(node.arg)
    return _Names(frozenset(read), frozenset(stored), frozenset(passed))
