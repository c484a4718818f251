"""A diagnosis on the terminal: a pure view of the record, and of the rules' texts."""

from __future__ import annotations

import shlex
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Final

from brim.audit.rules import RULES
from brim.cli._output import grid, indented, is_terminal, line_width, show
from brim.locale import _
from brim.machine.screen import printable_line
from brim.records.findings import SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from brim.audit.explaining import Explanation
    from brim.records import Diagnosis, Finding, InForce

_STYLES: Final = {"high": "bold red", "medium": "yellow", "low": "cyan"}
_GITHUB_LEVELS: Final = {"high": "error", "medium": "warning", "low": "notice"}
_PLACES: Final = 3
"""How many places of a repeated finding are shown."""
_CODE_LINES: Final = 5
_DIFF_LINES: Final = 12
_ROWS: Final = 12
_INDENT: Final = 5
_BEYOND: Final = 30
"""Characters of code before a change that tell where it is."""


def diagnosis_blocks(diagnosis: Diagnosis, *, verbose: bool = False) -> Iterator[RenderableType]:
    """The whole report: findings by group, the group with the most severe one first, and that one named again at the end.

    A terminal shows the bottom of what is long. Equal findings in several places are shown together, unless `verbose`.
    """
    groups: dict[str, list[Finding]] = {}
    for finding in sorted(diagnosis.findings, key=lambda each: SEVERITIES.index(each.severity)):
        groups.setdefault(RULES[finding.rule].group, []).append(finding)
    for group, findings in groups.items():
        yield from (_styled(f"{_heading(group)} ({len(findings)})", "bold"), "")
        for alike in [[each] for each in findings] if verbose else _alike(findings):
            yield from (*(_finding(alike[0]) if len(alike) == 1 else _repeated(alike)), "")
    if diagnosis.notes:
        yield from (*(_("Note: {text}").format(text=shown(text)) for text in diagnosis.notes), "")
    if diagnosis.findings:
        yield _most_severe(diagnosis)
    yield tally(diagnosis)
    if diagnosis.findings:
        yield grid(_next(diagnosis))


