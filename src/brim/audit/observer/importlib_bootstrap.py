"""The wrappers: the only frames of ours that stand between the script's call and what it calls.

This file has its name from how `warnings` counts: a frame whose file name holds "importlib" and "_bootstrap" is not counted for
`stacklevel`. So a warning from below still names the line of the script that it is about. Tracebacks are cleared of these frames before
Python prints them (`without_our_frames`).

Under torch.compile a wrapper is traced as if it were not there: `is_compiling()` is a constant then. It is also true while torch.fx and
torch.jit trace, which would take what we look at for part of the model.
"""

from __future__ import annotations

import functools
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .watch import Watch

    Function = Callable[..., Any]


def call_of(original: Function, watch: Watch) -> Function:
    """Of `Module.__call__`: a call from outside any other module is a forward pass of a model."""
    is_compiling = watch.is_compiling

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 (the name that a profiler shows)
        if is_compiling() or watch.is_busy or not watch.measured(watch.begin_forward, self):
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            watch.measured(watch.fail, "forward", error, (args, kwargs))
            raise
        watch.measured(watch.end_forward, self, args, kwargs)
        return result

    return __call__


def inherited_call_of(module: Any) -> Function:
    """`Module.__call__`, whatever it is when it is called."""

    @functools.wraps(module.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return module.__call__(self, *args, **kwargs)

    return __call__


def forward_of(original: Function, model: Function, watch: Watch) -> Function:
    """Of the `forward` of one compiled model, which `model()` gives: its class also wraps what the compiler makes."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(model(), *args, **kwargs)

    call = call_of(lambda _model, *args, **kwargs: original(*args, **kwargs), watch)
    return forward


def backward_of(original: Function, watch: Watch) -> Function:
    """Of `torch.autograd.backward`: it ends a micro-batch."""
    is_compiling = watch.is_compiling

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or watch.is_busy:
            return original(*args, **kwargs)
        watch.measured(watch.begin_backward)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            watch.measured(watch.fail, "backward", error, None)
            raise
        watch.measured(watch.end_backward, args, kwargs)
        return result

    return backward


def grad_of(original: Function, watch: Watch) -> Function:
    """Of `torch.autograd.grad`: layers that it computes again are no forward passes of a model."""
    is_compiling = watch.is_compiling

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or watch.is_busy:
            return original(*args, **kwargs)
        watch.is_busy = True
        try:
            return original(*args, **kwargs)
        finally:
            watch.is_busy = watch.has_ended

    return grad


def step_of(original: Function, watch: Watch) -> Function:
    """Of an optimizer's `step`: only for what it raises. Its beginning and its end come by torch's own hooks."""
    is_compiling = watch.is_compiling

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            watch.measured(watch.fail, "optimizer", error, None)
            raise

    return step


def scaler_step_of(original: Function, watch: Watch) -> Function:
    """Of `GradScaler.step`: it leaves the optimizer's step out where a gradient is not finite."""

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = watch.steps_begun
        result = original(self, optimizer, *args, **kwargs)
        if watch.steps_begun == before:
            watch.measured(watch.skip_step, optimizer)
        return result

    return step


def after(original: Function, watch: Watch, then: Function) -> Function:
    """Call `then` with the arguments of a call that went well."""
    is_compiling = watch.is_compiling

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_compiling():
            watch.measured(then, args, kwargs)
        return result

    return wrapped


def scriptable(wrapped: Any, original: Any) -> Function:
    """For torch.jit, which compiles functions from their source: it is given the original's, and the names that it uses."""
    code, names, inner = wrapped.__code__, original.__globals__, wrapped.__closure__
    made: Any = functools.update_wrapper(types.FunctionType(code, names, original.__name__, None, inner), original)
    made.__prepare_scriptable__ = lambda: original
    return made  # type: ignore[no-any-return]


def next_of(original: Function, watch: Watch) -> Function:
    """Of a data loader's iterator: how long the script waits for a batch."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807
        began = watch.measured(watch.begin_wait)
        if began is None:
            return original(self)
        try:
            batch = original(self)
        except StopIteration:
            watch.measured(watch.end_wait, began, self, True)
            raise
        except BaseException:
            watch.is_waiting = False
            raise
        watch.measured(watch.end_wait, began, self, False)
        return batch

    return __next__


def iter_of(original: Function, watch: Watch) -> Function:
    """Of a data loader: starting its workers is waiting for data too."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807
        began = watch.measured(watch.begin_wait)
        try:
            iterator = original(self)
        except BaseException:
            watch.is_waiting = False
            raise
        watch.measured(watch.start_loader, began, self, iterator)
        return iterator

    return __iter__


def mark(wrapped: Any) -> None:
    """Say that this is one of ours."""
    wrapped.brim_wrapper = wrapped


def is_ours(function: Any) -> bool:
    """Whether it was marked, itself: whoever wraps it by `functools.wraps` takes its attributes over."""
    return function is not None and getattr(function, "brim_wrapper", None) is function


def exec_module_of(loader: Any, name: str, then: Function) -> Function:
    """Of a loader: once, and for one module."""
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        with suppress(Exception):
            del loader.exec_module
        original(module)
        if module.__name__ == name:
            with suppress(Exception):
                then(module)

    return exec_module


def excepthook_of(original: Function) -> Function:
    """Of `sys.excepthook`: a traceback looks as it would without us."""

    @functools.wraps(original)
    def excepthook(kind: Any, error: Any, trace: Any) -> Any:
        with suppress(Exception):
            trace = without_our_frames(error, set()) or trace
        return original(kind, error, trace)

    return excepthook


def without_our_frames(error: Any, seen: set[int]) -> Any:
    """Take this file's frames out of an error's traceback, and out of those of the errors behind it."""
    if error is None or id(error) in seen:
        return None
    seen.add(id(error))
    kept = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename != __file__:
            kept.append(trace)
        trace = trace.tb_next
    for one, following in zip(kept, [*kept[1:], None]):  # noqa: B905 (Python 3.9)
        one.tb_next = following
    error.__traceback__ = kept[0] if kept else None
    without_our_frames(error.__cause__, seen)
    without_our_frames(error.__context__, seen)
    return error.__traceback__
