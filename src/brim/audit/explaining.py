"""`brim doctor --explain RULE`: what a rule is about, from the same texts as its page and its tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.audit.rules import RULES, find_rule
from brim.audit.rules.rule import Group, files_of
from brim.locale import _
from brim.records.findings import Severity

if TYPE_CHECKING:
    from brim.audit.rules.rule import Rule

_LANGUAGES: Final = {".py": "python", ".ipynb": "python", ".sh": "sh", ".json": "json", ".jsonl": "json", ".toml": "toml"}
_LEDGER_LINES: Final = 2


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A rule in the language in force."""

    rule: str
    group: Group
    severity: Severity
    title: str
    why: str
    mend: str
    bad: dict[str, str]
    """The wrong example: file name -> text."""
    good: dict[str, str]
    sources: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "sources": list(self.sources)}


def explain(name: str) -> Explanation:
    """Tell about one rule; an unknown name is an error that holds the nearest."""
    return _explained(find_rule(name))


def explain_all() -> list[Explanation]:
    """Tell about all rules, in the order in which they are written."""
    return [_explained(rule) for rule in RULES.values()]


def _explained(rule: Rule) -> Explanation:
    return Explanation(
        rule=rule.name,
        group=rule.group,
        severity=rule.severity,
        title=_(rule.title),
        why=_(rule.why),
        mend=_(rule.mend),
        bad=_files(rule.bad, rule.example_name),
        good=_files(rule.good, rule.example_name),
        sources=rule.sources,
    )


def as_markdown(rule: Rule) -> str:
    """The body of a rule's page, in English: why, wrong, right, mend, sources. Editors show it beside a finding too."""
    parts = [
        rule.why,
        "Wrong:",
        *_fenced(rule.bad, rule.example_name),
        "Right:",
        *_fenced(rule.good, rule.example_name),
        f"Mend: {rule.mend}",
        "Sources:\n" + "\n".join(f"- <{address}>" for address in rule.sources),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _files(example: str, name: str) -> dict[str, str]:
    """The files of an example; of a ledger its beginning and its end, since its steps are much alike."""
    return {file: _shortened(text) if file.endswith(".jsonl") else text for file, text in files_of(example, name).items()}


def _shortened(ledger: str) -> str:
    lines = ledger.splitlines()
    kept = lines if len(lines) <= 2 * _LEDGER_LINES else [*lines[:_LEDGER_LINES], "...", *lines[-_LEDGER_LINES:]]
    return "\n".join(kept) + "\n"


def _fenced(example: str, name: str) -> list[str]:
    """The files of an example as blocks of code, with their names where there are several."""
    files = _files(example, name)
    blocks = []
    for file, text in files.items():
        language = _LANGUAGES.get(Path(file).suffix.lower(), "yaml")
        block = f"```{language}\n{text.strip(chr(10))}\n```"
        blocks.append(f"`{file}`\n\n{block}" if len(files) > 1 else block)
    return blocks
