"""The rules of the doctor. Each is one Markdown file in this folder; `--explain`, the pages in docs/rules and the tests read the same file.

    ---
    group: batch              one of GROUPS
    severity: high            of an ordinary finding
    example: train.py         optional: the file name of the examples
    also: ...                 optional: when a finding has another severity
    off: low                  optional: severities that are reported only on request (`--all`, or the rule's name in `--select`)
    sources:                  where the facts can be read
      - https://...
    ---
    # Title without a full stop
    What the fault does to a run.
    ## Wrong
    A fenced example that the rule must find. With several files, each block follows a line with the file name in backquotes.
    ## Right
    The same, corrected: this rule and every rule of high severity must find nothing.
    ## Fix
    What to write instead.

The ledger of an example about runs is written as a header, the fields that all steps share, and the fields that change: one value per step,
repeated where the list is shorter than the run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final, Literal, cast, get_args

from brim.records.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Group = Literal["batch", "accumulation", "step", "loading", "precision", "model", "config", "run"]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)
_PARTS: Final = re.compile(
    r"---\n(?P<front>.*?)\n---\n\n# (?P<title>.*?)\n\n(?P<why>.*?)\n\n"
    r"## Wrong\n\n(?P<bad>.*?)\n\n## Right\n\n(?P<good>.*?)\n\n## Fix\n\n(?P<fix>.*?)\n",
    re.DOTALL,
)
_BLOCK: Final = re.compile(r"(?:`(?P<file>[^`\n]+)`\n\n)?```\w*\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of the doctor. The texts are English; views translate them."""

    name: str
    """As in `# brim: ignore[name]`."""
    group: Group
    severity: Severity
    title: str
    why: str
    fix: str
    sources: tuple[str, ...]
    bad: dict[str, str]
    """The wrong example: file name -> text."""
    good: dict[str, str]
    also: str = ""
    """When a finding has another severity than `severity`; empty: never."""
    off: frozenset[Severity] = frozenset()
    """Severities that are reported only on request."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that is translated."""
        return tuple(text for text in (self.title, self.why, self.fix, self.also) if text)


def read_rule(path: Path) -> Rule:
    """The rule of one file; its name is the name of the file."""
    return parse_rule(path.stem, path.read_text(encoding="utf-8"))


def messages_of(file: BinaryIO, *_details: object, **_options: object) -> Iterator[tuple[int, None, str, list[str]]]:
    """The texts to translate, as Babel extracts them (see `tool.babel` in pyproject.toml)."""
    for text in parse_rule("rule", file.read().decode()).texts:
        yield 1, None, text, []


def parse_rule(name: str, text: str) -> Rule:
    """The rule that a text of this form describes."""
    parts = _PARTS.fullmatch(text)
    if parts is None:
        raise ValueError(f"{name}.md does not have the parts of a rule, in their order")
    front, sources = _front_matter(parts["front"])
    example = front.get("example", "train.py")
    return Rule(
        name=name,
        group=cast("Group", front["group"]),
        severity=cast("Severity", front["severity"]),
        title=parts["title"],
        why=parts["why"],
        fix=parts["fix"],
        sources=sources,
        bad=dict(_files(parts["bad"], example)),
        good=dict(_files(parts["good"], example)),
        also=front.get("also", ""),
        off=frozenset(cast("list[Severity]", front.get("off", "").split())),
    )


def _front_matter(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    lines = text.splitlines()
    pairs = (line.partition(": ") for line in lines if not line.startswith("  - "))
    return {key: value for key, _, value in pairs}, tuple(line.removeprefix("  - ") for line in lines if line.startswith("  - "))


def _files(text: str, name: str) -> Iterator[tuple[str, str]]:
    for block in _BLOCK.finditer(text):
        file = block["file"] or name
        yield file, _ledger(block["text"]) if file.endswith(".jsonl") else block["text"]


def _ledger(text: str) -> str:
    """The lines of a ledger, from its header and the fields of its steps."""
    run = json.loads(text)
    changing = run["by_step"].items()
    steps = (
        {**run["every_step"], "step": step + 1, **{name: values[step % len(values)] for name, values in changing}}
        for step in range(run["steps"])
    )
    return "".join(json.dumps(line) + "\n" for line in (run["header"], *steps))
