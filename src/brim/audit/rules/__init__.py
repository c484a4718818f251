"""Every rule of the doctor, by name. The texts are here; the checks that find them stand in source/, config/ and run/."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from brim.audit.rules import calls, config, ignored, loops, run, values
from brim.errors import UnknownNameError
from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Iterable

    from brim.audit.rules.rule import Rule
    from brim.records.findings import Severity


RULES: Final[dict[str, Rule]] = {
    rule.name: rule for rule in (*values.RULES, *ignored.RULES, *loops.RULES, *calls.RULES, *config.RULES, *run.RULES)
}

_EVERY: Final[frozenset[Severity]] = frozenset({"high", "medium", "low"})
OFF_BY_DEFAULT: Final[dict[str, frozenset[Severity]]] = {
    "item-every-step": _EVERY,
    "workers-hard-coded": _EVERY,
    "pinning-off": _EVERY,
    "config-cancels": frozenset({"low"}),
}
"""Findings of little value: reported with `--all`, or if the rule is selected by name."""


def is_off_by_default(rule: str, severity: Severity) -> bool:
    """Whether a finding is only reported on request."""
    return severity in OFF_BY_DEFAULT.get(rule, ())


def find_rule(name: str) -> Rule:
    """The rule of that name; the nearest names are told where there is none."""
    found = RULES.get(name.strip().lower().replace("_", "-"))
    if found is not None:
        return found
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
    """Rules whose names look like this one, or hold it."""
    given = name.strip().lower().replace("_", "-")
    holding = [each for each in RULES if given and given in each]
    return tuple(dict.fromkeys([*get_close_matches(given, RULES, n=3), *holding]))[:3]


def names_of(names: Iterable[str]) -> frozenset[str]:
    """The rules that a person named, checked."""
    return frozenset(find_rule(name).name for name in names)
