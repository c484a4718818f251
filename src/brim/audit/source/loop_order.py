"""The order of backward, step and clearing: what a window of micro-batches needs, and what breaks it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from brim.audit.source.loop_division import accelerators
from brim.audit.source.loop_losses import ACCUMULATION
from brim.audit.source.loop_model import TrainLoop, loops_of
from brim.audit.source.module import keyword_of, last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.loop_events import Event
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project


def check_zero_misplaced(module: Module, project: Project) -> Iterator[Found]:
    """Gradients are cleared where they are still needed."""
    for loop in loops_of(module, project):
        if loop.in_accumulate or loop.has_closure or loop.framework == "engine" or _reads_gradients(loop):
            continue
        found = _cleared_before_step(loop) or _cleared_in_window(loop)
        if found is not None:
            yield found


def _cleared_before_step(loop: TrainLoop) -> Found | None:
    for step in loop.of("step"):
        before = [each for each in loop.backwards if each.order < step.order]
        if not before:
            continue
        backward = before[-1]
        for zero in loop.of("zero"):
            if backward.order < zero.order < step.order and _is_sure(zero, step) and _is_its(zero, step, loop):
                message = _("{zero} stands between backward and {step}: the gradients are gone when the optimizer steps.")
                return _misplaced(zero, step, message)
    return None


def _is_sure(zero: Event, step: Event) -> bool:
    """Whether the gradients are cleared each time that this step is taken."""
    return (
        not zero.place.beyond(step.place)
        and not zero.place.in_handler
        and zero.place.loops[: len(step.place.loops)] == step.place.loops
    )


def _cleared_in_window(loop: TrainLoop) -> Found | None:
    window = loop.window
    if window is None or window.shape in {"sync", "named"}:
        return None
    step = loop.steps[0]
    for zero in loop.of("zero"):
        if not zero.place.beyond(loop.backwards[-1].place) and not zero.place.in_handler and _is_its(zero, step, loop):
            message = _(
                "{zero} runs for every micro-batch, and {step} once in {count}: the gradients of all micro-batches but the last are thrown "
                "away, so the effective batch is one micro-batch."
            )
            return _misplaced(zero, step, message, count=window.text)
    return None


def _misplaced(zero: Event, step: Event, message: str, count: str = "") -> Found:
    module = zero.place.scope.module
    edits = _move_behind(zero, step)
    return module.found(
        "zero-grad-misplaced",
        zero.node,
        message.format(zero=module.text_of(zero.node), step=step.place.scope.module.text_of(step.node), count=count),
        confidence="high" if zero.place.scope is step.place.scope else "medium",
        edits=edits,
        is_safe=bool(edits),
    )


def _is_its(zero: Event, step: Event, loop: TrainLoop) -> bool:
    """Whether what is cleared is what this optimizer steps."""
    if zero.receiver == step.receiver:
        return True
    if len({each.receiver for each in loop.all_of("step")}) > 1:
        return False
    return "opt" not in zero.receiver.lower() or last_part(zero.receiver) == last_part(step.receiver)


def last_part(text: str) -> str:
    """`self.optimizer` -> `optimizer`."""
    return text.rpartition(".")[2]


def _reads_gradients(loop: TrainLoop) -> bool:
    """Whoever reads `.grad` in the loop may keep the gradients elsewhere."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load)
        for node in ast.walk(loop.micro)
    )


def _move_behind(zero: Event, step: Event) -> tuple[Edit, ...]:
    """Take the line away and write it behind the step, where both are lines of their own in one function."""
    scope = zero.place.scope
    if scope is not step.place.scope:
        return ()
    module = scope.module
    lines = [module.statement(each.node) for each in (zero, step)]
    if not all(isinstance(each, ast.Expr) and each.lineno == each.end_lineno for each in lines):
        return ()
    cleared, stepped = lines
    if not is_alone_on_its_line(cleared, module) or not has_company(cleared, module) or not is_alone_on_its_line(stepped, module):
        return ()
    indent = module.lines[stepped.lineno - 1][: module.column(stepped.lineno, stepped.col_offset)]
    moved = f"{module.text_of(stepped)}\n{indent}{module.text_of(cleared)}"
    return (module.delete_lines(cleared.lineno, cleared.lineno), module.replace(stepped, moved))


def is_alone_on_its_line(statement: ast.stmt, module: Module) -> bool:
    """Whether nothing else, not even a comment, stands in its line."""
    return module.lines[statement.lineno - 1].strip() == module.text_of(statement)


