"""Patches for clamps: the code with the clamp taken away, and nothing else changed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from brim.audit.source.module import Function, last_name
from brim.audit.source.quantities import quantity_of
from brim.audit.source.terms import Apply, Choice, Constant, Setting, Term, is_same, walk

if TYPE_CHECKING:
    from brim.audit.found import Edit
    from brim.audit.source.clamps import Clamp
    from brim.audit.source.flow import Flow
    from brim.audit.source.module import Module

_TALKS = {"print", "warning", "warn", "info", "debug", "rank_zero_warn", "rank_zero_info", "print0", "main_print"}


def span_of(clamp: Clamp) -> tuple[ast.AST, ast.AST]:
    """First and last node of what is to blame: one expression, one `if`, or all rungs of a ladder of them."""
    nodes = [clamp.culprit.node]
    if clamp.tiers:
        nodes += [choice.node for choice in _spine(clamp.culprit) if choice.module is clamp.culprit.module]
    nodes = [each for each in nodes if hasattr(each, "lineno")]
    first = min(nodes, key=lambda each: (each.lineno, each.col_offset))  # type: ignore[attr-defined]
    last = max(nodes, key=lambda each: (each.end_lineno, each.end_col_offset))  # type: ignore[attr-defined]
    return first, last


def edits_of(clamp: Clamp) -> tuple[Edit, ...]:
    """The edits that let the setting through; none if that cannot be done by a plain change."""
    module, node = clamp.culprit.module, clamp.culprit.node
    if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):
        return ()  # a name is born in it, and somebody may read that
    if clamp.tiers:
        return _without_ladder(clamp, module)
    if isinstance(node, ast.If):
        return _without_if(node, module)
    if isinstance(node, ast.While):
        return _delete(node, module)
    kept = _kept(clamp.culprit, clamp.varied)
    if kept is None or not isinstance(node, ast.expr):
        return ()
    text = module.text_of(kept)
    if "#" in module.text_of(node) or _is_bounded_below(clamp.culprit):
        return ()
    around = module.parents.get(node)
    if isinstance(around, ast.Assign) and [module.text_of(each) for each in around.targets] == [text]:
        return _delete(around, module)  # `bs = min(bs, 2)` would become `bs = bs`
    return (module.replace(node, f"({text})" if _needs_brackets(kept, module.parents.get(node)) else text),)


def _kept(culprit: Term, varied: Setting) -> ast.expr | None:
    """The part of the expression that holds what the user set."""
    node = culprit.node
    if isinstance(culprit, Choice) and isinstance(node, ast.IfExp):
        return node.body if _holds(culprit.then, varied) else node.orelse
    if isinstance(culprit, Apply) and isinstance(node, ast.Call):
        places = node.args
        if len(places) == 1 and isinstance(places[0], ast.List | ast.Tuple):
            places = places[0].elts
        for place, operand in zip(places, culprit.operands, strict=False):
            if _holds(operand, varied):
                return place
    if isinstance(culprit, Apply) and isinstance(node, ast.BinOp):
        return _kept_of_rounding(culprit, varied)
    return None


def _kept_of_rounding(culprit: Apply, varied: Setting) -> ast.expr | None:
    """`x` of `x // 8 * 8` and `x - x % 8`; other ways to round are left alone."""
    whole: Term = culprit
    while isinstance(whole, Apply) and isinstance(whole.node, ast.BinOp):
        if whole.what not in {"*", "//", "-"} or not _holds(whole.operands[0], varied):
            return None
        left = whole.node.left
        whole = whole.operands[0]
        if isinstance(whole, Setting):
            return left
    return None


def _is_bounded_below(culprit: Term) -> bool:
    """`clip(x, 1, 8)`: without it, a floor that means something would be gone too."""
    return isinstance(culprit, Apply) and culprit.what == "clip" and isinstance(culprit.operands[1], Constant)


def serves_others(clamp: Clamp, flow: Flow) -> bool:
    """Whether the place is in a function that is called from several places: others may mean to be limited."""
    around = clamp.culprit.module.enclosing(clamp.culprit.node, ast.FunctionDef, ast.AsyncFunctionDef)
    function = around if isinstance(around, Function) else None
    if function is None or function.name.startswith("__") or quantity_of(function.name) is not None:
        return False
    return flow.calls_of[function.name] > 1


def _holds(term: Term, varied: Setting) -> bool:
    return any(isinstance(each, Setting) and is_same(each, varied) for each in walk(term))


def _needs_brackets(kept: ast.expr, parent: ast.AST | None) -> bool:
    return isinstance(kept, ast.BinOp | ast.IfExp | ast.BoolOp | ast.Compare) and isinstance(
        parent, ast.BinOp | ast.UnaryOp | ast.Attribute
    )


def _is_elif(node: ast.If, module: Module) -> bool:
    parent = module.parents.get(node)
    return isinstance(parent, ast.If) and parent.orelse == [node] and module.lines[node.lineno - 1].lstrip().startswith("elif")


def _only_assigns(body: list[ast.stmt]) -> ast.Assign | None:
    """The one assignment of a body that does nothing else but talk."""
    assigned = [each for each in body if isinstance(each, ast.Assign)]
    others = [each for each in body if not isinstance(each, ast.Assign | ast.Pass)]
    talks = all(
        isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and last_name(each.value.func) in _TALKS
        for each in others
    )
    return assigned[0] if len(assigned) == 1 and talks and len(assigned[0].targets) == 1 else None


def _delete(node: ast.stmt, module: Module) -> tuple[Edit, ...]:
    """Take a statement away; leave `pass` where a block would be empty."""
    parent = module.parents.get(node)
    blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
    block = next((each for each in blocks if isinstance(each, list) and node in each), [])
    if len(block) == 1 and isinstance(parent, Function | ast.If | ast.For | ast.While | ast.With | ast.ClassDef | ast.Try):
        return (module.replace(node, "pass"),)
    line = module.lines[node.lineno - 1]
    if line[: module.column(node.lineno, node.col_offset)].strip() or node.end_lineno is None:
        return ()  # it shares its line with something else
    return (module.delete_lines(node.lineno, node.end_lineno),)


def _without_if(node: ast.If, module: Module) -> tuple[Edit, ...]:
    """`if x > 2: x = 2` goes; of `if ... else` the side stays that holds what the user set."""
    then = _only_assigns(node.body)
    if then is None or _is_elif(node, module):
        return ()
    if not node.orelse:
        return _delete(node, module)
    otherwise = _only_assigns(node.orelse)
    if otherwise is None or ast.dump(then.targets[0]) != ast.dump(otherwise.targets[0]):
        return ()
    keeps = [each for each in (then, otherwise) if not isinstance(each.value, ast.Constant)]
    if len(keeps) != 1:
        return ()
    return (module.replace(node, module.text_of(keeps[0])),)


def _spine(choice: Term) -> list[Choice]:
    found: list[Choice] = []
    here = choice
    while isinstance(here, Choice) and len(found) < 8:
        found.append(here)
        here = here.otherwise
    return found


def _without_ladder(clamp: Clamp, module: Module) -> tuple[Edit, ...]:
    """A ladder of `if memory < n`: gone, where its last rung is what the user set."""
    spine = _spine(clamp.culprit)
    last = spine[-1].otherwise
    if not (isinstance(last, Setting) and is_same(last, clamp.varied)):
        return ()
    nodes = list(dict.fromkeys(each.node for each in spine))
    if not all(isinstance(each, ast.If) and clamp.culprit.module.parents.get(each) is not None for each in nodes):
        return _ternary_ladder(nodes, module)
    tops = [each for each in nodes if isinstance(each, ast.If) and not _is_elif(each, module)]
    edits: list[Edit] = []
    for node in tops:
        if all(isinstance(each.body[-1], ast.Return) and len(each.body) == 1 for each in _rungs(node)) and not _else_of(node):
            edits += _delete(node, module)
            continue
        assigned = [_only_assigns(each.body) for each in _rungs(node)]
        rest = _else_of(node)
        if any(each is None for each in assigned):
            return ()
        targets = {ast.dump(each.targets[0]) for each in assigned if each is not None}
        final = _only_assigns(rest) if rest else None
        if rest and (final is None or ast.dump(final.targets[0]) not in targets):
            return ()
        if len(targets) != 1:
            return ()
        edits += (module.replace(node, module.text_of(final)),) if final is not None else _delete(node, module)
    return tuple(edits)


def _rungs(node: ast.If) -> list[ast.If]:
    found = [node]
    while len(found[-1].orelse) == 1 and isinstance(found[-1].orelse[0], ast.If):
        found.append(found[-1].orelse[0])
    return found


def _else_of(node: ast.If) -> list[ast.stmt]:
    return _rungs(node)[-1].orelse


def _ternary_ladder(nodes: list[ast.AST], module: Module) -> tuple[Edit, ...]:
    """`1 if free < 8 else cfg.bs`."""
    inner: ast.AST = nodes[0]
    while isinstance(inner, ast.IfExp):
        inner = inner.orelse
    if not isinstance(nodes[0], ast.IfExp) or not isinstance(inner, ast.expr):
        return ()
    return (module.replace(nodes[0], module.text_of(inner)),)
