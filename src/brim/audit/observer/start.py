"""What is put on, and at which import."""

# ruff: noqa: PTH118 (pathlib is not imported into somebody else's interpreter)

from __future__ import annotations

import atexit
import os
import sys
import weakref
from contextlib import suppress
from typing import Any

from .facts import listeners
from .importlib_bootstrap import (
    after,
    backward_of,
    call_of,
    excepthook_of,
    forward_of,
    grad_of,
    inherited_call_of,
    is_ours,
    iter_of,
    mark,
    next_of,
    scaler_step_of,
    scriptable,
    step_of,
)
from .imports import when_imported
from .watch import Watch

_LOSSES = ("cross_entropy", "nll_loss")


class Observer:
    """The observer of this process: nothing but a listener until torch is there."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.watch: Watch | None = None

    def on_torch(self, torch: Any) -> None:
        """Put the hooks on; what cannot be put on is told to brim, and nobody else."""
        _touch(self._folder, "torch")
        try:
            self._put_on(torch)
        except Exception as error:  # noqa: BLE001 (the script never notices)
            _touch(self._folder, "trouble", f"torch {torch.__version__}: {type(error).__name__}: {error}")

    def _put_on(self, torch: Any) -> None:
        if self.watch is None:
            self.watch = watch = Watch(torch, self._folder)
            atexit.register(lambda: watch.measured(watch.end))
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=watch.fork)
            sys.excepthook = excepthook_of(sys.excepthook)
            steps = sys.modules["torch.optim.optimizer"]
            steps.register_optimizer_step_pre_hook(lambda optimizer, *_given: watch.measured(watch.begin_step, optimizer))
            steps.register_optimizer_step_post_hook(lambda optimizer, *_given: watch.measured(watch.end_step, optimizer))
        put_on(torch, self.watch)


def start() -> None:
    """Called at the interpreter's start."""
    folder = os.environ["BRIM_OBSERVE"]
    _touch(folder, "reached")
    observer = Observer(folder)
    when_imported({"torch": observer.on_torch, **listeners(lambda: observer.watch)})


def put_on(torch: Any, watch: Watch) -> None:
    """Wrap the few functions of torch that are watched."""
    optimizer, data = torch.optim.Optimizer, torch.utils.data.DataLoader
    _wrap(optimizer, "__init__", lambda original: after(original, watch, watch.construct_optimizer))
    _wrap(optimizer, "zero_grad", lambda original: after(original, watch, watch.clear_gradients))
    _wrap(torch.nn.Module, "zero_grad", lambda original: after(original, watch, watch.clear_gradients))
    with suppress(AttributeError):  # only for what a step raises
        _wrap_profiled_step(optimizer, watch)
    _wrap(torch.autograd, "backward", lambda original: backward_of(original, watch))
    _wrap(torch.autograd, "grad", lambda original: grad_of(original, watch))
    for name in _LOSSES:
        _wrap(torch.nn.functional, name, lambda original: scriptable(after(original, watch, watch.count_targets), original))
    _wrap(data, "__init__", lambda original: after(original, watch, watch.loaders.construct))
    _wrap(data, "__iter__", lambda original: iter_of(original, watch))
    _wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", lambda original: next_of(original, watch))  # noqa: SLF001
    for scaler in _scalers(torch):
        _wrap(scaler, "step", lambda original: scaler_step_of(original, watch))
        _wrap(scaler, "scale", lambda original: after(original, watch, watch.scale))
    _Search(torch, watch)


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    """Put a wrapper in a name's place, unless one is there."""
    original = owner.__dict__[name]
    if is_ours(original):
        return
    wrapped = wrapper(original)
    mark(wrapped)
    setattr(owner, name, wrapped)


def _wrap_profiled_step(optimizer: Any, watch: Watch) -> None:
    """Where torch puts its own wrapper around the `step` of each class of optimizers, ours goes below it."""
    original = optimizer.profile_hook_step
    if not is_ours(original):

        def profile_hook_step(function: Any) -> Any:
            return original(step_of(function, watch))

        mark(profile_hook_step)
        optimizer.profile_hook_step = staticmethod(profile_hook_step)


def _scalers(torch: Any) -> list[Any]:
    """Of the classes of gradient scalers those that have a `step` of their own."""
    found = [getattr(getattr(torch, "amp", None), "GradScaler", None), getattr(torch.cuda.amp, "GradScaler", None)]
    return [each for each in found if each is not None and "step" in each.__dict__]


class _Search:
    """Models are found by what is called: for two steps after an optimizer was made, every module's call is looked at.

    Where a model is found, its class gets a wrapper, and only its class: hooks on the model itself would be saved and copied with it.
    While a model runs, nothing is looked at; so torch.compile never sees the search.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._module = torch.nn.Module
        self._watch = watch
        self._original = self._module.__call__
        self._searching = call_of(self._original, watch)
        watch.look_for_models = self.switch
        watch.found_model = self.found

    def switch(self, on: bool) -> None:
        """Search, or stop searching."""
        current = self._module.__dict__.get("__call__")
        if on and current is self._original:
            self._module.__call__ = self._searching
        elif not on and current is self._searching:
            self._module.__call__ = self._original

    def found(self, model: Any) -> None:
        """Watch the calls of this class from now on."""
        kind = type(model)
        if kind.__name__ == "OptimizedModule":
            self._found_compiled(model)
            return
        current = kind.__call__
        if is_ours(current):
            return
        # What is inherited is looked up at each call: torch.fx puts another `Module.__call__` in its place while it traces.
        inherits = current in (self._original, self._searching)
        wrapped = call_of(inherited_call_of(self._module) if inherits else current, self._watch)
        mark(wrapped)
        kind.__call__ = wrapped

    def _found_compiled(self, model: Any) -> None:
        """What torch.compile made of a model: its `forward` is its own, and is not saved with it."""
        original = model.__dict__.get("forward")
        if original is not None and not is_ours(original):
            wrapped: Any = forward_of(original, weakref.ref(model), self._watch)
            mark(wrapped)
            model.__dict__["forward"] = wrapped


def _touch(folder: str, name: str, text: str = "") -> None:
    """A sign for brim that we came so far."""
    with suppress(OSError):
        sign = os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(sign, text.encode("utf-8", "replace"))
        os.close(sign)
