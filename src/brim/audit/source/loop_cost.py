"""What a training loop keeps, waits for or throws away for nothing: graphs, the queue of the GPU, its cache, the order of the data."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.found import Edit
from brim.audit.source.loop_losses import comes_before
from brim.audit.source.loop_model import TrainLoop, loops_of
from brim.audit.source.loop_reach import reach_of
from brim.audit.source.module import keyword_of, last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.source.loop_events import Event
    from brim.audit.source.module import Module
    from brim.audit.source.names import Scope
    from brim.audit.source.project import Project

_LOSS: Final = re.compile(r"loss|cost|objective|nll|elbo", re.IGNORECASE)
_KEEPS: Final = frozenset({"mean", "sum", "cpu", "to", "float", "double", "cuda", "clone", "squeeze", "reshape", "view"})
"""Methods whose result still holds the graph."""
_ACCELERATOR: Final = r"\.cuda\(|['\"]cuda|\.to\((?!\s*['\"]cpu)|accelerator|fabric|xpu|mps|device_map"
_AVAILABLE: Final = re.compile(r"is_available|device|cuda")
"""Conditions that hold all the time on the machine that matters."""
_MEASURED: Final = re.compile(r"loss|cost|nll|norm|acc|correct|metric|score|error|grad", re.IGNORECASE)
_REDUCED: Final = frozenset({"sum", "mean", "max", "min", "norm", "any", "all"})
_FINDS_SIZE: Final = re.compile(r"batch_?size|probe|search|profil|bench|measure|memory", re.IGNORECASE)
"""Functions that try sizes one after another: they empty the cache so that each trial starts alike."""
_EVALUATION: Final = re.compile(r"val|eval|test|dev|predict|infer", re.IGNORECASE)


def check_graph_kept(module: Module, project: Project) -> Iterator[Found]:
    """A loss is kept with the graph behind it."""
    for loop in loops_of(module, project):
        if loop.has_closure:
            continue
        names: dict[int, set[str]] = {}
        for event in (*loop.of("assign"), *loop.of("call")):
            kept = _kept(event, loop, names)
            if kept is None:
                continue
            target, loss = kept
            if (
                _holds_for_long(target, event, loop)
                and _is_tensor(loss, event, loop)
                and target.partition("[")[0] not in loop.timeline.to_backward
            ):
                yield _graph_kept(event, target, loss, loop)


def _kept(event: Event, loop: TrainLoop, known: dict[int, set[str]]) -> tuple[str, ast.expr] | None:
    """What keeps which loss: `total += loss`, `total = total + loss`, `losses.append(loss)`."""
    if any(_is_no_grad(each) for each in event.place.withs):
        return None
    target, value = _added(event.node)
    if target is None or value is None:
        return None
    scope = event.place.scope
    names = known[id(scope)] if id(scope) in known else known.setdefault(id(scope), _losses_in(scope, loop))
    loss = _bare(value, names)
    return None if loss is None or ast.unparse(target) in names else (ast.unparse(target), loss)


def _added(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """What something is added to, and what is added."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.target, node.value
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add)
        and len(node.targets) == 1
    ):
        left, right, text = node.value.left, node.value.right, ast.unparse(node.targets[0])
        if text in {ast.unparse(left), ast.unparse(right)}:
            return node.targets[0], right if ast.unparse(left) == text else left
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append" and len(node.args) == 1:
        return node.func.value, node.args[0]
    return None, None


def _losses_in(scope: Scope, loop: TrainLoop) -> set[str]:
    """The names that hold a loss with its graph in a function: those on the way to backward, and what a step gives back."""
    known = {pair for _event, traced in loop.losses for pair in traced.names}
    names = {name for where, name in known if where == id(scope) and _LOSS.search(name)}
    for event in loop.of("assign"):
        node = event.node
        if event.place.scope is not scope or not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        inner = loop.model.names.resolve(node.value, scope)
        if inner is not None and isinstance(node.targets[0], ast.Name) and _gives_back(inner, known, loop):
            names.add(node.targets[0].id)
    return names


def _gives_back(scope: Scope, known: set[tuple[int, str]], loop: TrainLoop) -> bool:
    """Whether a function returns the very tensor that it ran backward on."""
    returns = [each.node.value for each in loop.model.losses.read(scope) if isinstance(each.node, ast.Return)]
    return bool(returns) and all(each is not None and (id(scope), ast.unparse(each)) in known for each in returns)


