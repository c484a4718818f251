"""Steps counted wrongly: accumulation floored, `ceil` around a floor division, schedules that count micro-batches."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from brim.audit.source.clamps import is_side_work
from brim.audit.source.module import Function, calls_of, keyword_of, last_name
from brim.audit.source.terms import Apply, Constant, Setting, is_same, settings_in, walk
from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from brim.audit.found import Found
    from brim.audit.source.flow import Flow
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project
    from brim.audit.source.terms import Term
    from brim.audit.source.uses import Use

_STEPS = re.compile(
    r"(^|_)(num|total|max|t|training|train|updates?)_?\w*(steps|iters|iterations|updates|max)$|^steps$|^T_max$", re.IGNORECASE
)
_SCHEDULES = re.compile(r"(get_\w*schedule\w*|get_scheduler|OneCycleLR|CosineAnnealingLR|LinearLR|LambdaLR)$")

_MOST_TEXTS = 40


def check_counting(flow: Flow) -> Iterator[Found]:
    """Floored accumulation and steps."""
    floors = _Floors(flow.project)
    for use in flow.uses:
        if use.quantity == "accumulation" and not is_side_work(use):
            yield from floors.check(use)
    for module in flow.project.modules:
        if "ceil" in module.source.text:
            yield from _ceil_of_floor(module)


_RANKS = re.compile(r"world|n_?gpus?|num_(gpus|processes|devices|nodes)|ranks|devices|replicas", re.IGNORECASE)


class _Floors:
    """Floor divisions on the way to the number of micro-batches."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._seen: set[int] = set()
        self._checked: set[frozenset[str]] | None = None

    def check(self, use: Use) -> Iterator[Found]:
        """Each division once."""
        for term in walk(use.term):
            division = _division(term)
            if division is None or not isinstance(term, Apply) or id(term.node) in self._seen:
                continue
            numerator, divisor = division.operands
            above = [each for each in settings_in(numerator) if each.quantity in {"effective-batch", "batch"}]
            below = [each for each in settings_in(divisor) if each.quantity == "batch"]
            is_wanted = any(each.quantity == "effective-batch" for each in above) or _is_shared(division)
            if not (below or is_wanted) or _is_exact(division) or _is_checked(term) or self._is_checked_elsewhere(division):
                continue
            self._seen.add(id(term.node))
            names = [each.name for each in above] or [_text(numerator) or _("the target batch size")]
            if _is_floored(numerator) and _is_shared(division) and not _is_kept_positive(use, term):
                yield _zero_found(term, division, names[0])
            else:
                yield _floored_found(term, division, names[0], below[0] if below else None)

    def _is_checked_elsewhere(self, division: Apply) -> bool:
        """Whether an assert or error of the project, in `__post_init__` perhaps, has the rest of the same two settings."""
        if self._checked is None:
            self._checked = {names for module in self._project.modules for names in _rests(module)}
        names = [{each.name for each in settings_in(side)} | {_last_word(_text(side))} for side in division.operands]
        return any(names[0] & pair and names[1] & pair for pair in self._checked if len(pair) > 1)


def _rests(module: Module) -> Iterator[frozenset[str]]:
    """The names in each `a % b` that is asserted, or that an error is raised for."""
    if "%" not in module.source.text:
        return
    for node in module.nodes:
        is_check = isinstance(node, ast.Assert) or (
            isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body)
        )
        if is_check and isinstance(node, ast.Assert | ast.If):
            for each in ast.walk(node.test):
                if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
                    yield frozenset(last_name(name) for name in ast.walk(each) if isinstance(name, ast.Name | ast.Attribute))


def _division(term: Term) -> Apply | None:
    """`a // b`, `int(a / b)` and `floor(a / b)`: the division."""
    if not isinstance(term, Apply):
        return None
    division: Term | None = term if term.what == "//" else None
    if term.what in {"int", "floor"}:
        division = term.operands[0]
        if not isinstance(division, Apply) or division.what != "/":
            return None
    return division if isinstance(division, Apply) and len(division.operands) == 2 else None


def _is_exact(division: Apply) -> bool:
    """`batch // micro` with `micro = batch`, or with two numbers in the code that divide."""
    numerator, divisor = division.operands
    if numerator is divisor or (isinstance(numerator, Setting) and isinstance(divisor, Setting) and is_same(numerator, divisor)):
        return True
    above, below = (
        each.value if isinstance(each, Constant) or (isinstance(each, Setting) and each.kind == "constant") else None
        for each in division.operands
    )
    return isinstance(above, int) and isinstance(below, int) and below > 0 and above > 0 and above % below == 0


def _text(term: Term) -> str:
    return term.module.text_of(term.node) if isinstance(term.node, ast.expr) else ""


def _last_word(text: str) -> str:
    return re.split(r"\W+", text.rstrip(")] "))[-1]


