"""A diagnosis as SARIF 2.1.0, which editors and code hosts show beside the code.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from brim.audit.explaining import as_markdown
from brim.audit.rules import RULES
from brim.locale import _
from brim.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from brim.audit.rules.rule import Rule
    from brim.records.findings import Diagnosis, Finding

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS: Final = {"high": "error", "medium": "warning", "low": "note"}
_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def to_sarif(diagnosis: Diagnosis) -> dict[str, Any]:
    """One run of one tool, with the rules that found something."""
    _lines_of.cache_clear()
    names = list(dict.fromkeys(finding.rule for finding in diagnosis.findings))
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "brim doctor", "version": __version__, "rules": [_rule(RULES[name]) for name in names]}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, names.index(finding.rule)) for finding in diagnosis.findings],
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [{"level": "note", "message": {"text": note}} for note in diagnosis.notes],
            }
        ],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.name,
        "shortDescription": {"text": _(rule.title)},
        "fullDescription": {"text": _(rule.why)},
        "help": {"text": _(rule.fix), "markdown": as_markdown(rule)},
        "helpUri": rule.sources[0],
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": [rule.group]},
    }


def _result(finding: Finding, rule_index: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": {"artifactLocation": _artifact(finding.file), "region": _region(finding)}}],
        "properties": {
            "severity": finding.severity,
            "confidence": finding.confidence,
            "in_force": [asdict(row) for row in finding.in_force],
        },
    }
    if finding.cell is not None:
        result["properties"]["cell"] = finding.cell
    if finding.patch is not None:
        text = _("Fix for {rule}").format(rule=finding.rule)
        result["fixes"] = [{"description": {"text": text}, "artifactChanges": list(_changes(finding))}]
    return result


def _artifact(file: str) -> dict[str, str]:
    path = Path(file)
    if path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix()), "uriBaseId": "%SRCROOT%"}


def _region(finding: Finding) -> dict[str, Any]:
    first, last = finding.line, finding.end_line
    if finding.cell is not None:
        first = last = _line_in_notebook(finding)
    region: dict[str, Any] = {"startLine": first, "endLine": last}
    if finding.code:
        region["snippet"] = {"text": finding.code}
    return region


@lru_cache(maxsize=1)
def _lines_of(file: str) -> list[str]:
    """Of the notebook at hand; its findings come one after another."""
    try:
        return Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError):
        return []


def _line_in_notebook(finding: Finding) -> int:
    """The line of the notebook's JSON that holds the first line of code; editors count lines of the file, not of the cells."""
    code = next((line for line in finding.code.split("\n") if line.strip()), "")
    lines = _lines_of(finding.file)
    spellings = {json.dumps(code, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
    return next((line for line, text in enumerate(lines, start=1) if code and any(each in text for each in spellings)), 1)


def _changes(finding: Finding) -> Iterator[dict[str, Any]]:
    """The files of a unified diff, each with whole lines that are replaced."""
    root = "/" if Path(finding.file).is_absolute() else ""
    for part in re.split(r"(?m)^(?=--- a/.*\n\+\+\+ b/)", finding.patch or ""):
        if part:
            head, _newline, body = part.partition("\n")
            name = head.removeprefix("--- a/").rstrip("\t")
            yield {"artifactLocation": _artifact(root + name), "replacements": list(_replacements(body.split("\n")[1:]))}


def _replacements(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Of the hunks of one file: which lines go, and what comes in their place."""
    line, removed, added = 1, 0, ""
    for text in [*lines, ""]:
        kind = text[:1]
        if kind == "-":
            removed += 1
        elif kind == "+":
            added += text[1:] + "\n"
        elif kind == "\\":
            added = added.removesuffix("\n") if added else added
        else:
            if removed or added:
                yield _replacement(line, removed, added)
            hunk = _HUNK.match(text)
            line = line + removed + 1 if hunk is None else int(hunk[1]) + (hunk[2] == "0")
            removed, added = 0, ""


def _replacement(line: int, removed: int, added: str) -> dict[str, Any]:
    region = {"startLine": line, "startColumn": 1, "endLine": line + removed, "endColumn": 1}
    return {"deletedRegion": region, "insertedContent": {"text": added}}