def _alike(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one rule, severity and message together, in the order of their first."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for each in findings:
        groups.setdefault((each.rule, each.severity, each.confidence, each.message), []).append(each)
    return list(groups.values())


def concise_line(finding: Finding) -> str:
    """One line: `train.py:8: high batch-clamped MESSAGE`."""
    message = " ".join(finding.message.split())
    return printable_line(f"{finding.file}:{finding.line}: {finding.severity} {finding.rule} {message}")


def github_line(finding: Finding) -> str:
    """A workflow command, which GitHub shows beside the code of a pull request.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    fields = {"file": finding.file, "line": finding.line, "endLine": finding.end_line, "title": f"brim doctor: {finding.rule}"}
    if finding.cell is not None:
        del fields["line"], fields["endLine"]  # lines of the cells, not of the file
    given = ",".join(f"{name}={_escaped(str(value), in_field=True)}" for name, value in fields.items())
    return f"::{_GITHUB_LEVELS[finding.severity]} {given}::{_escaped(finding.message)}"


def _escaped(text: str, *, in_field: bool = False) -> str:
    made = printable_line(text.replace("\r", "").replace("\n", "\0").replace("%", "%25").replace("\0", "%0A"))
    return made.replace(":", "%3A").replace(",", "%2C") if in_field else made


def show_explanation(told: Explanation) -> None:
    """One rule."""
    show(_styled(told.rule, "bold"), f"{told.title}.", "")
    facts = _("Group: {group}. Severity: {severity}.").format(group=_heading(told.group), severity=told.severity)
    show(*([facts, told.also] if told.also else [facts]), "")
    show(told.why, "")
    for heading, files in ((_("Wrong:"), told.bad), (_("Right:"), told.good)):
        show(heading)
        for name, text in files.items():
            if len(files) > 1:
                show(indented(f"{name}:"))
            show(*(_line(f"    {shown(line)}") for line in text.strip("\n").split("\n")), "")
    show(_("Fix: {text}").format(text=told.fix), "")
    show(_("Sources:"), *(indented(address) for address in told.sources))


def show_rules(rules: Iterable[Explanation]) -> None:
    """All rules, by group."""
    groups: dict[str, list[Explanation]] = {}
    for rule in rules:
        groups.setdefault(rule.group, []).append(rule)
    for group, own in groups.items():
        show(_styled(_heading(group), "bold"), grid((rule.rule, f"{rule.severity:7} {rule.title}") for rule in own), "")
    show(_("Rules: {count}. `brim doctor --explain RULE` explains one.").format(count=sum(len(own) for own in groups.values())))


def shown(text: str) -> str:
    """A line of somebody's code, as wide as it looks."""
    return printable_line(text.expandtabs(4))


def cut(text: str, columns: int) -> str:
    """A line that is no longer than the screen is wide. All of it is in the file, in the JSON and in what --diff prints."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1).rstrip() + "…"


def _heading(group: str) -> str:
    return {
        "batch": _("Batch size"),
        "accumulation": _("Gradient accumulation"),
        "step": _("Optimizer step"),
        "loading": _("Data loading"),
        "precision": _("Precision"),
        "model": _("Model"),
        "config": _("Config"),
        "run": _("Run"),
    }[group]


def _finding(finding: Finding) -> list[RenderableType]:
    """Where, what, the code, the actual values, the fix."""
    has_rows = any(row.in_force is not None for row in finding.in_force)
    rows = [_rows(finding.in_force)] if has_rows else []
    return [_head(finding, _place(finding)), *_message(finding), *_shown_code(finding), *rows, *_patch(finding)]


def _repeated(findings: Sequence[Finding]) -> list[RenderableType]:
    """One message for several places, of which the first few are shown."""
    first = findings[0]
    parts = [_head(first, _("{count} places").format(count=len(findings))), *_message(first)]
    if any(row.in_force is not None for row in first.in_force) and all(each.in_force == first.in_force for each in findings):
        parts.append(_rows(first.in_force))
    for each in findings[:_PLACES]:
        parts += [indented(_place(each)), *_shown_code(each), *_patch(each)]
    if len(findings) > _PLACES:
        parts.append(indented(_("... and {count} more; --verbose shows all.").format(count=len(findings) - _PLACES)))
    return parts


def _message(finding: Finding) -> list[RenderableType]:
    return [indented(shown(line)) for line in finding.message.splitlines()]


def _shown_code(finding: Finding) -> list[RenderableType]:
    """The lines of code, unless the fix shows them."""
    return _code(finding.code, finding.line) if finding.code and not _is_in_patch(finding) else []


def _place(finding: Finding) -> str:
    where = shown(f"{finding.file}:{finding.line}")
    return where if finding.cell is None else where + " " + _("(cell {number})").format(number=finding.cell)


def _head(finding: Finding, where: str) -> RenderableType:
    words = [finding.severity, finding.rule, where]
    if finding.confidence != "high":
        words.append(_("(confidence: {word})").format(word=finding.confidence))
    if not is_terminal():
        return "  ".join(words)
    from rich.text import Text

    return Text("  ").join([Text(words[0], style=_STYLES[finding.severity]), Text(words[1], style="bold"), *map(Text, words[2:])])


def _code(code: str, first: int) -> list[RenderableType]:
    """Lines with their numbers; of many the first few."""
    lines = code.split("\n")
    width = len(str(first + min(len(lines), _CODE_LINES) - 1))
    made = [_line(f"    {first + index:{width}} | {shown(text)}") for index, text in enumerate(lines[:_CODE_LINES])]
    return made if len(lines) <= _CODE_LINES else [*made, _line(f"    {' ' * width} | ...")]


def _rows(rows: Sequence[InForce]) -> RenderableType:
    """What you set, and the actual value. The condition may be long, so it is the column that is folded."""
    from rich.padding import Padding
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    has_conditions = any(row.when for row in rows)
    for heading in (_("Setting"), _("You set"), _("Actual")):
        made.add_column(heading, overflow="fold")
    if has_conditions:
        made.add_column(_("When"), overflow="fold")
    for row in rows[:_ROWS]:
        cells = [shown(row.setting), _value(row.set), _value(row.in_force, unknown=_("unknown"))]
        made.add_row(*cells, *([shown(row.when)] if has_conditions else []))
    if len(rows) > _ROWS:
        made.add_row("...")
    return Padding(made, (0, 0, 0, 4))


def _value(value: object, *, unknown: str = "-") -> str:
    return unknown if value is None else shown(str(value))


def _is_in_patch(finding: Finding) -> bool:
    """Whether the patch, as it is shown, takes away all lines that the finding is about: then they are read there, once."""
    return {f"-{line}" for line in finding.code.split("\n")} <= set(_changed(finding)[:_DIFF_LINES])


def _changed(finding: Finding) -> list[str]:
    """The lines that go and come, without what stands around them; of another file than the finding's, its name before them."""
    changed: list[str] = []
    for line in (finding.patch or "").splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/").rstrip("\t")
            changed += [] if file == finding.file.lstrip("/") else [file]
        elif line.startswith(("+", "-")) and not line.startswith("--- a/"):
            changed.append(line if finding.cell is None else line[0] + _code_of(line[1:]))
    return changed


def _code_of(line: str) -> str:
    """A line of a notebook's JSON as the code that it holds, where it holds one line of it."""
    import json

    try:
        code = json.loads(line.strip().removesuffix(","))
    except ValueError:
        return line
    return code.removesuffix("\n") if isinstance(code, str) and "\n" not in code[:-1] else line


def _patch(finding: Finding) -> list[RenderableType]:
    """What changes, with a title that says whether --fix applies it."""
    if not finding.patch:
        return []
    colours = {"+": "green", "-": "red"}
    lines = _changed(finding)
    made = [_line(f"    {line}", colours.get(line[:1], "")) for line in _near_the_change([shown(line) for line in lines])]
    made = made[:_DIFF_LINES]
    if len(lines) > len(made):
        made.append(_line("    ..."))
    title = _("Fix (--fix applies it):") if finding.is_safe else _("Suggested fix (review it):")
    return [indented(title), *made]


def _near_the_change(lines: list[str]) -> list[str]:
    """Where a line that goes and the one that comes for it first differ beyond the edge of the screen, both begin shortly before that."""
    made = list(lines)
    for index, (old, new) in enumerate(pairwise(lines)):
        alike = sum(1 for _pair in takewhile(lambda pair: pair[0] == pair[1], zip(old[1:], new[1:], strict=False)))
        if (old[:1], new[:1]) == ("-", "+") and alike + _INDENT + _BEYOND > line_width() and alike > _BEYOND:
            made[index : index + 2] = [f"{line[0]}…{line[alike + 1 - _BEYOND :]}" for line in (old, new)]
    return made


def _line(text: str, style: str = "") -> RenderableType:
    """One line of code, never wrapped."""
    short = cut(text, line_width())
    if not is_terminal():
        return short
    from rich.text import Text

    return Text(short, style=style, no_wrap=True)


def _styled(text: str, style: str) -> RenderableType:
    from rich.text import Text

    return Text(text, style=style) if is_terminal() else text


def tally(diagnosis: Diagnosis) -> str:
    """The last line: what was found, and in how much."""
    read = _("Files read: {files:,}, lines: {lines:,}.").format(files=diagnosis.files, lines=diagnosis.lines)
    held = _("Suppressed by comments: {count}.").format(count=diagnosis.ignored) if diagnosis.ignored else ""
    if not diagnosis.findings:
        return " ".join(part for part in (_("No findings."), read, held) if part)
    counts = {severity: sum(each.severity == severity for each in diagnosis.findings) for severity in SEVERITIES}
    parts = ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)
    found = _("Findings: {count} ({parts}).").format(count=len(diagnosis.findings), parts=parts)
    return " ".join(part for part in (found, read, held) if part)


def _most_severe(diagnosis: Diagnosis) -> str:
    first = min(diagnosis.findings, key=lambda each: SEVERITIES.index(each.severity))
    return _("Most severe: {rule}, {place}.").format(rule=first.rule, place=shown(f"{first.file}:{first.line}"))


def _next(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """What to type now."""
    rows = [(f"brim doctor --explain {diagnosis.findings[0].rule}", _("why it matters, with sources"))]
    safe = sum(finding.is_safe for finding in diagnosis.findings)
    if safe:
        command = shlex.join(["brim", "doctor", "--fix", *diagnosis.targets])
        rows.append((command, _("apply the safe fixes: {count}").format(count=safe)))
    return rows
