"""Clamps as findings: the table of what is set and what is used, the message, the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.audit.rules import RULES as ALL_RULES
from brim.audit.source import mending
from brim.audit.source.clamps import SHOWN, Clamp, clamps_in, dense, takes_effect
from brim.audit.source.terms import UNKNOWN, World, evaluate
from brim.audit.source.uses import WINDOW, Use
from brim.locale import _, sentences
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.audit.found import Found
    from brim.audit.source.flow import Flow
    from brim.records.findings import Severity


def check_clamps(flow: Flow) -> Iterator[Found]:
    """One finding for every clamp whose table has a row that differs."""
    for clamp in clamps_in(flow):
        rows = rows_of(clamp)
        if _makes_a_difference(clamp, rows):
            yield _as_found(clamp, rows, flow)


def _makes_a_difference(clamp: Clamp, rows: Sequence[InForce]) -> bool:
    """Whether the table shows a change: a row that differs, and, where the machine decides, conditions that differ."""
    if all(row.in_force is None or row.in_force == row.set for row in rows):
        return False
    known = [
        (row.set, row.in_force) for row in rows if isinstance(row.in_force, int | float) and isinstance(row.set, int | float)
    ]
    if (
        not clamp.tiers
        and len({now for _set, now in known}) == 1
        and any(a < b for a, b in known)
        and any(a > b for a, b in known)
    ):
        return False  # something else decides
    by_condition: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        by_condition.setdefault(row.when, []).append((row.set, row.in_force))
    tiers = list(by_condition.values())
    return not clamp.tiers or any(each != tiers[0] for each in tiers)


def _as_found(clamp: Clamp, rows: tuple[InForce, ...], flow: Flow) -> Found:
    module = clamp.culprit.module
    edits = mending.edits_of(clamp)
    first, last = mending.span_of(clamp)
    return module.found(
        clamp.rule,
        first,
        _message(clamp),
        until=last,
        confidence="high" if clamp.varied.is_the_users else "medium",
        severity=None if clamp.varied.is_the_users and takes_effect(clamp.use) else _at_most_medium(clamp.rule),
        in_force=rows,
        edits=edits,
        is_safe=bool(edits) and not mending.serves_others(clamp, flow),
    )


def _at_most_medium(rule: str) -> Severity | None:
    return "medium" if ALL_RULES[rule].severity == "high" else None


def rows_of(clamp: Clamp) -> tuple[InForce, ...]:
    """What a user sets, and the value that is used; under each condition, if there are any."""
    rows: list[InForce] = []
    for when, world in clamp.tiers or ((clamp.when or clamp.use.when, World()),):
        for value in _to_show(clamp, world):
            result = in_force(clamp, value, world)
            known = result if result is not UNKNOWN and isinstance(result, int | float | str | bool) else None
            rows.append(InForce(setting=clamp.varied.name, set=value, in_force=known, when=when))
    return tuple(rows)


def in_force(clamp: Clamp, value: Any, world: World | None = None) -> Any:
    """The value that is used in the end, later clamps included; the value after this place if that is unknown."""
    last = evaluate(clamp.use.term, clamp.varied, value, world)
    return evaluate(clamp.culprit, clamp.varied, value, world) if last is UNKNOWN else last


def _to_show(clamp: Clamp, world: World) -> list[Any]:
    quantity = clamp.use.quantity
    values = list(SHOWN[quantity])
    if not clamp.tiers and all(in_force(clamp, value, world) == value for value in values):
        differing = [
            each for each in dense(quantity) if evaluate(clamp.culprit, clamp.varied, each, world) not in (each, UNKNOWN)
        ]
        values = sorted({differing[0], differing[len(differing) // 2], differing[-1]}) if differing else values
    own = clamp.varied.value
    if isinstance(own, int | float) and not isinstance(own, bool) and own > 0 and own not in values:
        values = sorted([*values, own])
    return values


def _message(clamp: Clamp) -> str:
    own = _own_value(clamp)
    name = clamp.varied.name
    if clamp.tiers:
        text = _("{setting} depends on the machine here, not only on what you set.").format(setting=name)
        return sentences(text, own)
    pairs = [(value, evaluate(clamp.culprit, clamp.varied, value)) for value in dense(clamp.use.quantity)]
    changed = {result: value for value, result in pairs if result not in (value, UNKNOWN)}
    code = _code(clamp)
    if len(changed) == 1:
        [(bound, value)] = changed.items()
        text = (
            _("`{code}` limits {setting} to at most {bound}.")
            if bound < value
            else _("`{code}` raises {setting} to at least {bound}.")
        )
        return sentences(text.format(code=code, setting=name, bound=bound), own)
    text = _("`{code}` changes {setting}.")
    return sentences(text.format(code=code, setting=name), own)


def _code(clamp: Clamp) -> str:
    node = clamp.culprit.node
    text = clamp.culprit.module.text_of(node).splitlines()
    return text[0].strip()[:80] if text else ""


def _own_value(clamp: Clamp) -> str:
    """What the user's own value becomes."""
    own, at = clamp.varied.value, clamp.varied.set_at
    if not isinstance(own, int | float) or clamp.tiers:
        return ""
    result = in_force(clamp, own)
    if result is UNKNOWN or result == own:
        return ""
    taker = _taker(clamp.use)
    if at is None:
        return _("You set {value}, {taker} gets {result}.").format(value=own, taker=taker, result=result)
    return _("You set {value} ({file}:{line}), {taker} gets {result}.").format(
        value=own, file=at[0], line=at[1], taker=taker, result=result
    )


def _taker(use: Use) -> str:
    """Who gets the value, as a message names it."""
    if use.call == WINDOW:
        return _("the optimizer step")
    name = use.call.rpartition(".")[2]
    if name.endswith(("Loader", "Trainer", "Sampler")):
        return _("the {name}").format(name=name)
    return name if takes_effect(use) else f"`{use.target or name}`"