def has_company(statement: ast.stmt, module: Module) -> bool:
    """Whether its block still has something in it without it."""
    parent = module.parents.get(statement)
    blocks = [getattr(parent, name, []) for name in ("body", "orelse", "finalbody")]
    return any(statement in block and len(block) > 1 for block in blocks if isinstance(block, list))


def check_zero_missing(module: Module, project: Project) -> Iterator[Found]:
    """Nobody clears the gradients, so each step adds the gradients of all steps before it."""
    for loop in loops_of(module, project):
        if loop.framework == "engine" or loop.has_closure or not loop.steps or loop.all_of("zero"):
            continue
        if loop.mentions(r"zero_grad|\.grad\s*=\s*None|set_to_none|\.grad\.(data\.)?zero_|autograd\.grad\(|functional_call"):
            continue
        step = loop.steps[0]
        if (
            not step.place.loops
            or "opt" not in step.receiver.lower()
            or (step.call is not None and last_name(step.call.func) != "step")
        ):
            continue
        where = step.place.scope.module
        is_plain = loop.mentions(r"\boptim\b|torch\.optim|Adam|SGD|Adafactor")
        edits = _clear_behind(step)
        message = _("Nothing clears the gradients of {optimizer}: every step adds the gradients of all steps before it.")
        yield where.found(
            "zero-grad-missing",
            step.node,
            message.format(optimizer=step.receiver),
            confidence="high" if is_plain else "medium",
            edits=edits,
            is_safe=bool(edits) and is_plain,
        )


def _clear_behind(step: Event) -> tuple[Edit, ...]:
    module = step.place.scope.module
    statement = module.statement(step.node)
    if (
        not isinstance(statement, ast.Expr)
        or not is_alone_on_its_line(statement, module)
        or not step.receiver.replace(".", "").isidentifier()
    ):
        return ()
    indent = module.lines[statement.lineno - 1][: module.column(statement.lineno, statement.col_offset)]
    return (module.replace(statement, f"{module.text_of(statement)}\n{indent}{step.receiver}.zero_grad()"),)


def check_step_every(module: Module, project: Project) -> Iterator[Found]:
    """Accumulation is configured, and the optimizer steps on each micro-batch."""
    for loop in loops_of(module, project):
        steps = [each for each in loop.of("step") if not each.place.in_handler]
        if loop.window is not None or not steps or loop.framework == "engine" or loop.in_accumulate or loop.has_closure:
            continue
        step = steps[0]
        if any(step.place.beyond(each.place) for each in loop.backwards if each.order < step.order):
            continue
        count = _accelerate_count(loop) if loop.framework == "accelerate" else (_divided_by(loop) or _looped_over(loop))
        if count is None:
            continue
        where = step.place.scope.module
        message = _(
            "The loss is made for a window of {count} micro-batches, and {step} runs after every one: the effective batch is one "
            "micro-batch, and its gradient is as many times too small."
        )
        yield where.found("step-every-micro-batch", step.node, message.format(count=count, step=where.text_of(step.node)))


def _divided_by(loop: TrainLoop) -> str | None:
    for _event, traced in loop.losses:
        for each in traced.divisors:
            if not each.is_of_this_micro_batch and loop.counts_micro_batches(each.by, each.scope, each.path):
                return ast.unparse(each.by)
    return None


def _looped_over(loop: TrainLoop) -> str | None:
    """`for _ in range(accumulation_steps)` with the step inside."""
    micro = loop.micro
    if not isinstance(micro, ast.For) or not isinstance(micro.iter, ast.Call) or last_name(micro.iter.func) != "range":
        return None
    count = micro.iter.args[-1] if micro.iter.args else None
    if count is None or not any(
        ACCUMULATION.search(each) for each in loop.model.losses.terms(count, loop.backwards[0].place.scope)
    ):
        return None
    return ast.unparse(count)


def _accelerate_count(loop: TrainLoop) -> str | None:
    """An Accelerator that was told to accumulate divides; without accumulate() around the loop's body it never skips a step."""
    if loop.mentions(r"\.accumulate\(|sync_gradients|no_sync"):
        return None
    for call in accelerators(loop):
        told = keyword_of(call, "gradient_accumulation_steps")
        if told is not None and not (isinstance(told.value, ast.Constant) and told.value.value in {1, None}):
            return ast.unparse(told.value)
    return None


CHECKS = (check_zero_misplaced, check_zero_missing, check_step_every)
