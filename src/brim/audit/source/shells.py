"""Launchers that change what they are given: `[ "$BS" -gt 16 ] && BS=16`, a flag with a number although `$1` was the batch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from brim.audit.found import Edit, Found
from brim.audit.source.clamps import RULES, SHOWN
from brim.audit.source.launchers import logical_lines
from brim.audit.source.quantities import quantity_of
from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.source.launchers import Launch, Launches
    from brim.audit.source.module import Source
    from brim.audit.source.project import Project
    from brim.audit.source.quantities import Quantity

_TEST = re.compile(
    r"""\[\[?\s*["']?\$\{?(?P<name>\w+)\}?["']?\s*(?P<sign>-gt|-ge|-lt|-le|>|<)\s*["']?(?P<bound>\d+)["']?\s*\]?\]"""
)
_ARITHMETIC = re.compile(r"\(\(\s*\$?(?P<name>\w+)\s*(?P<sign>>=?|<=?)\s*(?P<bound>\d+)\s*\)\)")
_TERNARY = re.compile(
    r"(?P<target>\w+)=\$\(\(\s*\$?(?P<name>\w+)\s*(?P<sign>>=?|<=?)\s*\d+\s*\?\s*(?P<then>\$?\w+)\s*:\s*(?P<other>\$?\w+)\s*\)\)"
)
_ASSIGNED = re.compile(r"(?:^|;|&&|then|\s)\s*(?P<name>\w+)=[\"']?(?P<value>\d+)[\"']?\s*(?:$|;|#|\s)")
_GIVEN = re.compile(r"^\s*(?:export\s+)?(?P<name>\w+)=[\"']?\$\{?(?P<place>\d)(?::?-[^}]*)?\}?[\"']?\s*(?:#.*)?$", re.MULTILINE)
_NEAR = 3


def check_shells(project: Project, launches: Launches) -> Iterator[Found]:
    """Every launcher of a project."""
    for shell in project.shells:
        mine = [each for each in launches.found if each.file == shell.file]
        yield from _clamps(shell, mine)
        yield from _ignored(shell, mine)


def _quantity(name: str, launches: list[Launch]) -> Quantity | None:
    """What a variable means: by its name, or by the flag that it is handed to."""
    known = quantity_of(name)
    for launch in launches:
        for flag, launched in launch.flags.items():
            if known is None and re.search(rf"\$\{{?{re.escape(name)}\b", launched.text):
                known = quantity_of(flag)
    return known


def _clamps(shell: Source, launches: list[Launch]) -> Iterator[Found]:
    lines = shell.text.splitlines()
    for number, line in enumerate(lines, start=1):
        ternary = _TERNARY.search(line)
        if ternary is not None:
            bounds = [int(each) for each in (ternary["then"], ternary["other"]) if each.isdecimal()]
            if len(bounds) == 1:
                is_upper = ternary["sign"].startswith(">") == ternary["then"].isdecimal()
                yield from _found(shell, number, number, ternary["name"], bounds[0], launches, is_upper=is_upper)
            continue
        test = _TEST.search(line) or _ARITHMETIC.search(line)
        if test is None:
            continue
        for place in range(number, min(number + _NEAR, len(lines)) + 1):
            rest = lines[place - 1][test.end() if place == number else 0 :]
            assigned = _ASSIGNED.search(rest)
            if assigned is not None and assigned["name"] == test["name"]:
                is_upper = test["sign"] in {"-gt", "-ge", ">", ">="}
                yield from _found(shell, number, place, test["name"], int(assigned["value"]), launches, is_upper=is_upper)
                break
            if re.match(r"\s*(fi|else)\b", rest):
                break


def _found(
    shell: Source, line: int, end: int, name: str, bound: int, launches: list[Launch], *, is_upper: bool
) -> Iterator[Found]:
    quantity = _quantity(name, launches)
    if quantity not in RULES:
        return
    text = (
        _("The launcher holds {setting} down: it is never above {bound}.")
        if is_upper
        else _("The launcher pushes {setting} up: it is never below {bound}.")
    )
    rows = tuple(
        InForce(setting=name, set=each, in_force=min(each, bound) if is_upper else max(each, bound)) for each in SHOWN[quantity]
    )
    yield Found(
        rule=RULES[quantity],
        file=shell.file,
        line=line,
        end_line=end,
        message=text.format(setting=name, bound=bound),
        in_force=rows,
    )


def _ignored(shell: Source, launches: list[Launch]) -> Iterator[Found]:
    """An argument of the launcher that has a name, and a number in the flag that it is for."""
    for match in _GIVEN.finditer(shell.text):
        quantity = quantity_of(match["name"])
        rule = {"batch": "batch-hard-coded", "accumulation": "accumulation-hard-coded", "workers": "workers-hard-coded"}.get(
            quantity or ""
        )
        if rule is None or quantity is None or any(_is_handed_on(match["name"], launch) for launch in launches):
            continue
        for launch in launches:
            for flag, launched in launch.flags.items():
                if quantity_of(flag) != quantity or not isinstance(launched.value, int) or launched.text.startswith("$"):
                    continue
                text = _("The launcher takes {setting} as ${place}, and hands {value} to --{flag} whatever it is.")
                rows = tuple(InForce(setting=match["name"], set=each, in_force=launched.value) for each in SHOWN[quantity])
                yield Found(
                    rule=rule,
                    file=shell.file,
                    line=launched.line,
                    end_line=launched.line,
                    message=text.format(setting=match["name"], place=match["place"], value=launched.value, flag=flag),
                    in_force=rows,
                    edits=_edits(shell, launched.line, launched.text, match["name"]),
                    is_safe=False,
                )


def _is_handed_on(name: str, launch: Launch) -> bool:
    texts = [each.text for each in (*launch.flags.values(), *launch.places, *launch.environment.values())]
    return any(re.search(rf"\$\{{?{re.escape(name)}\b", text) for text in texts)


def _edits(shell: Source, line: int, text: str, name: str) -> tuple[Edit, ...]:
    whole = next((joined for number, joined in logical_lines(shell.text) if number == line), "")
    row = shell.text.splitlines()[line - 1]
    match = re.search(rf"(?<=[\s=]){re.escape(text)}(?=\s|$)", row)
    if match is None or whole.count(f" {text} ") > 1:
        return ()
    return (Edit(file=shell.file, line=line, column=match.start(), end_line=line, end_column=match.end(), text=f'"${name}"'),)