def _is_shared(division: Apply) -> bool:
    """`accumulation // world_size`, of a setting or of what an earlier division gave."""
    numerator, divisor = division.operands
    above = any(each.quantity == "accumulation" for each in settings_in(numerator)) or _is_floored(numerator)
    return above and _RANKS.search(_text(divisor)) is not None


def _is_floored(term: Term) -> bool:
    return any(_division(each) is not None for each in walk(term))


def _is_kept_positive(use: Use, term: Apply) -> bool:
    """`max(1, a // b)`, `a // b or 1`, `assert accumulation > 0`."""
    for each in walk(use.term):
        if isinstance(each, Apply) and each.what in {"max", "or", "clip", "ceil"} and any(part is term for part in walk(each)):
            return True
    scope: ast.AST = term.module.enclosing(term.node, ast.FunctionDef, ast.AsyncFunctionDef) or term.module.tree
    for node in ast.walk(scope):
        is_check = isinstance(node, ast.Assert) or (
            isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body)
        )
        if is_check and isinstance(node, ast.Assert | ast.If):
            names = {last_name(each) for each in ast.walk(node.test) if isinstance(each, ast.Name | ast.Attribute)}
            if use.target in names:
                return True
        if isinstance(node, ast.Call) and last_name(node.func) == "max":
            return True
    return False


def _floored_found(term: Apply, division: Apply, name: str, setting: Setting | None) -> Found:
    micro = setting.value if setting is not None and isinstance(setting.value, int) and setting.value > 1 else 8
    batch = setting.name if setting is not None else _text(division.operands[1]) or _("the divisor")
    asked = sorted({micro + micro // 2, 3 * micro - 1, 6 * micro + micro // 2})
    rows = tuple(InForce(setting=name, set=each, in_force=each // micro * micro, when=f"{batch} = {micro}") for each in asked)
    text = _("The division drops the remainder: the effective batch is smaller than {setting} unless {batch} divides it.")
    return term.module.found("accumulation-floored", term.node, text.format(setting=name, batch=batch), in_force=rows)


def _zero_found(term: Apply, division: Apply, name: str) -> Found:
    """`batch // micro // world_size`."""
    ranks = " ".join(_text(division.operands[1]).split())
    rows = tuple(
        InForce(setting=_text(division.operands[0]) or name, set=each, in_force=each // 8, when=f"{ranks} = 8")
        for each in (1, 4, 12)
    )
    text = _(
        "This second floor division gives 0 micro-batches when {ranks} is larger than the first result, and drops the remainder otherwise."
    )
    return term.module.found("accumulation-floored", term.node, text.format(ranks=ranks), in_force=rows)


def _is_checked(term: Apply) -> bool:
    """`assert target % batch == 0`, or an error raised for it, or a rest that is handled, in the same function."""
    module = term.module
    scope: ast.AST = module.enclosing(term.node, ast.FunctionDef, ast.AsyncFunctionDef) or module.tree
    for node in ast.walk(scope):
        if isinstance(node, ast.Assert | ast.If):
            test = node.test
            has_rest = any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod) for each in ast.walk(test))
            has_product = isinstance(node, ast.Assert) and any(
                isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult) for each in ast.walk(test)
            )
            if has_product or (
                has_rest and (isinstance(node, ast.Assert) or any(isinstance(each, ast.Raise) for each in ast.walk(node)))
            ):
                return True
        if isinstance(node, ast.Call) and last_name(node.func) == "divmod":
            return True
    return False


def _ceil_of_floor(module: Module) -> Iterator[Found]:
    """`math.ceil(a // b)`: the floor has already dropped what ceil should keep."""
    for call in module.calls:
        inner = call.args[0] if len(call.args) == 1 else None
        if last_name(call.func) != "ceil" or not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv)):
            continue
        left, right = module.text_of(inner.left), module.text_of(inner.right)
        text = _("`{code}` rounds down before it rounds up: the last, smaller batch is not counted.")
        row = InForce(setting=_("steps"), set=3, in_force=2, when=f"{left} = 10, {right} = 4")
        yield module.found(
            "steps-miscounted",
            call,
            text.format(code=" ".join(module.text_of(call).split())),
            in_force=(row,),
            edits=(module.replace(inner, f"{left} / {right}"),),
            is_safe=True,
        )


def check_schedules(flow: Flow) -> Iterator[Found]:
    """A schedule as long as all micro-batches, in a loop that steps it once per optimizer step."""
    for module in flow.project.modules:
        if "chedul" not in module.source.text and "OneCycleLR" not in module.source.text:
            continue
        tables: dict[ast.AST, dict[str, list[ast.expr]]] = {}
        for call in calls_of(module.tree):
            length = _length_of(call) if _SCHEDULES.search(last_name(call.func)) else None
            if length is None:
                continue
            around = _own_loop(module, call)
            accumulates = _accumulates(module, around)
            if accumulates is None or _steps_every_micro_batch(module, around):
                continue
            for each in (around, module.tree):
                tables.setdefault(each, _assignments(each))
            chosen = (tables[around], tables[module.tree])
            whole = " ".join(_texts(length, chosen, module))
            if "len(" not in whole or re.search(r"accum|//|grad_acc|\bga\b|gas\b|/ ?\w|update", whole):
                continue
            text = _(
                "The schedule is as long as all micro-batches, and is stepped once per {accumulation} of them: it never comes to its end."
            )
            yield module.found(
                "scheduler-steps-undivided",
                _where_counted(length, chosen, module),
                text.format(accumulation=accumulates),
                confidence="medium",
            )


