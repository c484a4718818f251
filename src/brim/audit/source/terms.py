"""What a value is made of: settings, constants, and what the code does to them on the way.

A term is what the flow (flow.py) finds for an expression. It can be evaluated for any value of a setting, which is how the table
"you set 8, 32, 64: in force 2, 2, 2" comes about: the code's own arithmetic, done by doctor.
"""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from brim.audit.source.module import Function, Module
from brim.audit.source.quantities import Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Kind = Literal["field", "flag", "key", "parameter", "constant", "environment", "default"]
"""Where a user sets it: a dataclass field, a command-line flag, a key of a config, a function's parameter, a name given a number in the
code, an environment variable; `default`: a parameter's default that nobody overrides."""


@dataclass(eq=False)
class Term:
    """A value, and the place in the code that made it."""

    module: Module
    node: ast.AST

    def parts(self) -> tuple[Term, ...]:
        """The terms that it is made of."""
        return ()


@dataclass(eq=False)
class Setting(Term):
    """A number that a user sets."""

    name: str
    quantity: Quantity | None
    kind: Kind
    value: Any = None
    """What it is set to in the code that was read; None if that is not known."""
    set_at: tuple[str, int] | None = None
    """Where it is set, if that is another place than `node`: file and line of a launcher or a config."""

    @property
    def is_the_users(self) -> bool:
        """Whether it is plainly meant to be set, rather than a number in the code."""
        return self.kind in {"field", "flag", "key", "environment", "parameter"}


@dataclass(eq=False)
class Constant(Term):
    """A literal."""

    value: Any


@dataclass(eq=False)
class Apply(Term):
    """An operation on other terms."""

    what: str
    operands: tuple[Term, ...]

    def parts(self) -> tuple[Term, ...]:
        """Its operands."""
        return self.operands


@dataclass(eq=False)
class Choice(Term):
    """One of two terms, by a condition: a ternary, or an `if` around assignments."""

    condition: Term
    then: Term
    otherwise: Term

    def parts(self) -> tuple[Term, ...]:
        """Condition and both sides."""
        return (self.condition, self.then, self.otherwise)


@dataclass(eq=False)
class Repeat(Term):
    """`while x > 16: x //= 2`: a value that a loop changes until its condition fails."""

    start: Term
    turning: Setting
    """Stands for the value at the beginning of a turn, in the two terms below."""
    condition: Term
    after: Term

    def parts(self) -> tuple[Term, ...]:
        """What it starts from."""
        return (self.start,)


@dataclass(eq=False)
class Opaque(Term):
    """Something that reading cannot know: a measurement, a library's answer, the length of the data."""

    text: str
    inputs: tuple[Term, ...] = ()

    def parts(self) -> tuple[Term, ...]:
        """What went into it."""
        return self.inputs


@dataclass(eq=False)
class Instance(Term):
    """An object of one of the project's classes."""

    owner: ast.ClassDef


@dataclass(eq=False)
class Namespace(Term):
    """What `parse_args()` returns."""


@dataclass(eq=False)
class ModuleRef(Term):
    """An imported module of the project."""

    target: Module


@dataclass(eq=False)
class ClassRef(Term):
    """A class of the project."""

    owner: ast.ClassDef


@dataclass(eq=False)
class FunctionRef(Term):
    """A function of the project; bound to an object if it is a method."""

    function: Function
    bound: Term | None = None
    closure: Any = None
    """What is known where it is defined, if that is inside another function."""


@dataclass(eq=False)
class Several(Term):
    """A tuple or list whose elements are known."""

    elements: tuple[Term, ...]

    def parts(self) -> tuple[Term, ...]:
        """Its elements."""
        return self.elements


@dataclass(eq=False)
class Filtered(Term):
    """`[size for size in (1, 2, 4) if size <= n]`: those of known elements that a condition lets through."""

    elements: tuple[Term, ...]
    turning: Setting
    """Stands for one element, in the condition."""
    condition: Term

    def parts(self) -> tuple[Term, ...]:
        """What the condition depends on."""
        return (self.condition, *self.elements)


