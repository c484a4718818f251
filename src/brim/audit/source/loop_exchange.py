"""Gradients between ranks: exchanged once per window, after every micro-batch, or never.

DistributedDataParallel exchanges gradients only for a forward through the wrapper itself, and only while `require_backward_grad_sync` is
true. A forward through `model.module` leaves its hooks idle: every rank trains a model of its own.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_model import TrainLoop, loops_of
from brim.audit.source.module import Module, last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.source.loop_events import Event
    from brim.audit.source.names import Scope
    from brim.audit.source.project import Project

_WRAPPED: Final = r"\bDistributedDataParallel\b|\bDDP\("
_SKIPS: Final = r"no_sync|require_backward_grad_sync|set_requires_gradient_sync|no_backward_sync|skip_(grad|all)_?reduce"
_BY_HAND: Final = (
    r"all_reduce\([^)\n]*grad|average_gradients|reduce_gradients|sync_grad|_allreduce_grads"
    r"|register_comm_hook|\.grad\b.*all_reduce"
)
_ALL_REDUCED: Final = re.compile(r"all_reduce|reduce_scatter|allreduce", re.IGNORECASE)
_OFF: Final = frozenset({"no_grad", "inference_mode"})


@dataclass(frozen=True)
class _Unwrapped:
    """A model without its wrapper."""

    wrapper: str
    how: str
    node: ast.expr
    """Where the wrapper is taken off."""
    module: Module


def check_not_exchanged(module: Module, project: Project) -> Iterator[Found]:
    """DDP wraps the model, and no backward of the loop makes it exchange gradients."""
    for loop in loops_of(module, project):
        yield from _not_exchanged(loop)


def _not_exchanged(loop: TrainLoop) -> Iterator[Found]:
    if loop.framework in {"engine", "fabric", "lightning"} or _is_by_hand(loop):
        return
    yield from _through_inner_module(loop)
    for found in (_never_required(loop), _always_skipped(loop)):
        if found is not None:
            yield found


def _is_by_hand(loop: TrainLoop) -> bool:
    """Gradients are summed over the ranks by the code itself."""
    if loop.mentions(_BY_HAND):
        return True
    names = [name for name in loop.timeline.by_callee if _ALL_REDUCED.search(name)]
    return any(_reads_grad(each) for name in names for each in loop.timeline.by_callee[name])


def _reads_grad(event: Event) -> bool:
    nodes = [event.node, *event.place.loops[-1:]]
    return any(isinstance(each, ast.Attribute) and each.attr == "grad" for node in nodes for each in ast.walk(node))


def _through_inner_module(loop: TrainLoop) -> Iterator[Found]:
    """`model.module(...)`, also under another name, where the wrapper is not called too: once for each wrapper."""
    is_wrapped = loop.mentions(_WRAPPED)
    inner: dict[str, tuple[ast.Call, Scope, _Unwrapped]] = {}
    called: set[str] = set()
    for event in loop.of("call"):
        if event.call is None or event.order > loop.backwards[-1].order or _is_without_gradient(event):
            continue
        called.add(ast.unparse(event.call.func))
        unwrapped = _unwrapped(event.call.func, event.place.scope, loop)
        if unwrapped is not None and (is_wrapped or unwrapped.how == "unwrap_model"):
            inner.setdefault(unwrapped.wrapper, (event.call, event.place.scope, unwrapped))
    for wrapper, (call, scope, unwrapped) in inner.items():
        if wrapper in called:
            continue
        message = _(
            "The forward pass {call}(...) in line {line} does not run the DistributedDataParallel wrapper {wrapper}, so its gradients are "
            "never exchanged: every rank trains a different model. Call {wrapper}(...) instead."
        )
        text = message.format(call=scope.module.text_of(call.func), line=call.lineno, wrapper=wrapper)
        is_here = unwrapped.module is scope.module
        yield scope.module.found("gradients-not-exchanged", unwrapped.node if is_here else call, text)


def _is_without_gradient(event: Event) -> bool:
    return any(isinstance(each, ast.Call) and last_name(each.func) in _OFF for each in event.place.withs)


def _unwrapped(function: ast.expr, scope: Scope, loop: TrainLoop, depth: int = 0) -> _Unwrapped | None:
    """The inner module that a function is, if it is one; also behind a name, and as `model.module.forward`."""
    if isinstance(function, ast.Attribute) and re.search(r"^forward$|loss", function.attr):
        return _unwrapped(function.value, scope, loop, depth)
    if isinstance(function, ast.Attribute) and function.attr == "module" and not isinstance(function.value, ast.Call):
        wrapper = ast.unparse(function.value)
        return None if wrapper in {"self", "cls"} else _Unwrapped(wrapper, "module", function, scope.module)
    if isinstance(function, ast.Call) and last_name(function.func) == "unwrap_model" and function.args:
        return _Unwrapped(ast.unparse(function.args[0]), "unwrap_model", function, scope.module)
    if isinstance(function, ast.IfExp):
        return _unwrapped(function.body, scope, loop, depth)
    if not isinstance(function, ast.Name) or depth:
        return None
    here: Scope | None = scope
    while here is not None:
        values = loop.model.losses.assigned(here, function.id)
        if values:
            found = _unwrapped(values[-1].value, here, loop, 1) if values[-1].index is None else None
            return None if found is None or found.wrapper == function.id else found
        here = here.outer
    return None


def _never_required(loop: TrainLoop) -> Found | None:
    """`model.require_backward_grad_sync` is set, and never to something that can be true."""
    values: list[tuple[Event, ast.expr]] = [
        (each, each.node.value)
        for name, events in loop.timeline.by_target.items()
        if name.endswith(".require_backward_grad_sync")
        for each in events
        if isinstance(each.node, ast.Assign)
    ]
    if not values or not all(_is_never_true(value, event) for event, value in values):
        return None
    event, value = values[-1]
    where = event.place.scope.module
    message = _(
        "{value} is never true here, so DistributedDataParallel never exchanges gradients: every rank trains a different model. It must be "
        "true in the last micro-batch of each window."
    )
    return where.found("gradients-not-exchanged", event.node, message.format(value=where.text_of(value)))


def _is_never_true(value: ast.expr, event: Event) -> bool:
    """False, or `i == n` with an i that runs from 0 to n - 1."""
    if isinstance(value, ast.Constant):
        return value.value is False
    if not isinstance(value, ast.Compare) or len(value.ops) != 1 or not isinstance(value.ops[0], ast.Eq | ast.GtE):
        return False
    for loop in event.place.loops:
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Call):
            continue
        if last_name(loop.iter.func) == "range" and len(loop.iter.args) == 1:
            end = ast.unparse(loop.iter.args[0])
            if ast.unparse(value.left) == loop.target.id and ast.unparse(value.comparators[0]) == end:
                return True
    return False


def _always_skipped(loop: TrainLoop) -> Found | None:
    """Every backward of the loop is under `no_sync()`."""
    if not loop.mentions(_WRAPPED):
        return None
    contexts = []
    for each in loop.all_of("backward"):
        context = next((its for its in each.place.withs if isinstance(its, ast.Call) and last_name(its.func) == "no_sync"), None)
        if context is None:
            return None
        contexts.append((each, context))
    event, context = contexts[0]
    where = event.place.scope.module
    message = _(
        "Every backward pass of this loop is under {context}, so DistributedDataParallel never exchanges gradients: every rank trains a "
        "different model. Leave the last micro-batch of each window outside."
    )
    return where.found("gradients-not-exchanged", context, message.format(context=where.text_of(context)), until=event.node)


def check_sync(module: Module, project: Project) -> Iterator[Found]:
    """DDP exchanges gradients after every backward of a window."""
    for loop in loops_of(module, project):
        if loop.window is None or loop.window.shape == "sync" or loop.in_accumulate or loop.framework == "engine":
            continue
        is_accelerate = loop.framework == "accelerate"
        if not is_accelerate and not loop.mentions(r"\bDistributedDataParallel\(|\bDDP\("):
            continue
        if is_accelerate and loop.mentions(r"\.accumulate\(|sync_gradients|[Dd]eep[Ss]peed|(?i:fsdp)"):
            continue
        if loop.mentions(_SKIPS) or next(_not_exchanged(loop), None) is not None:
            continue
        event = loop.backwards[-1]
        if is_accelerate:
            message = _(
                "On several GPUs, gradients are exchanged in every backward, and only the last of {count} needs it: put the body of the "
                "loop under {accelerator}.accumulate(model), or the other micro-batches under {accelerator}.no_sync(model)."
            )
        else:
            message = _(
                "DistributedDataParallel exchanges all gradients in every backward, and only the last of {count} needs it: put the others "
                "under model.no_sync(), forward included."
            )
        text = message.format(count=loop.window.text or _("several"), accelerator=event.receiver)
        yield event.place.scope.module.found("sync-every-micro-batch", event.node, text, confidence="medium")


CHECKS = (check_not_exchanged, check_sync)