def _bare(node: ast.expr, names: set[str]) -> ast.expr | None:
    """The loss in an expression that still has its graph there."""
    if isinstance(node, ast.Name | ast.Attribute):
        return node if ast.unparse(node) in names else None
    if isinstance(node, ast.BinOp):
        return _bare(node.left, names) or _bare(node.right, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPS:
        return _bare(node.func.value, names)
    return None


def _is_no_grad(context: ast.expr) -> bool:
    return isinstance(context, ast.Call) and last_name(context.func) in {"no_grad", "inference_mode"}


def _holds_for_long(target: str, event: Event, loop: TrainLoop) -> bool:
    """It is made outside the loop and never begun anew inside it."""
    base = target.partition("[")[0]
    depth = len(loop.chain)
    begun = [
        each
        for each in loop.timeline.by_target.get(base, [])
        if each.place.scope is event.place.scope and not isinstance(each.node, ast.AugAssign)
    ]
    if loop.window is not None and loop.window.shape == "inner" and any(len(each.place.loops) == depth - 1 for each in begun):
        return False
    cleared = [
        each
        for each in loop.of("call")
        if each.receiver == base and each.call is not None and last_name(each.call.func) in {"clear", "pop"}
    ]
    is_anew = any(len(each.place.loops) >= depth and each is not event for each in begun)
    return bool(begun) and not is_anew and not cleared


def _is_tensor(loss: ast.expr, event: Event, loop: TrainLoop) -> bool:
    """What the name holds at this place was not made a number before."""
    before = [
        each for each in loop.model.losses.assigned(event.place.scope, ast.unparse(loss)) if comes_before(each.event.node, loss)
    ]
    if not before:
        return isinstance(loss, ast.Attribute)
    value = before[-1].value
    is_number = isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call)
        and last_name(value.func) in {"item", "detach", "float", "detach_", "tolist", "numpy", "gather", "reduce", "all_reduce"}
    )
    inside = len(before[-1].event.place.loops) > 0 or isinstance(loop.micro, ast.FunctionDef)
    return inside and not is_number and not any(_is_no_grad(each) for each in before[-1].event.place.withs)


def _graph_kept(event: Event, target: str, loss: ast.expr, loop: TrainLoop) -> Found:
    module = event.place.scope.module
    name = module.text_of(loss)
    message = _(
        "{target} keeps {loss} with its graph: the graph of every micro-batch stays alive, so memory grows from step to step until "
        "the loop ends."
    ).format(target=target, loss=name)
    return module.found(
        "graph-kept", event.node, message, edits=(module.replace(loss, f"{name}.detach()"),), is_safe=bool(loop.backwards)
    )


def check_empty_cache(module: Module, project: Project) -> Iterator[Found]:
    """The allocator's cache is thrown away after every batch."""
    for loop in loops_of(module, project):
        backward = loop.backwards[-1]
        if _tries_sizes(loop):
            continue
        for event in loop.of("empty"):
            if event.place.in_handler or any(
                not _AVAILABLE.search(ast.unparse(each.test)) for each in event.place.beyond(backward.place)
            ):
                continue
            node, where = _beside(event, backward)
            message = _(
                "{call} runs for every micro-batch: the GPU waits until all its work is done, and the next micro-batch must ask the "
                "driver for the same memory again. It frees nothing that training could not use anyway."
            )
            yield where.found("empty-cache-in-loop", node, message.format(call=event.place.scope.module.text_of(event.node)))
            break


def _tries_sizes(loop: TrainLoop) -> bool:
    """A search for a batch size: by the names of its functions, or because running out of memory is part of its loop."""
    if any(_FINDS_SIZE.search(each.place.scope.name) for each in loop.backwards):
        return True
    handlers = [each for each in ast.walk(loop.micro) if isinstance(each, ast.ExceptHandler) and each.type is not None]
    return any("OutOfMemory" in ast.unparse(each.type) for each in handlers if each.type is not None)


def _beside(event: Event, backward: Event) -> tuple[ast.AST, Module]:
    """Where something is called from the function that runs backward; where it stands, if that is another way round."""
    for site in event.path:
        if site.scope is backward.place.scope:
            return site.call, site.scope.module
    return event.node, event.place.scope.module


