"""Half precision by hand: autocast to float16, the gradient scaler, and the order in which it must be used."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_model import TrainLoop, loops_of
from brim.audit.source.module import keyword_of, last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.loop_events import Event
    from brim.audit.source.module import Module
    from brim.audit.source.names import Scope
    from brim.audit.source.project import Project
    from brim.records.findings import Confidence

_MODEL: Final = re.compile(r"model|net|network|self\.model|self\.net", re.IGNORECASE)


def check_clip_before_unscale(module: Module, project: Project) -> Iterator[Found]:
    """The scaled gradient is compared with a limit for the unscaled one."""
    for loop in loops_of(module, project):
        scalers = {each.scaler for each in loop.all_of("backward", "step") if each.scaler}
        if not scalers or loop.framework or loop.mentions(r"GradScaler\([^)]*enabled\s*=\s*False"):
            continue
        unscales = [each.order for each in loop.all_of("unscale")]
        for clip in loop.all_of("clip"):
            before = [each.order for each in loop.backwards if each.order < clip.order]
            if not before or "scaler" in clip.receiver.lower() or any(before[0] < order < clip.order for order in unscales):
                continue
            where = clip.place.scope.module
            edits = _unscale_first(clip, loop, sorted(scalers)[0])
            message = _(
                "The gradient is clipped while it is still multiplied by the scale of {scaler} (65536 at the start): nearly every "
                "step is clipped to almost nothing."
            )
            text = message.format(scaler=sorted(scalers)[0])
            yield where.found("clip-before-unscale", clip.node, text, edits=edits, is_safe=bool(edits) and not unscales)
            break


def _unscale_first(clip: Event, loop: TrainLoop, scaler: str) -> tuple[Edit, ...]:
    """`scaler.unscale_(optimizer)` in the line before, where both happen once in a step."""
    scope = clip.place.scope
    module = scope.module
    steps = [each for each in loop.steps if each.place.scope is scope and each.scaler == scaler]
    statement = module.statement(clip.node)
    if len(steps) != 1 or steps[0].place.beyond(clip.place) or not isinstance(statement, ast.Expr | ast.Assign):
        return ()
    indent = module.lines[statement.lineno - 1][: module.column(statement.lineno, statement.col_offset)]
    if indent.strip():
        return ()
    return (module.replace(statement, f"{scaler}.unscale_({steps[0].receiver})\n{indent}{module.text_of(statement)}"),)


def check_scaler_update(module: Module, project: Project) -> Iterator[Found]:
    """The scale is never adapted."""
    for loop in loops_of(module, project):
        steps = [each for each in loop.steps if each.scaler]
        if not steps or loop.all_of("update") or loop.mentions(r"scaler\w*\.update\("):
            continue
        step = steps[-1]
        message = _(
            "{scaler}.update() is never called: the scale is never adapted, and torch refuses the second step (step() has already been "
            "called since the last update())."
        )
        where = step.place.scope.module
        edits = _update_behind(step, where)
        text = message.format(scaler=step.scaler)
        yield where.found("scaler-update-missing", step.node, text, edits=edits, is_safe=bool(edits) and len(steps) == 1)


def _update_behind(step: Event, module: Module) -> tuple[Edit, ...]:
    statement = module.statement(step.node)
    indent = module.lines[statement.lineno - 1][: module.column(statement.lineno, statement.col_offset)]
    if indent.strip() or not isinstance(statement, ast.Expr):
        return ()
    return (module.replace(statement, f"{module.text_of(statement)}\n{indent}{step.scaler}.update()"),)


def check_fp16_without_scaler(module: Module, project: Project) -> Iterator[Found]:
    """Small gradients become zero in float16."""
    for loop in loops_of(module, project):
        if loop.framework in {"engine", "accelerate", "fabric", "lightning"} or loop.mentions(
            r"[Ss]caler|amp\.initialize|loss_scal"
        ):
            continue
        for context, scope in loop.timeline.contexts:
            confidence = _is_half(context, scope)
            if confidence is None:
                continue
            message = _(
                "{context} computes in float16, and no GradScaler scales the loss: gradients below 6e-8 become zero, "
                "and large ones infinite."
            )
            where = scope.module
            yield where.found(
                "fp16-without-scaler", context, message.format(context=where.text_of(context)), confidence=confidence
            )
            break
        else:
            yield from _half_weights(loop)


def _half_weights(loop: TrainLoop) -> Iterator[Found]:
    """`model.half()`: the weights themselves are float16, and small updates round to nothing."""
    where = loop.root.module
    for call in loop.model.reach.calls(where, "half"):
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if receiver is None or not _MODEL.fullmatch(last_name(receiver)) or call.args:
            continue
        message = _(
            "{code} makes the weights float16, and nothing scales the loss: small gradients become zero, and small updates round to "
            "nothing."
        )
        yield where.found("fp16-without-scaler", call, message.format(code=where.text_of(call)), confidence="medium")
        return


def _is_half(context: ast.expr, scope: Scope) -> Confidence | None:
    """Whether a context casts to float16, and how sure that is."""
    if not isinstance(context, ast.Call) or last_name(context.func) != "autocast":
        return None
    enabled, dtype = keyword_of(context, "enabled"), keyword_of(context, "dtype")
    if enabled is not None and isinstance(enabled.value, ast.Constant) and not enabled.value.value:
        return None
    sure: Confidence = "high" if enabled is None or isinstance(enabled.value, ast.Constant) else "medium"
    if dtype is not None or len(context.args) > 1:
        value = dtype.value if dtype is not None else context.args[1]
        return sure if scope.module.dotted(value) in {"torch.float16", "torch.half"} else None
    if ".cuda." in f"{scope.module.dotted(context.func)}.":
        return sure
    device = keyword_of(context, "device_type")
    where = device.value if device is not None else context.args[0] if context.args else None
    return sure if isinstance(where, ast.Constant) and where.value == "cuda" else None


CHECKS = (check_clip_before_unscale, check_scaler_update, check_fp16_without_scaler)
