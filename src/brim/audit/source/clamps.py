"""Clamps: code that changes a setting on its way to the DataLoader or the optimizer step.

A setting is varied, and the code's own arithmetic is done for each value. An expression is a clamp if some values pass unchanged (so that
it is not a mere scaling by a number of GPUs) and others do not. A clamp without a row that differs is not reported.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from brim.audit.source import mending
from brim.audit.source.module import Function
from brim.audit.source.terms import (
    UNKNOWN,
    Apply,
    Choice,
    Constant,
    Opaque,
    Repeat,
    Setting,
    Term,
    World,
    evaluate,
    is_same,
    settings_in,
    walk,
)
from brim.audit.source.uses import WINDOW, Use
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.audit.source.flow import Flow
    from brim.audit.source.module import Module
    from brim.audit.source.quantities import Quantity

RULES: dict[Quantity, str] = {
    "batch": "batch-clamped",
    "effective-batch": "batch-clamped",
    "eval-batch": "eval-batch-clamped",
    "accumulation": "accumulation-clamped",
    "workers": "workers-clamped",
    "learning-rate": "learning-rate-clamped",
    "length": "length-clamped",
}
SHOWN: dict[Quantity, tuple[Any, ...]] = {
    "batch": (8, 32, 64),
    "effective-batch": (32, 64, 256),
    "eval-batch": (8, 32, 64),
    "accumulation": (1, 4, 8),
    "workers": (2, 4, 8),
    "learning-rate": (1e-5, 1e-4, 1e-3),
    "length": (512, 2048, 8192),
    "pinning": (True,),
}
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 30, 32, 48, 50, 64, 96, 100, 128, 192, 256, 500, 512, 1000, 1024)
_DENSE: dict[Quantity, tuple[Any, ...]] = {
    "learning-rate": (1e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1),
    "length": (32, 64, 100, 128, 256, 300, 384, 512, 700, 1000, 1024, 2000, 2048, 3000, 4096, 8192, 16384, 32768, 131072),
    "workers": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
}
_HARDWARE = re.compile(
    r"memory|mem_|_mem\b|\bmem\b|vram|free_?g|_gb\b|\bgb\b|gib\b|get_device_properties|get_device_capability|get_device_name|nvidia|"
    r"pynvml|nvml|gpu_?name|capability|显存",
    re.IGNORECASE,
)
_ASKED_FOR = re.compile(
    r"debug|smoke|dry|test|eval|profil|overfit|quick|sanity|demo|platform|os\.name|win32|is_train|training|stream|resume|tpu|mps",
    re.IGNORECASE,
)
_OTHER_WORK = re.compile(
    r"^\s*(from|import) (requests|aiohttp|httpx|flask|fastapi|scrapy|sqlalchemy|psycopg2?|redis|boto3|kafka)\b", re.MULTILINE
)
"""Crawlers, servers and databases have batches and workers too; a file that imports these and no torch is about them."""
_SIDE_WORK = re.compile(
    r"(^|_)(tests?|demo|debug|smoke|dry_run|bench|benchmark|profile|profiling|sanity|examples?|toy|dummy|mock|fake|self_test)(_|$)"
    r"|^Test[A-Z]"
)
_SIDE_MODE = re.compile(r"debug|smoke|dry_?run|sanity|demo\b|overfit|quick|profil|fast_dev|tiny", re.IGNORECASE)
TAKERS = re.compile(
    r"(^|\.)(?!Synthetic|Dummy|Fake|Mock|Toy)"
    r"\w*(DataLoader|BatchSampler|TrainingArguments|SFTConfig|DPOConfig|Accelerator|Trainer|GradientAccumulationPlugin)$"
)
"""Calls that take a batch size or an accumulation for training."""
_SCHEDULE = re.compile(
    r"sched|decay|warm|anneal|cosine|lambda|ramp|(get|adjust|update|compute|current)_(lr|learning_rate)", re.IGNORECASE
)
_COMPARISONS = {"<", "<=", ">", ">=", "==", "!=", "in", "not in"}
_MOST_PLACES = 200
_LARGE, _MOST_LARGE = 80, 25
"""Values of so many parts are looked at so often in a project: nobody writes many, and each takes long."""
_FOR: dict[Quantity, set[Quantity]] = {"batch": {"batch", "eval-batch"}, "eval-batch": {"eval-batch", "batch"}}


@dataclass(frozen=True, eq=False)
class Clamp:
    """A place that changes a setting."""

    culprit: Apply | Choice | Repeat
    varied: Setting
    use: Use
    tiers: tuple[tuple[str, World], ...] = ()
    """By a condition that only the machine can decide: what it is, and what it means for the choices. Empty: no condition."""
    when: str = ""
    """Any other condition around it."""

    @property
    def rule(self) -> str:
        """Which rule it breaks."""
        is_evaluation = self.use.quantity == "batch" and (self.use.is_for_evaluation or self.varied.quantity == "eval-batch")
        return "eval-batch-clamped" if is_evaluation else RULES[self.use.quantity]


def clamps_in(flow: Flow) -> Iterator[Clamp]:
    """Every place that changes a setting, once."""
    found: dict[tuple[int, str], Clamp] = {}
    large = 0
    for use in flow.uses:
        if use.quantity not in RULES or _is_other_work(use.module) or is_side_work(use):
            continue
        large += sum(1 for _part in walk(use.term)) > _LARGE
        if large > _MOST_LARGE:
            continue
        for clamp in clamps_of(use):
            key = (id(clamp.culprit.node), clamp.varied.quantity or use.quantity)
            if key not in found or _rank(clamp) > _rank(found[key]):
                found[key] = clamp
    sliced = _sliced(flow.uses)
    clamps = [each for each in found.values() if not _is_made_up_for(each, sliced)]
    ladders: dict[tuple[int, str], list[Clamp]] = {}
    for clamp in clamps:
        if clamp.tiers:
            ladders.setdefault((id(clamp.culprit.module), clamp.varied.name), []).append(clamp)
    for clamp in clamps:
        near = ladders.get((id(clamp.culprit.module), clamp.varied.name), ())
        if not any(_is_rung_of(clamp, ladder) for ladder in near):
            yield clamp


def _sliced(uses: Sequence[Use]) -> dict[int, list[Term]]:
    """By each node of a divisor of an accumulation (by its id): what is divided."""
    found: dict[int, list[Term]] = {}
    seen: set[int] = set()
    for use in uses:
        if use.quantity != "accumulation":
            continue
        for term in walk(use.term):
            is_division = isinstance(term, Apply) and term.what in {"//", "/"} and len(term.operands) == 2
            if is_division and id(term) not in seen:
                seen.add(id(term))
                for each in walk(term.parts()[1]):
                    found.setdefault(id(each.node), []).append(term.parts()[0])
    return found


def _is_made_up_for(clamp: Clamp, sliced: dict[int, list[Term]]) -> bool:
    """`micro = min(batch, 4); accumulation = batch // micro`: the step is sliced, and the batch is as it was asked for."""
    divided = sliced.get(id(clamp.culprit.node), ()) if clamp.use.quantity == "batch" else ()
    return any(_contains(each, clamp.varied) for each in divided)


@lru_cache(maxsize=256)
def _is_other_text(text: str) -> bool:
    return "torch" not in text and "transformers" not in text and _OTHER_WORK.search(text) is not None


def _is_other_work(module: Module) -> bool:
    return _is_other_text(module.source.text)


def is_side_work(use: Use) -> bool:
    """Whether a use stands in a test, a demo or a debug mode."""
    if use.when and not use.when.startswith("not ") and _SIDE_MODE.search(use.when):
        return True
    around = [each.name for each in use.module.above(use.node) if isinstance(each, Function | ast.ClassDef)]
    return any(_SIDE_WORK.search(name) for name in around)


def _rank(clamp: Clamp) -> tuple[bool, bool, bool, bool]:
    """Of several ways to one place: for training, set by a user, where it takes effect, with a known number."""
    return (not clamp.rule.startswith("eval"), clamp.varied.is_the_users, takes_effect(clamp.use), clamp.varied.value is not None)


def takes_effect(use: Use) -> bool:
    """Whether a use is where the value has its effect: a loader, the arguments of a trainer, the test for the optimizer step."""
    return use.call == WINDOW or TAKERS.search(use.call) is not None


def _is_rung_of(clamp: Clamp, ladder: Clamp) -> bool:
    """Whether a clamp is part of a ladder of conditions, which is reported as a whole."""
    if clamp is ladder or clamp.culprit.module is not ladder.culprit.module or clamp.varied.name != ladder.varied.name:
        return False
    (first, last), (top, bottom) = _lines(clamp), _lines(ladder)
    return top <= first and last <= bottom and (top, bottom) != (first, last)


def _lines(clamp: Clamp) -> tuple[int, int]:
    first, last = mending.span_of(clamp)
    return getattr(first, "lineno", 1), getattr(last, "end_lineno", 1)


def clamps_of(use: Use) -> list[Clamp]:
    """What changes the settings that this value is made of."""
    found: list[Clamp] = []
    for varied in _varied(use):
        _descend(use.term, varied, use, found, set())
    return found


def _varied(use: Use) -> list[Setting]:
    """The settings that a user would turn to change this value."""
    wanted: set[Quantity] = _FOR.get(use.quantity, {use.quantity})
    inside = settings_in(use.term)
    users = [each for each in inside if each.is_the_users and (each.quantity in wanted or each.name.startswith("argv["))]
    if not users:
        constants = [each for each in inside if each.kind in {"constant", "default"} and each.quantity in wanted]
        users = constants if len(constants) == 1 and constants[0] is not use.term else []
        if use.quantity == "learning-rate":
            # Schedules compute with learning rates all the time; only what a user sets is looked at.
            users = [each for each in users if each.name.isupper()]
    elif use.quantity == "learning-rate":
        users = [each for each in users if each.kind in {"field", "flag", "key", "environment"}]
    unique: list[Setting] = []
    for each in users:
        if not any(is_same(each, other) for other in unique):
            unique.append(each)
    return unique[:3]


def _contains(term: Term, varied: Setting) -> bool:
    return any(isinstance(each, Setting) and is_same(each, varied) for each in walk(term))


def _descend(term: Term, varied: Setting, use: Use, found: list[Clamp], seen: set[int], when: str = "") -> None:
    if id(term) in seen or len(seen) > _MOST_PLACES or not _contains(term, varied):
        return
    seen.add(id(term))
    if isinstance(term, Choice):
        decided = evaluate(term.condition, varied, dense(use.quantity)[0])
        if decided is UNKNOWN and _is_about_the_machine(term.condition):
            tiers = _tiers(term)
            if any(not _is_identity(term, varied, use.quantity, world) for _when, world in tiers):
                found.append(Clamp(term, varied, use, tiers))
            return
        if decided is UNKNOWN:
            if not _was_asked_for(term.condition):
                _descend(term.then, varied, use, found, seen, _text(term.condition))
                _descend(term.otherwise, varied, use, found, seen, when)
            return
        if not _contains(term.condition, varied):
            # Decided by something else: a constant argument. Only one side is ever in force.
            _descend(term.then if decided else term.otherwise, varied, use, found, seen, when)
            return
    if isinstance(term, Apply | Choice | Repeat):
        _blame(term, varied, use, found, seen, when)


def _blame(term: Apply | Choice | Repeat, varied: Setting, use: Use, found: list[Clamp], seen: set[int], when: str) -> None:
    """Whether this place changes what comes in; then the places before it."""
    if isinstance(term, Apply) and term.what in {*_COMPARISONS, "not"}:
        return
    if use.quantity == "learning-rate" and _is_schedule(term, varied):
        return
    if isinstance(term, Apply) and _is_arithmetic(term, varied) and _changes(term, varied, use.quantity):
        found.append(Clamp(term, varied, use, when=when))
        return
    inner = [each for each in term.parts() if _contains(each, varied)]
    if isinstance(term, Choice):
        inner = [each for each in inner if each is not term.condition]
    # What comes in counts as what the user set: each place is blamed for its own part only.
    held = frozenset(id(each) for each in inner if isinstance(each, Apply | Choice | Repeat))
    is_known = not any(isinstance(each, Opaque) for each in inner)
    if is_known and _changes(term, varied, use.quantity, held):
        found.append(Clamp(term, varied, use, when=when))
    for each in inner:
        _descend(each, varied, use, found, seen, when)


_ARITHMETIC = {"+", "-", "*", "/", "//", "%", "**", "neg", "int", "ceil", "floor", "round", "log2", "sqrt", "float", "abs"}


def _is_arithmetic(term: Term, varied: Setting) -> bool:
    """`x // 8 * 8`, `x - x % 8`, `2 ** int(log2(x))`: rounding by numbers in the code, taken as one thing."""
    every = list(walk(term))
    inside = [each for each in every if isinstance(each, Apply)]
    leaves = [each for each in every if not isinstance(each, Apply)]
    return (
        len(inside) > 1
        and all(each.what in _ARITHMETIC for each in inside)
        and all(
            isinstance(each, Constant) or (isinstance(each, Setting) and (is_same(each, varied) or each.kind == "constant"))
            for each in leaves
        )
    )


def _is_schedule(term: Term, varied: Setting) -> bool:
    """Whether a learning rate is computed from the time, or by a function that says so."""
    function = next((each for each in term.module.above(term.node) if isinstance(each, Function)), None)
    if function is not None and _SCHEDULE.search(function.name):
        return True
    leaves = [each for each in walk(term) if not each.parts()]
    return not all(isinstance(each, Constant) or (isinstance(each, Setting) and is_same(each, varied)) for each in leaves)


def dense(quantity: Quantity) -> tuple[Any, ...]:
    """Many values of a quantity."""
    return _DENSE.get(quantity, _COUNTS)


def _is_identity(term: Term, varied: Setting, quantity: Quantity, world: World | None = None) -> bool:
    results = ((value, evaluate(term, varied, value, world or World())) for value in dense(quantity))
    return all(result is UNKNOWN or result == value for value, result in results)


def _changes(term: Term, varied: Setting, quantity: Quantity, held: frozenset[int] = frozenset()) -> bool:
    """Whether some values come through and others do not."""
    pairs = [(value, evaluate(term, varied, value, None, held)) for value in dense(quantity)]
    known = [(value, result) for value, result in pairs if result is not UNKNOWN and isinstance(result, int | float)]
    if len({result for _value, result in known}) == 1 and any(v < r for v, r in known) and any(v > r for v, r in known):
        return False  # the same number whatever is set: another value, and not this one clamped
    return any(value == result for value, result in known) and any(value != result for value, result in known)


def _is_about_the_machine(condition: Term) -> bool:
    """A number or name of the machine, compared with one that stands in the code: `free_gb < 8`, `"A100" not in name`."""
    return any(
        isinstance(each, Apply)
        and each.what in _COMPARISONS
        and any(_is_number(side) for side in each.operands)
        and any(_is_of_the_machine(side) for side in each.operands)
        for each in walk(condition)
        if not isinstance(each, Opaque)
    )


def _is_number(term: Term) -> bool:
    """Whether a term stands in the code as a number or text: `8`, `8 * 1024**3`, `LOW_MEMORY`."""
    leaves = [each for each in walk(term) if not each.parts()]
    return all(isinstance(each, Constant) or (isinstance(each, Setting) and each.kind == "constant") for each in leaves)


def _is_of_the_machine(term: Term, depth: int = 0) -> bool:
    """Whether a value was measured: by its own text, or that of what it was computed from, not too far back."""
    text = term.text if isinstance(term, Opaque) else term.name if isinstance(term, Setting) else ""
    own = term.module.text_of(term.node) if depth == 0 and isinstance(term.node, ast.expr) else ""
    if _HARDWARE.search(text) or _HARDWARE.search(own):
        return True
    return depth < 4 and any(_is_of_the_machine(each, depth + 1) for each in term.parts())


def _was_asked_for(condition: Term) -> bool:
    return bool(_ASKED_FOR.search(_text(condition)))


def _text(condition: Term) -> str:
    """A condition as the code says it."""
    node = condition.node.test if isinstance(condition.node, ast.If) else condition.node
    return " ".join(condition.module.text_of(node).split()) if isinstance(node, ast.expr) else _("a condition")


def _tiers(choice: Choice) -> tuple[tuple[str, World], ...]:
    """The rungs of an if / elif / else: for each, what the code asks, and what the choices are then."""
    rungs: list[tuple[str, World]] = []
    refused: list[tuple[Choice, bool]] = []
    here: Term = choice
    while isinstance(here, Choice) and len(rungs) < 8:
        rungs.append((_text(here.condition), World((*refused, (here, True)))))
        refused.append((here, False))
        here = here.otherwise
    rungs.append((_("otherwise"), World(tuple(refused))))
    return tuple(rungs)