def check_item(module: Module, project: Project) -> Iterator[Found]:
    """The CPU waits for the GPU in every micro-batch."""
    for loop in loops_of(module, project):
        if not loop.mentions(_ACCELERATOR) or any(_FINDS_SIZE.search(each) for each in (loop.root.name, module.name)):
            continue
        for event in loop.of("read"):
            if event.place.in_handler or event.place.beyond(loop.backwards[-1].place) or not _is_on_gpu(event, loop):
                continue
            where = event.place.scope.module
            message = _(
                "{call} makes the CPU wait for the GPU in every micro-batch, so that the next one is not queued in time. Sum on the "
                "GPU and read it when something is logged."
            )
            yield where.found("item-every-step", event.node, message.format(call=where.text_of(event.node)), confidence="medium")
            break


def _is_on_gpu(event: Event, loop: TrainLoop) -> bool:
    """Whether a number is computed on the GPU: a loss, a metric, or a reduction of the batch that was moved there."""
    if _MEASURED.search(event.receiver):
        return True
    reduced = event.call.func.value if event.call is not None and isinstance(event.call.func, ast.Attribute) else None
    if not isinstance(reduced, ast.Call) or last_name(reduced.func) not in _REDUCED:
        return False
    names = {ast.unparse(each) for each in ast.walk(reduced) if isinstance(each, ast.Name)}
    moved = (each for name in names for each in loop.model.losses.assigned(event.place.scope, name))
    return any(
        isinstance(inner, ast.Call) and last_name(inner.func) in {"to", "cuda"}
        for each in moved
        for inner in ast.walk(each.value)
    )


def check_set_epoch(module: Module, project: Project) -> Iterator[Found]:
    """Every epoch has the order of the first."""
    if "DistributedSampler(" not in module.source.text:
        return
    reach = reach_of(project)
    users = [module, *reach.importers(module)]
    if any(reach.calls(each, "set_epoch") for each in users):
        return
    samplers = [each for each in reach.calls(module, "DistributedSampler") if not _is_for_evaluation(each, module)]
    epochs = next(((each, loop) for each in users if (loop := _epochs(each)) is not None), None)
    if not samplers or epochs is None:
        return
    where, loop = epochs
    message = _(
        "set_epoch is never called on the sampler of {file}, line {line}: every epoch deals out the data in the same order, to the same "
        "ranks."
    ).format(file=module.source.file, line=samplers[0].lineno)
    edits = _tell_the_epoch(loop, samplers[0], module) if where is module else ()
    yield where.found("set-epoch-missing", loop, message, until=loop.iter, edits=edits, is_safe=bool(edits))


def _is_for_evaluation(call: ast.Call, module: Module) -> bool:
    shuffle = keyword_of(call, "shuffle")
    if shuffle is not None and not (isinstance(shuffle.value, ast.Constant) and shuffle.value.value is True):
        return True
    statement = module.statement(call)
    words = [ast.unparse(each) for each in call.args[:1]]
    words += [ast.unparse(each) for each in statement.targets] if isinstance(statement, ast.Assign) else []
    function = module.enclosing(call, ast.FunctionDef)
    words += [function.name] if function is not None else []
    return any(_EVALUATION.search(each) for each in words)


def _epochs(module: Module) -> ast.For | None:
    """The loop over more than one epoch, by its name."""
    if "epoch" not in module.source.text:
        return None
    for node in ast.walk(module.tree):
        if isinstance(node, ast.For) and "epoch" in ast.unparse(node.target).lower() and ast.unparse(node.iter) != "range(1)":
            return node
    return None


def _tell_the_epoch(loop: ast.For, sampler: ast.Call, module: Module) -> tuple[Edit, ...]:
    """`sampler.set_epoch(epoch)` as the first line, where both names are known there."""
    statement = module.parents.get(sampler)
    is_plain = (
        isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and isinstance(loop.target, ast.Name)
    )
    if not is_plain or module.enclosing(sampler, ast.FunctionDef) is not module.enclosing(loop, ast.FunctionDef):
        return ()
    if module.parents.get(statement) is not module.parents.get(loop) or sampler.lineno > loop.lineno:  # type: ignore[arg-type]
        return ()
    first = loop.body[0]
    indent = module.lines[first.lineno - 1][: module.column(first.lineno, first.col_offset)]
    name, epoch = ast.unparse(statement.targets[0]), ast.unparse(loop.target)  # type: ignore[union-attr]
    return () if indent.strip() else (_before(first, f"{name}.set_epoch({epoch})\n{indent}", module),)


def _before(statement: ast.stmt, text: str, module: Module) -> Edit:
    column = module.column(statement.lineno, statement.col_offset)
    return Edit(
        file=module.source.file, line=statement.lineno, column=column, end_line=statement.lineno, end_column=column, text=text
    )


CHECKS = (check_graph_kept, check_empty_cache, check_item, check_set_epoch)
