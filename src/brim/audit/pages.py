"""Write docs/rules from the rules' files: `python -m brim.audit.pages docs/rules`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.explaining import as_markdown
from brim.audit.rules import RULES
from brim.audit.rules.rule import GROUPS
from brim.record import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from brim.audit.rules.rule import Rule

INDEX: Final = "README.md"
_MARK: Final = "<!-- Written by `python -m brim.audit.pages`: edit src/brim/audit/rules, not this page. -->"


def pages() -> dict[str, str]:
    """Every page by its file name, the index among them."""
    return {INDEX: _index(), **{f"{rule.name}.md": _page(rule) for rule in RULES.values()}}


def write_pages(folder: str | Path) -> int:
    """Write all pages, delete those of rules that no longer exist, and return the number of pages."""
    wanted = pages()
    for name, text in wanted.items():
        write_atomically(Path(folder) / name, text)
    for path in Path(folder).glob("*.md"):
        if path.name not in wanted and path.read_text(encoding="utf-8").startswith(_MARK):
            path.unlink()
    return len(wanted)


def _page(rule: Rule) -> str:
    has_comments = not all(file.endswith((".json", ".jsonl")) for file in rule.bad)
    suppression = f"`# brim: ignore[{rule.name}]`" if has_comments else f"`--ignore {rule.name}`"
    also = f" {rule.also}" if rule.also else ""
    off = " Off by default; `--all` reports it." if rule.severity in rule.off else ""
    facts = f"Group: {rule.group}. Severity: {rule.severity}.{also}{off} Suppress it with {suppression}."
    return f"{_MARK}\n\n# {rule.name}\n\n**{rule.title}.**\n\n{facts}\n\n{as_markdown(rule)}"


def _index() -> str:
    lines = [
        _MARK,
        "",
        "# The rules of `brim doctor`",
        "",
        f"{len(RULES)} rules. `brim doctor --explain RULE` shows the same in the terminal; [doctor.md](../doctor.md) is the guide.",
    ]
    for group in GROUPS:
        own = [rule for rule in RULES.values() if rule.group == group]
        if own:
            lines += ["", f"## {group}", "", "| rule | severity | what is wrong |", "|---|---|---|"]
            lines += [
                f"| [{rule.name}]({rule.name}.md) | {rule.severity} | {rule.title.replace('|', chr(92) + '|')} |" for rule in own
            ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the pages to the folder that is named."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m brim.audit.pages FOLDER\n")
        return 2
    sys.stdout.write(f"{write_pages(arguments[0])} pages in {arguments[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
