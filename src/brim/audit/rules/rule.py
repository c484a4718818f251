"""What a rule is: one thing that silently changes a training step, why that matters, and what wrong and right look like.

A rule's texts are written once, here beside its examples: `--explain`, the pages in docs/rules and the tests all read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brim.records.findings import Severity

Group = Literal["batch", "accumulation", "step", "loading", "precision", "model", "config", "run"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of the doctor."""

    name: str
    """As in `# brim: ignore[name]`."""
    group: Group
    severity: Severity
    """Of an ordinary case; a finding may say another."""
    title: str
    """What is wrong, in one short sentence without a full stop; marked by N_ for translation."""
    why: str
    """What it does to a run, in two to five whole sentences; marked by N_."""
    mend: str
    """What to write instead, in one or two whole sentences; marked by N_."""
    sources: tuple[str, ...]
    """Where that can be read: addresses of documentation, issues, papers."""
    bad: str
    """An example that the rule must find. Of several files: each begins with a line `# file: NAME`."""
    good: str
    """The same, mended: no rule of high severity may find anything here, and this rule nothing at all."""
    example_name: str = "train.py"
    """The file that `bad` and `good` stand in, where they do not say."""
    also: str = ""
    """When a finding has another severity, in one or two whole sentences; marked by N_. Empty: never."""


def files_of(example: str, name: str) -> dict[str, str]:
    """The files of an example: one, or several that each begin with `# file: NAME`."""
    files: dict[str, list[str]] = {}
    current = name
    for line in example.splitlines(keepends=True):
        if line.startswith("# file: "):
            current = line.removeprefix("# file: ").strip()
            continue
        files.setdefault(current, []).append(line)
    return {each: "".join(lines) for each, lines in files.items()}
