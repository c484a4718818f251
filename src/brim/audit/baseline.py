"""The baseline of an old project: findings that are known, so that only new ones count.

An entry is a rule, a file and the line of code without its blanks, so it still fits when the line moves. A line number would not.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.audit.publishing import code_of
from brim.errors import UsageError
from brim.locale import _
from brim.record import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from brim.audit.found import Found
    from brim.audit.source.module import Source
    from brim.records.findings import Finding

SCHEMA: Final = "brim.baseline/1"
_Key = tuple[str, str, str]
"""Rule, file relative to the baseline's folder, code."""


@dataclass(frozen=True)
class Baseline:
    """How many findings of each key are known."""

    folder: Path
    known: Counter[_Key]

    @classmethod
    def read(cls, path: str | Path) -> Baseline:
        """Read a file that `write_baseline` wrote."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(_("Cannot read {path}: {why}.").format(path=path, why=error.strerror or error)) from error
        except ValueError as error:
            raise UsageError(_("{path} is not a baseline: {why}.").format(path=path, why=error)) from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            text = _("{path} is not a baseline of brim doctor (schema {schema}).")
            raise UsageError(text.format(path=path, schema=SCHEMA), hint=_("`brim doctor --write-baseline FILE` writes one."))
        known: Counter[_Key] = Counter()
        try:
            for each in document["findings"]:
                known[str(each["rule"]), str(each["file"]), str(each["code"])] += int(each["count"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(_("{path} is damaged: an entry has no {field}.").format(path=path, field=error)) from error
        return cls(Path(path).resolve().parent, known)

    def without_known(self, found: Sequence[Found], sources: Mapping[str, Source]) -> list[Found]:
        """The findings that are not in the baseline; of equal ones, those beyond the known number."""
        left = Counter(self.known)
        new = []
        for each in found:
            key = _key(each.rule, each.file, code_of(each, sources.get(each.file)), self.folder)
            if left[key] > 0:
                left[key] -= 1
            else:
                new.append(each)
        return new


def write_baseline(path: str | Path, findings: Iterable[Finding]) -> int:
    """Record these findings as known; how many there are."""
    folder = Path(path).resolve().parent
    counts = Counter(_key(each.rule, each.file, each.code, folder) for each in findings)
    entries: list[dict[str, Any]] = [
        {"rule": rule, "file": file, "code": code, "count": count} for (rule, file, code), count in sorted(counts.items())
    ]
    write_atomically(path, json.dumps({"schema": SCHEMA, "findings": entries}, indent=1, ensure_ascii=False) + "\n")
    return counts.total()


def _key(rule: str, file: str, code: str, folder: Path) -> _Key:
    first = next((line for line in code.split("\n") if line.strip()), "")
    relative = os.path.relpath(Path(file).resolve(), folder)
    return rule, Path(relative).as_posix(), "".join(first.split())
