"""What must happen once in a window of micro-batches and happens for each of them, and what becomes of the last window."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from brim.audit.source.loop_losses import ACCUMULATION
from brim.audit.source.loop_model import TrainLoop, loops_of
from brim.audit.source.module import last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.loop_events import Event
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project
    from brim.records.findings import Confidence


def check_scheduler(module: Module, project: Project) -> Iterator[Found]:
    """The learning rate moves with every micro-batch instead of every step."""
    for loop in loops_of(module, project):
        window = loop.window
        if window is None or loop.in_accumulate or loop.framework in {"engine", "accelerate"} or window.shape == "sync":
            continue
        for event in loop.of("schedule"):
            if event.place.beyond(loop.backwards[-1].place) or event.call is None or event.call.args or event.call.keywords:
                continue
            confidence = _horizon(event, loop)
            if confidence is None:
                continue
            where = event.place.scope.module
            message = _(
                "{scheduler}.step() runs for every micro-batch, and the optimizer steps once in {count}: the learning rate goes "
                "through its schedule as many times too fast."
            )
            text = message.format(scheduler=event.receiver, count=window.text or _("several"))
            yield where.found("scheduler-every-micro-batch", event.node, text, confidence=confidence)
            break


def _horizon(event: Event, loop: TrainLoop) -> Confidence | None:
    """How sure that the schedule counts optimizer steps. None if it was made for micro-batches, so that both agree."""
    name = event.receiver.rpartition(".")[2]
    for module in loop.modules:
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and any(last_name(each) == name for each in node.targets)
            ):
                terms = _terms_of(node.value, module, loop)
                window = loop.window.terms if loop.window is not None else frozenset()
                if any(ACCUMULATION.search(each) for each in terms) or terms & window:
                    return "high"
                if "len" in terms:
                    return None
    return "medium"


def _terms_of(call: ast.Call, module: Module, loop: TrainLoop) -> set[str]:
    """The words of the numbers that a scheduler was made with, those behind its names included."""
    scope = next((each.place.scope for each in loop.events if each.place.scope.module is module), loop.root)
    function = module.enclosing(call, ast.FunctionDef)
    scopes = [each for each in loop.model.reach.by_module[id(module)] if each.node is function] or [scope]
    found: set[str] = set()
    for argument in (*call.args[1:], *(each.value for each in call.keywords)):
        for node in ast.walk(argument):
            if isinstance(node, ast.Name | ast.Attribute):
                found.add(last_name(node))
                for each in loop.model.losses.assigned(scopes[0], ast.unparse(node)):
                    found |= {last_name(inner) for inner in ast.walk(each.value) if isinstance(inner, ast.Name | ast.Attribute)}
    return found


def check_clip(module: Module, project: Project) -> Iterator[Found]:
    """The gradient is clipped while it is still being summed."""
    for loop in loops_of(module, project):
        if (loop.window is None and not loop.in_accumulate) or loop.framework == "engine":
            continue
        for event in loop.of("clip"):
            if event.place.beyond(loop.backwards[-1].place) or event.order < loop.backwards[0].order or event.place.in_handler:
                continue
            where = event.place.scope.module
            edits = _only_when_synced(event, loop)
            message = _(
                "The gradient is clipped after every micro-batch, in the middle of the window: what is stepped is not the clipped "
                "gradient of the whole batch, and early micro-batches weigh less."
            )
            yield where.found("clip-before-window-ends", event.node, message, edits=edits, is_safe=bool(edits))
            break


def _only_when_synced(event: Event, loop: TrainLoop) -> tuple[Edit, ...]:
    """Accelerate says when the window is complete."""
    module = event.place.scope.module
    statement = module.statement(event.node)
    accelerator = loop.backwards[0].receiver
    if not loop.in_accumulate or loop.framework != "accelerate" or not isinstance(statement, ast.Expr):
        return ()
    if statement.lineno != statement.end_lineno:
        return ()
    indent = " " * module.column(statement.lineno, statement.col_offset)
    return (module.replace(statement, f"if {accelerator}.sync_gradients:\n{indent}    {module.text_of(statement)}"),)


def check_last_window(module: Module, project: Project) -> Iterator[Found]:
    """The data ends in the middle of a window, and nothing steps what is left."""
    for loop in loops_of(module, project):
        window = loop.window
        if window is None or window.guard is None or window.shape not in {"modulo", "counter"} or window.steps_on_last:
            continue
        if (
            loop.later_steps
            or loop.framework == "engine"
            or not _begins_anew(loop)
            or loop.mentions(r"drop_incomplete|end_of_dataloader")
        ):
            continue
        where = window.guard.scope.module
        clears = any(len(each.place.loops) < len(loop.chain) for each in loop.all_of("zero"))
        lost = (
            _("are thrown away at the end of the epoch")
            if clears
            else _("slip into the first step of the next epoch, which then counts more than {count}")
        )
        message = _(
            "Where the number of batches is no multiple of {count}, the last micro-batches of an epoch are never stepped: they {lost}."
        )
        yield where.found(
            "last-window-dropped",
            window.guard.test,
            message.format(count=window.text, lost=lost.format(count=window.text)),
            confidence="medium",
            edits=_also_at_the_end(loop),
        )


def _begins_anew(loop: TrainLoop) -> bool:
    """Whether the count of the window begins again with each pass over the data, which is finite."""
    window, micro = loop.window, loop.micro
    if window is None or window.index is None or not isinstance(micro, ast.For):
        return False
    names = {each.id for each in ast.walk(window.index) if isinstance(each, ast.Name)}
    if any(_is_reset(each, loop, names) for each in loop.all_of("assign")) and _data_of(micro) is not None:
        return True
    if _enumerated(micro) is None:
        return False
    counters = {
        each.id
        for each in ast.walk(micro.target.elts[0] if isinstance(micro.target, ast.Tuple) else micro.target)
        if isinstance(each, ast.Name)
    }
    return bool(counters & names)


def _is_reset(event: Event, loop: TrainLoop, names: set[str]) -> bool:
    """`count = 0` right before the micro loop."""
    node = event.node
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant) or node.value.value != 0:
        return False
    is_here = len(event.place.loops) == len(loop.chain) - 1 and event.order < loop.backwards[0].order
    return is_here and any(isinstance(each, ast.Name) and each.id in names for each in node.targets)


def _data_of(micro: ast.For) -> ast.expr | None:
    """What the loop runs over, if that is a name and so perhaps finite; progress bars around it do not count."""
    node: ast.expr = micro.iter
    while isinstance(node, ast.Call) and last_name(node.func) in {"tqdm", "enumerate", "progress_bar", "track"} and node.args:
        node = node.args[0]
    return node if isinstance(node, ast.Name | ast.Attribute) else None


def _enumerated(micro: ast.For) -> ast.expr | None:
    """The loader of `for i, batch in enumerate(loader)`; progress bars around it do not count."""
    node: ast.expr = micro.iter
    seen = False
    while isinstance(node, ast.Call):
        name = last_name(node.func)
        if name == "enumerate":
            seen = True
        elif name not in {"tqdm", "trange", "progress_bar", "track"}:
            return None
        if not node.args:
            return None
        node = node.args[0]
    return node if seen and isinstance(node, ast.Name | ast.Attribute | ast.Subscript) else None


def _also_at_the_end(loop: TrainLoop) -> tuple[Edit, ...]:
    """`... or i + 1 == len(loader)`, where the condition is a plain comparison that counts from 0."""
    window, micro = loop.window, loop.micro
    if window is None or window.guard is None or not isinstance(micro, ast.For) or not isinstance(micro.target, ast.Tuple):
        return ()
    test, index, loader = window.guard.test, micro.target.elts[0], _enumerated(micro)
    is_plain = isinstance(test, ast.Compare) and isinstance(window.index, ast.BinOp) and isinstance(window.index.op, ast.Add)
    if (
        not is_plain
        or not window.guard.holds
        or not isinstance(index, ast.Name)
        or loader is None
        or window.scope is not loop.backwards[0].place.scope
    ):
        return ()
    module = window.guard.scope.module
    return (module.replace(test, f"{module.text_of(test)} or {index.id} + 1 == len({module.text_of(loader)})"),)


def check_sync(module: Module, project: Project) -> Iterator[Found]:
    """DDP exchanges gradients after every backward of a window."""
    for loop in loops_of(module, project):
        if loop.window is None or loop.window.shape == "sync" or loop.in_accumulate or loop.framework in {"engine", "accelerate"}:
            continue
        if not loop.mentions(r"\bDistributedDataParallel\(|\bDDP\("):
            continue
        if loop.mentions(
            r"no_sync|require_backward_grad_sync|set_requires_gradient_sync|no_backward_sync|skip_(grad|all)_?reduce"
        ):
            continue
        event = loop.backwards[-1]
        message = _(
            "DistributedDataParallel exchanges all gradients in every backward, and only the last of {count} needs it: put the others "
            "under model.no_sync(), forward included."
        )
        text = message.format(count=loop.window.text or _("several"))
        yield event.place.scope.module.found("sync-every-micro-batch", event.node, text, confidence="medium")


CHECKS = (check_scheduler, check_clip, check_last_window, check_sync)
