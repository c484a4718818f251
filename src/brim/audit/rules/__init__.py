"""The rules of the doctor by name. The checks that find them are in source/, config/ and run/."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.rules.rule import GROUPS, Rule, read_rule
from brim.errors import UnknownNameError
from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Iterable

    from brim.records.findings import Severity

RULES: Final[dict[str, Rule]] = {
    rule.name: rule
    for rule in sorted(
        map(read_rule, Path(__file__).parent.glob("*.md")),
        key=lambda rule: (GROUPS.index(rule.group), rule.name),
    )
}


def is_off_by_default(rule: str, severity: Severity) -> bool:
    """Whether a finding is reported only on request."""
    return severity in RULES[rule].off


def find_rule(name: str) -> Rule:
    """The rule of that name; an error names the nearest."""
    rule = RULES.get(name.strip().lower().replace("_", "-"))
    if rule is not None:
        return rule
    nearest = nearest_rules(name)
    raise UnknownNameError(
        sentences(
            _("There is no rule {name!r}.").format(name=name),
            _("Nearest: {names}.").format(names=", ".join(nearest)) if nearest else "",
        ),
        nearest=nearest,
        hint=_("`brim doctor --rules` lists all."),
    )


def nearest_rules(name: str) -> tuple[str, ...]:
    """Rules with a similar name, or whose name contains this one."""
    given = name.strip().lower().replace("_", "-")
    containing = [rule for rule in RULES if given and given in rule]
    return tuple(dict.fromkeys([*get_close_matches(given, RULES, n=3), *containing]))[:3]


def names_of(names: Iterable[str]) -> frozenset[str]:
    """The names of rules that a person gave, checked."""
    return frozenset(find_rule(name).name for name in names)