def _own_loop(module: Module, call: ast.Call) -> ast.AST:
    """The function that makes the schedule, if its own loop steps it; else the whole file."""
    function = module.enclosing(call, ast.FunctionDef, ast.AsyncFunctionDef)
    steps = [each for each in calls_of(function) if last_name(each.func) == "step"] if function is not None else []
    return function if function is not None and steps else module.tree


def _accumulates(module: Module, around: ast.AST) -> str | None:
    """The name or number of micro-batches per step, if the loop accumulates."""
    for node in ast.walk(around):
        if isinstance(node, ast.If) and any(
            isinstance(each, ast.Call) and last_name(each.func) == "step" for each in ast.walk(node)
        ):
            for each in ast.walk(node.test):
                if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
                    value = each.right.value if isinstance(each.right, ast.Constant) else None
                    return None if value == 1 else module.text_of(each.right)
        if isinstance(node, ast.Call) and last_name(node.func) == "Accelerator":
            given = keyword_of(node, "gradient_accumulation_steps")
            if given is not None and not (isinstance(given.value, ast.Constant) and given.value.value == 1):
                return module.text_of(given.value)
    return None


def _steps_every_micro_batch(module: Module, loop: ast.AST) -> bool:
    """Whether a scheduler steps outside every `if` and every `accumulate` of its loop."""
    for call in calls_of(loop):
        if (
            last_name(call.func) == "step"
            and isinstance(call.func, ast.Attribute)
            and "sched" in ast.unparse(call.func.value).lower()
        ):
            around = list(module.above(call))
            gate = next((each for each in around if isinstance(each, ast.If | ast.With | ast.For | ast.While)), None)
            if not isinstance(gate, ast.If | ast.With):
                return True
    return False


def _length_of(call: ast.Call) -> ast.expr | None:
    for name in ("num_training_steps", "total_steps", "T_max", "total_iters"):
        given = keyword_of(call, name)
        if given is not None:
            return given.value
    given = keyword_of(call, "steps_per_epoch")
    if given is not None:
        return given.value
    place = {"get_scheduler": 3, "CosineAnnealingLR": 1}.get(last_name(call.func), 2)
    return call.args[place] if last_name(call.func).startswith(("get_", "Cosine")) and len(call.args) > place else None


def _where_counted(node: ast.expr, tables: Sequence[Mapping[str, list[ast.expr]]], module: Module, depth: int = 0) -> ast.expr:
    """The expression with the `len(...)` in it: the argument itself, or what its name was given."""
    if "len(" in module.text_of(node) or not isinstance(node, ast.Name | ast.Attribute) or depth > 4:
        return node
    values = next((table[last_name(node)] for table in tables if last_name(node) in table), [])
    for value in values:
        found = _where_counted(value, tables, module, depth + 1)
        if "len(" in module.text_of(found):
            return found
    return node


def _texts(length: ast.expr, tables: Sequence[Mapping[str, list[ast.expr]]], module: Module) -> list[str]:
    """The text of a length and of the assignments that its numbers come from: those of the first table that has the name."""
    found: list[str] = []
    waiting, seen = [length], {length}
    while waiting and len(found) < _MOST_TEXTS:
        node = waiting.pop(0)
        found.append(module.text_of(node))
        for name in sorted(_numbers_in(node)):
            values = next((table[name] for table in tables if name in table), [])
            waiting += [each for each in values if each not in seen]
            seen.update(values)
    return found


def _numbers_in(node: ast.expr) -> set[str]:
    """The names in an expression, without those whose length is taken: they hold data."""
    if isinstance(node, ast.Call) and last_name(node.func) == "len":
        return set()
    own = {last_name(node)} - {""}
    return own.union(*(_numbers_in(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)))


def _assignments(around: ast.AST) -> dict[str, list[ast.expr]]:
    """Of each name or attribute below a node: what it is set to. A parameter is set to nothing that is seen."""
    table: dict[str, list[ast.expr]] = {}
    for node in ast.walk(around):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(node, ast.Assign) and last_name(target):
                table.setdefault(last_name(target), []).append(node.value)
    if isinstance(around, Function):
        for argument in (*around.args.posonlyargs, *around.args.args, *around.args.kwonlyargs):
            table.setdefault(argument.arg, [])
    return table
