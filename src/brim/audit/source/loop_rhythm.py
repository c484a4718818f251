"""What must happen once in a window of micro-batches and happens for each of them, and what becomes of the last window."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_losses import ACCUMULATION
from brim.audit.source.loop_model import TrainLoop, loops_of
from brim.audit.source.module import Function, last_name, walk_here
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.loop_events import Event, Guard
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project
    from brim.records.findings import Confidence

_BARS: Final = frozenset({"tqdm", "progress_bar", "track"})


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
    """How sure that the schedule counts optimizer steps. None if it counts micro-batches, so that both agree."""
    name = event.receiver.rpartition(".")[2]
    for module in loop.modules:
        for call in loop.model.reach.made_by(module, name):
            terms = _terms_of(call, module, loop)
            window = loop.window.terms if loop.window is not None else frozenset()
            if any(ACCUMULATION.search(each) for each in terms) or terms & window:
                return "high"
            if "len" in terms:
                return None
    return None if _ends_by_micro_batches(loop) else "medium"


def _ends_by_micro_batches(loop: TrainLoop) -> bool:
    """The training ends after a number of micro-batches, so its schedule is as long as that too."""
    counters = {_counted(each) for each in loop.of("assign") if not each.place.beyond(loop.backwards[-1].place)} - {""}
    return any(counters & _names(each.test) for each in _exits(loop))


def _exits(loop: TrainLoop) -> list[ast.If]:
    """`if global_step >= total: break`, or `return`, inside the micro loop."""
    if isinstance(loop.micro, Function):
        return []
    found = [each for each in walk_here(loop.micro) if isinstance(each, ast.If)]
    return [each for each in found if isinstance(each.body[-1], ast.Break | ast.Return)]


def _counted(event: Event) -> str:
    """The name of `name += 1`."""
    node = event.node
    is_counted = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant)
    return ast.unparse(node.target) if is_counted and isinstance(node, ast.AugAssign) else ""


def _names(node: ast.AST) -> set[str]:
    return {ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)}


def _terms_of(call: ast.Call, module: Module, loop: TrainLoop) -> set[str]:
    """The words of the numbers that a scheduler was made with, those behind its names included."""
    scope = next((each for each in loop.scopes if each.module is module), loop.root)
    around = loop.model.names.around(call, module)
    scope = around if around.name else scope
    found: set[str] = set()
    for argument in (*call.args[1:], *(each.value for each in call.keywords)):
        for node in ast.walk(argument):
            if isinstance(node, ast.Name | ast.Attribute):
                found.add(last_name(node))
                for each in loop.model.losses.assigned(scope, ast.unparse(node)):
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


def check_clip_beside_engine(module: Module, project: Project) -> Iterator[Found]:
    """DeepSpeed clips in its own step, by its own config."""
    for loop in loops_of(module, project):
        if loop.framework != "engine" or not loop.mentions(r"deepspeed\.initialize\("):
            continue
        engines = {each.receiver for each in loop.backwards}
        for event in loop.of("clip"):
            if event.place.in_handler or event.order < loop.backwards[0].order or event.receiver in engines:
                continue
            if not any(each.receiver in engines and each.order > event.order for each in loop.of("step")):
                continue
            where = event.place.scope.module
            message = _(
                "{clip} does not clip what {engine}.step() applies: DeepSpeed holds the gradients in its own buffers (with ZeRO, .grad is "
                "None or a part; with fp16 it is scaled). Only gradient_clipping in the DeepSpeed config is used."
            )
            text = message.format(
                clip=last_name(event.call.func) if event.call is not None else "clip", engine=sorted(engines)[0]
            )
            yield where.found("clip-beside-engine", event.node, text, confidence="medium")
            break


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
        message = _(
            "Where the number of batches is no multiple of {count}, the last micro-batches of an epoch are never stepped: they {lost}."
        )
        yield where.found(
            "last-window-dropped",
            window.guard.test,
            message.format(count=window.text, lost=_fate(loop).format(count=window.text)),
            confidence="medium",
            edits=_also_at_the_end(loop),
        )


def _fate(loop: TrainLoop) -> str:
    """What becomes of the gradients that are left: it depends on who clears them between two epochs, if there are several."""
    micro, before = loop.micro, loop.backwards[0].order
    around = loop.chain[-2] if len(loop.chain) > 1 else None
    outside = [each for each in loop.all_of("zero") if not each.place.in_handler and loop.micro not in each.place.loops]
    if around is None:
        is_cleared = any(each.order < before for each in outside)
        is_one_of_many = isinstance(loop.root.node, Function) and _is_called_in_loop(loop)
        if not is_one_of_many:
            return _("are thrown away")
    else:
        is_cleared = any(around in each.place.loops for each in outside)
    if is_cleared:
        return _("are thrown away at the end of the epoch")
    if isinstance(micro, ast.For) and _clears_first(loop):
        return _("are thrown away at the start of the next epoch")
    return _("are added to the first step of the next epoch, which then has more than {count}")


def _clears_first(loop: TrainLoop) -> bool:
    """Gradients are cleared in front of the first backward of a window, so also of the first window of an epoch."""
    return any(
        each.order < loop.backwards[0].order and not each.place.in_handler and not each.place.beyond(loop.backwards[0].place)
        for each in loop.of("zero")
    )


def _is_called_in_loop(loop: TrainLoop) -> bool:
    """Whether some caller runs the function once per epoch."""
    reach, name = loop.model.reach, loop.root.name
    for caller in reach.callers(name):
        for call in walk_here(caller.node):
            if isinstance(call, ast.Call) and last_name(call.func) == name and caller.module.enclosing(call, ast.For, ast.While):
                return True
    return False


def _begins_anew(loop: TrainLoop) -> bool:
    """Whether the count of the window begins again with each pass over the data, which is finite."""
    window, micro = loop.window, loop.micro
    if window is None or window.index is None or not isinstance(micro, ast.For):
        return False
    if len(loop.chain) == 1 and _exits(loop) and not _is_called_in_loop(loop):
        return False  # one pass over a stream that ends by a count
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


def check_off_by_one(module: Module, project: Project) -> Iterator[Found]:
    """`index % n == 0` with an index that starts at 0: the first window is full after one micro-batch."""
    for loop in loops_of(module, project):
        window = loop.window
        if (
            window is None
            or window.guard is None
            or window.shape != "modulo"
            or window.index is None
            or loop.framework == "engine"
        ):
            continue
        if not _is_full_at_zero(window.guard, loop) or _first_value(window.index, loop) != 0 or _steps_before_backward(loop):
            continue
        where = window.guard.scope.module
        message = _(
            "{index} is 0 in the first micro-batch, so the first step is made after 1 micro-batch instead of {count}. Count from 1."
        )
        yield where.found(
            "window-off-by-one",
            window.guard.test,
            message.format(index=where.text_of(window.index), count=window.text),
            confidence="medium",
            edits=_count_from_one(loop),
        )


def _is_full_at_zero(guard: Guard, loop: TrainLoop) -> bool:
    """`x % n == 0` or `not x % n`; the same turned round in front of a `continue`; each also with `or` something."""
    model, scope = loop.model, guard.scope
    test = model.value_of(guard.test, scope)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) and guard.holds:
        test = next((each for each in test.values if any(model.remainder(node, scope) for node in ast.walk(each))), test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return guard.holds and model.remainder(test.operand, scope) is not None
    if model.remainder(test, scope) is not None:
        return not guard.holds
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or model.remainder(test.left, scope) is None:
        return False
    is_zero = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value == 0
    return is_zero and isinstance(test.ops[0], ast.Eq if guard.holds else ast.NotEq | ast.Gt)


def _first_value(index: ast.expr, loop: TrainLoop) -> int | None:
    """What the index of a window is in the first micro-batch, where the code shows it."""
    if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Add | ast.Sub) and isinstance(index.right, ast.Constant):
        start = _first_value(index.left, loop)
        by = index.right.value
        return None if start is None or not isinstance(by, int) else start + (by if isinstance(index.op, ast.Add) else -by)
    if not isinstance(index, ast.Name | ast.Attribute):
        return None
    name = ast.unparse(index)
    counted = _counted_by_loop(name, loop)
    return counted if counted is not None else _counted_by_hand(name, loop)


def _counted_by_loop(name: str, loop: TrainLoop) -> int | None:
    """The i of `for i, batch in enumerate(loader)` and of `for i in range(n)`."""
    micro = loop.micro
    if not isinstance(micro, ast.For):
        return None
    target = micro.target.elts[0] if isinstance(micro.target, ast.Tuple) and micro.target.elts else micro.target
    call: ast.expr = micro.iter
    while isinstance(call, ast.Call) and last_name(call.func) in _BARS and call.args:
        call = call.args[0]
    if not isinstance(call, ast.Call) or ast.unparse(target) != name:
        return None
    if last_name(call.func) == "enumerate":
        start = call.args[1] if len(call.args) > 1 else next((each.value for each in call.keywords if each.arg == "start"), None)
    elif last_name(call.func) in {"range", "trange"}:
        start = call.args[0] if len(call.args) > 1 else None
    else:
        return None
    if start is None:
        return 0
    return start.value if isinstance(start, ast.Constant) and isinstance(start.value, int) else None


def _counted_by_hand(name: str, loop: TrainLoop) -> int | None:
    """`count = 0` once outside, and `count += 1` in every micro-batch: in front of the step or behind it."""
    step = loop.steps[0] if loop.steps else None
    sets = loop.timeline.by_target.get(name, [])
    starts = [each for each in sets if isinstance(each.node, ast.Assign)]
    adds = [each for each in sets if isinstance(each.node, ast.AugAssign)]
    if step is None or len(starts) != 1 or len(adds) != 1 or loop.micro in starts[0].place.loops:
        return None
    start, add = starts[0].node, adds[0]
    if not isinstance(start, ast.Assign) or not isinstance(start.value, ast.Constant) or type(start.value.value) is not int:
        return None
    is_each = loop.micro in add.place.loops and not add.place.beyond(loop.backwards[-1].place) and _counted(add) == name
    if not is_each or add.place.loops[-1] is not loop.micro:
        return None
    return start.value.value + (1 if add.order < step.order else 0)


def _steps_before_backward(loop: TrainLoop) -> bool:
    """Step first, then forward and backward: what is stepped at 0 is nothing, and each window is whole."""
    return not loop.steps or loop.steps[0].order < loop.backwards[0].order


def _count_from_one(loop: TrainLoop) -> tuple[Edit, ...]:
    """`(index + 1) % n`, where the index is a plain name in the condition itself."""
    window = loop.window
    if window is None or window.guard is None or not isinstance(window.index, ast.Name | ast.Attribute):
        return ()
    if not any(each is window.index for each in ast.walk(window.guard.test)):
        return ()
    module = window.guard.scope.module
    return (module.replace(window.index, f"({module.text_of(window.index)} + 1)"),)


CHECKS = (check_scheduler, check_clip, check_clip_beside_engine, check_last_window, check_off_by_one)