@dataclass(eq=False)
class Mapping(Term):
    """A dictionary whose keys are known strings."""

    items: dict[str, Term]

    def parts(self) -> tuple[Term, ...]:
        """Its values."""
        return tuple(self.items.values())


MAX_PARTS = 200


def walk(term: Term) -> Iterator[Term]:
    """A term and all that it is made of, each once; bounded, for code that nobody wrote by hand."""
    seen: set[int] = set()
    waiting = [term]
    while waiting and len(seen) < MAX_PARTS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting.extend(reversed(each.parts()))


def settings_in(term: Term) -> list[Setting]:
    """The settings that a value depends on."""
    return [each for each in walk(term) if isinstance(each, Setting)]


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Any = _Unknown()


@dataclass(frozen=True)
class World:
    """One way in which the conditions that reading cannot decide may turn out."""

    truths: tuple[tuple[Choice, bool], ...] = ()

    def truth(self, choice: Choice) -> bool | None:
        """What this world assumes of a choice."""
        return next((truth for each, truth in self.truths if each is choice), None)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
    "min": lambda *values: min(values), "max": lambda *values: max(values), "int": int, "float": float, "bool": bool, "abs": abs,
    "round": round, "ceil": math.ceil, "floor": math.floor, "log2": math.log2, "sqrt": math.sqrt, "neg": operator.neg,
    "not": operator.not_, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "in": lambda one, many: one in many, "not in": lambda one, many: one not in many, "&": operator.and_,
    "|": operator.or_, "clip": lambda value, low, high: min(max(value, low), high),
}  # fmt: skip
_SCALES = {"*", "/", "//"}
_PARTIAL = {*_SCALES, "min", "max", "clip"}
"""Operations that may be done with some operands unknown."""


def evaluate(term: Term, varied: Setting, value: Any, world: World | None = None, held: frozenset[int] = frozenset()) -> Any:
    """The value of a term when the user sets `varied` to `value`; UNKNOWN where that cannot be said.

    Next to a known value that depends on `varied`, an unknown bound of `min` is left out and an unknown factor (the number of GPUs)
    counts as 1. Without one the result is UNKNOWN: `max(1, len(data))` is not 1. `held` are terms that count as what the user set, by
    their id: what happens inside them is looked at elsewhere.
    """
    try:
        return _Reckoning(varied, value, world or World(), held).of(term, 0)
    except (ArithmeticError, TypeError, ValueError, RecursionError, MemoryError, AttributeError):
        return UNKNOWN


