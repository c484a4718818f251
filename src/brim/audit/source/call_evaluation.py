"""Evaluation that builds the graph of a training step and throws it away."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_reach import BACKWARD, reach_of
from brim.audit.source.module import Function, Loop, last_name
from brim.audit.source.names import names_of
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from brim.audit.found import Found
    from brim.audit.source.loop_reach import Reach
    from brim.audit.source.module import Module
    from brim.audit.source.names import Scope
    from brim.audit.source.project import Project

_FROZEN: Final = re.compile(r"requires_grad(_\(False\)|\s*=\s*False)")
_OFF: Final = re.compile(r"no_grad|inference_mode|set_grad_enabled|requires_grad|autograd\.grad|enable_grad")


def check_evaluation(module: Module, project: Project) -> Iterator[Found]:
    """A loop that only evaluates, with gradients on."""
    if ".eval()" not in module.source.text:
        return
    reach = reach_of(project)
    trainers = {each.name for each in reach.trainers} | BACKWARD | {"train"}
    for scope in names_of(project).by_module[id(module)]:
        if "eval" not in scope.called:
            continue
        for model, loop in _evaluations(scope):
            call = _forward(model, loop, trainers)
            if call is None or _OFF.search(_text(loop, module)) or _is_switched_off(scope, reach):
                continue
            if any(_is_off(each) for each in module.above(loop)):
                continue
            message = _(
                "{call} runs with gradients on, though {model} only evaluates here: the activations of a whole training step are kept for "
                "nothing, so evaluation needs several times the memory and can run out where training does not."
            )
            text = message.format(call=ast.unparse(call.func), model=model)
            yield module.found("eval-with-gradients", call, text, confidence="medium")


def _text(node: ast.stmt | ast.Module, module: Module) -> str:
    if isinstance(node, ast.Module):
        return module.source.text
    return "\n".join(module.lines[node.lineno - 1 : node.end_lineno])


def _is_switched_off(scope: Scope, reach: Reach) -> bool:
    """A decorator, a caller, or a call at the beginning may switch gradients off for all of it."""
    if isinstance(scope.node, Function) and any(_OFF.search(ast.unparse(each)) for each in scope.node.decorator_list):
        return True
    if "set_grad_enabled" in scope.called or _FROZEN.search(_text(scope.node, scope.module)):
        return True
    return bool(scope.name) and any(_may_switch_off(each, scope) for each in reach.callers(scope.name))


def _evaluations(scope: Scope) -> Iterator[tuple[str, ast.stmt]]:
    """The loops behind `model.eval()`, up to `model.train()`."""
    blocks = [scope.node.body]
    while blocks:
        model = ""
        for statement in blocks.pop():
            if isinstance(statement, Function | ast.ClassDef):
                continue
            name, mode = _mode(statement)
            if mode:
                model = name if mode == "eval" else ""
            elif model and isinstance(statement, Loop) and not _is_repeated(statement):
                yield model, statement
            blocks += [block for field in ("body", "orelse", "finalbody") if (block := getattr(statement, field, None))]


def _is_repeated(loop: Loop) -> bool:
    """`for _ in range(20)`: somebody takes the time, or makes noise on purpose."""
    return isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) == "range"


def _mode(statement: ast.stmt) -> tuple[str, str]:
    """`model.eval()` -> model, eval."""
    call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in {"eval", "train"}:
        return ast.unparse(call.func.value), call.func.attr
    return "", ""


def _is_off(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(_OFF.search(ast.unparse(each.context_expr)) for each in node.items)


def _forward(model: str, loop: ast.stmt, trainers: Collection[str]) -> ast.Call | None:
    """The model, called in a loop that runs no backward."""
    calls = [each for each in ast.walk(loop) if isinstance(each, ast.Call)]
    if any(last_name(each.func) in trainers for each in calls):
        return None
    return next((each for each in calls if ast.unparse(each.func) == model), None)


def _may_switch_off(caller: Scope, scope: Scope) -> bool:
    """Whether a caller has a word about gradients, perhaps around the call."""
    return caller is not scope and bool(caller.name) and _OFF.search(_text(caller.node, caller.module)) is not None


CHECKS = (check_evaluation,)
