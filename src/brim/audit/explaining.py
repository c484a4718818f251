"""`brim doctor --explain RULE`: one rule, from the same file as its page and its tests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.audit.rules import RULES, find_rule
from brim.audit.rules.rule import Group
from brim.locale import _
from brim.records.findings import Severity

if TYPE_CHECKING:
    from brim.audit.rules.rule import Rule

_LANGUAGES: Final = {".py": "python", ".ipynb": "python", ".sh": "sh", ".json": "json", ".jsonl": "json", ".toml": "toml"}
_LEDGER_LINES: Final = 2
_ALWAYS: Final = frozenset({"kind", "step", "effective_batch", "memory_limit_bytes", "learning_rate"})


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A rule in the selected language."""

    rule: str
    group: Group
    severity: Severity
    also: str
    """When a finding has another severity; empty: never."""
    title: str
    why: str
    fix: str
    bad: dict[str, str]
    """The wrong example: file name -> text."""
    good: dict[str, str]
    sources: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "sources": list(self.sources)}


def explain(name: str) -> Explanation:
    """One rule; an unknown name is an error with the nearest names."""
    return _explained(find_rule(name))


def explain_all() -> list[Explanation]:
    """All rules, in the order in which they are written."""
    return [_explained(rule) for rule in RULES.values()]


def _explained(rule: Rule) -> Explanation:
    return Explanation(
        rule=rule.name,
        group=rule.group,
        severity=rule.severity,
        also=_(rule.also),
        title=_(rule.title),
        why=_(rule.why),
        fix=_(rule.fix),
        bad=_shown(rule.bad, rule),
        good=_shown(rule.good, rule),
        sources=rule.sources,
    )


def as_markdown(rule: Rule) -> str:
    """The body of a rule's page, in English: why, wrong, right, fix, sources. Editors show it beside a finding too."""
    left_out = (
        " (fields that are equal in both ledgers are left out)" if any(file.endswith(".jsonl") for file in rule.bad) else ""
    )
    parts = [
        rule.why,
        f"Wrong{left_out}:",
        *_fenced(rule.bad, rule),
        "Right:",
        *_fenced(rule.good, rule),
        f"Fix: {rule.fix}",
        "Sources:\n" + "\n".join(f"- <{address}>" for address in rule.sources),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(example: dict[str, str], rule: Rule) -> dict[str, str]:
    """The files of an example. A ledger is cut to its first and last lines, and to the fields that the rule is about."""
    return {file: _shortened(text, _fields(rule)) if file.endswith(".jsonl") else text for file, text in example.items()}


def _fields(rule: Rule) -> frozenset[str]:
    """The fields of a ledger that differ between wrong and right, and those without which a line cannot be read."""
    wrong, right = (_values("".join(example.values())) for example in (rule.bad, rule.good))
    return _ALWAYS | {name for name in (*wrong, *right) if wrong.get(name) != right.get(name)}


def _values(ledger: str) -> dict[str, set[str]]:
    """Every value that a field has in some line."""
    found: dict[str, set[str]] = {}
    for line in ledger.splitlines():
        for name, value in (json.loads(line) if line.startswith("{") else {}).items():
            found.setdefault(name, set()).add(json.dumps(value))
    return found


def _shortened(ledger: str, fields: frozenset[str]) -> str:
    lines = [_short_line(json.loads(line), fields) if line.startswith("{") else line for line in ledger.splitlines()]
    kept = lines if len(lines) <= 2 * _LEDGER_LINES else [*lines[:_LEDGER_LINES], "...", *lines[-_LEDGER_LINES:]]
    return "\n".join(kept) + "\n"


def _short_line(line: dict[str, Any], fields: frozenset[str]) -> str:
    kept = {name: value for name, value in line.items() if name in fields}
    if any("gradient_square" in one for one in kept.get("slices", ())):
        kept["slices"] = [{name: one[name] for name in ("items", "gradient_square")} for one in kept["slices"]]
    return json.dumps(kept)


def _fenced(example: dict[str, str], rule: Rule) -> list[str]:
    """The files of an example as blocks of code, with their names where there are several."""
    files = _shown(example, rule)
    blocks = []
    for file, text in files.items():
        language = _LANGUAGES.get(Path(file).suffix.lower(), "yaml")
        block = f"```{language}\n{text.strip(chr(10))}\n```"
        blocks.append(f"`{file}`\n\n{block}" if len(files) > 1 else block)
    return blocks