class _Reckoning:
    """One evaluation: each term once, however many ways lead to it."""

    def __init__(self, varied: Setting, value: Any, world: World, held: frozenset[int]) -> None:
        self._varied, self._value, self._world, self._held = varied, value, world, held
        self._known: dict[int, Any] = dict.fromkeys(held, value)

    def of(self, term: Term, depth: int) -> Any:
        """The value of a term."""
        known = self._known.get(id(term), self)
        if known is self:
            known = UNKNOWN if depth > 80 or len(self._known) > MAX_PARTS else self._reckon(term, depth + 1)
            self._known[id(term)] = known
        return known

    def _reckon(self, term: Term, depth: int) -> Any:
        if isinstance(term, Setting):
            if is_same(term, self._varied):
                return self._value
            return term.value if term.kind in {"constant", "default"} and term.value is not None else UNKNOWN
        if isinstance(term, Constant):
            return term.value
        if isinstance(term, Choice):
            return self._choose(term, depth)
        if isinstance(term, Repeat):
            return _repeated(term, self.of(term.start, depth))
        if isinstance(term, Apply):
            return self._apply(term, depth)
        if isinstance(term, Several):
            values = [self.of(each, depth) for each in term.elements]
            return UNKNOWN if any(each is UNKNOWN for each in values) else tuple(values)
        if isinstance(term, Filtered):
            return self._filter(term, depth)
        return UNKNOWN

    def _apply(self, term: Apply, depth: int) -> Any:
        operands = list(_bounds(term)) if term.what in {"min", "max"} else list(term.operands)
        values = [self.of(each, depth) for each in operands]
        if term.what in _PARTIAL and any(value is UNKNOWN for value in values):
            known = [each for each, value in zip(operands, values, strict=True) if value is not UNKNOWN]
            if not any(self._depends(each) for each in known):
                return UNKNOWN
        return _apply(term.what, values)

    def _depends(self, term: Term) -> bool:
        """Whether the varied setting, or a term that counts as it, is part of a term."""
        return any(id(each) in self._held or (isinstance(each, Setting) and is_same(each, self._varied)) for each in walk(term))

    def _filter(self, term: Filtered, depth: int) -> Any:
        kept = []
        for element in term.elements:
            one = self.of(element, depth)
            inner = _Reckoning(self._varied, self._value, self._world, self._held)
            inner._known[id(term.turning)] = one
            passes = inner.of(term.condition, depth)
            if one is UNKNOWN or passes is UNKNOWN:
                return UNKNOWN
            kept += [one] if passes else []
        return tuple(kept) or UNKNOWN

    def _choose(self, term: Choice, depth: int) -> Any:
        condition = self.of(term.condition, depth)
        truth = self._world.truth(term) if condition is UNKNOWN else bool(condition)
        if truth is None:
            sides = [self.of(each, depth) for each in (term.then, term.otherwise)]
            return sides[0] if sides[0] == sides[1] else UNKNOWN
        return self.of(term.then if truth else term.otherwise, depth)


def _bounds(term: Apply) -> Iterator[Term]:
    """The operands of `min(a, min(b, c))`, nested ones of the same operation included."""
    for each in term.operands:
        if isinstance(each, Apply) and each.what == term.what and len(each.operands) > 1:
            yield from _bounds(each)
        else:
            yield each


def _repeated(term: Repeat, value: Any) -> Any:
    for _turn in range(64):
        goes_on = UNKNOWN if value is UNKNOWN else evaluate(term.condition, term.turning, value)
        if goes_on is UNKNOWN:
            return UNKNOWN
        if not goes_on:
            return value
        value = evaluate(term.after, term.turning, value)
    return UNKNOWN


def _apply(what: str, values: list[Any]) -> Any:
    known = [each for each in values if each is not UNKNOWN]
    if what in {"or", "and"}:
        if values and values[0] is UNKNOWN:
            return UNKNOWN
        return next((each for each in values[:-1] if bool(each) == (what == "or")), values[-1])
    if what.startswith("pick"):
        return values[0][int(what.removeprefix("pick"))] if isinstance(values[0], tuple) else UNKNOWN
    if what in {"min", "max"} and len(values) == 1 and isinstance(values[0], tuple):
        values = known = list(values[0])
    if what.startswith("sorted"):
        return sorted(values)[int(what.removeprefix("sorted"))] if len(known) == len(values) else UNKNOWN
    if len(known) == len(values):
        if what == "**":
            return values[0] ** values[1] if abs(values[0]) <= 1024 and abs(values[1]) <= 64 else UNKNOWN
        if what == "*" and not all(isinstance(each, int | float) for each in values):
            return UNKNOWN
        return _OPERATORS[what](*values) if what in _OPERATORS else UNKNOWN
    if what in {"min", "max"} and known:
        return min(known) if what == "min" else max(known)
    if what == "clip" and values[0] is not UNKNOWN:
        low, high = (
            fallback if each is UNKNOWN else each for each, fallback in zip(values[1:], (-math.inf, math.inf), strict=True)
        )
        return min(max(values[0], low), high)
    if what in _SCALES and len(values) == 2 and values[0] is not UNKNOWN:
        return values[0]
    if what == "*" and len(values) == 2:
        return values[1]
    return UNKNOWN


def is_same(one: Setting, other: Setting) -> bool:
    """Whether two settings are one for the user: the same name, of which both read the config."""
    return one is other or (one.name == other.name and one.is_the_users and other.is_the_users)
