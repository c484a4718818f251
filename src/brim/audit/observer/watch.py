"""What happened since the last optimizer step. Every method runs inside `measured`, which times it and keeps its errors to itself."""

# ruff: noqa: PTH119 (pathlib is not imported into somebody else's interpreter)

from __future__ import annotations

import os
import sys
import time
import weakref
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .events import EventFile, number
from .later import Waiting, known, total
from .loaders import Loaders, files_of_the_script
from .machine import Memory, Pulse, command_line, identity
from .shapes import Given, count_targets, names_of
from .window import Call, Micro, evaluations_among

if TYPE_CHECKING:
    from collections.abc import Callable

_MESSAGE = 500
"""Characters of an error's message that are kept."""
_MOST_CALLS = 10_000
"""Forward passes without a backward that are remembered."""
_MOST_SEARCHES = 20
"""How often models are looked for because of a step on what was not seen: some scripts train no module at all."""


class Watch:
    """One process, watched from its first optimizer on."""

    def __init__(self, torch: Any, folder: str) -> None:
        self._torch = torch
        self.file = EventFile(folder)
        self.loaders = Loaders(torch, self.file.keep)
        self.is_compiling: Callable[[], bool] = _is_compiling(torch)
        self.look_for_models: Callable[[bool], None] = lambda _on: None
        """Switches the search for models on and off; start.py puts it here."""
        self.found_model: Callable[[Any], None] = lambda _model: None
        self.has_ended = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.pid = os.getpid()
        self.is_busy = self.has_ended
        """Inside a forward or backward pass, where nothing more is looked at."""
        self.is_waiting = False
        self.steps_begun = 0
        self._steps = self._searching_steps = self._step_depth = 0
        self._models: Any = weakref.WeakKeyDictionary()
        self._optimizers: dict[int, int] = {}
        self._stepped_last: set[int] = set()
        """The optimizers that took the last step together."""
        self._cleared: set[int] = set()
        self._own_seconds = self._told_own_seconds = 0.0
        self._waiting_lines: list[Waiting] = []
        self._memory = Memory(self._torch)
        self._pulse = Pulse(self._torch, self.loaders)
        self._calls: list[Call] = []
        self._targets: list[Any] = []
        self._unscaled: Any = None
        self._micros: list[Micro] = []
        self._stepped_in_backward: Any = None
        self._learning_rate: Any = None
        self._unseen_backwards = self._unseen_steps = 0
        self._noted_error = 0
        self._mark: float | None = None
        self._window_began: float | None = None
        self._pending_wait = self._wait_seconds = self._evaluation_seconds = 0.0
        self._discarded = self._evaluations = self._evaluation_rows = 0
        self._given = self._consumed = self._ends_in = 0
        self._data_ended: str | None = None

    def measured(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method and count its seconds as ours. What it raises ends the watching, and nothing else."""
        if self.has_ended:
            return None
        began = perf_counter()
        try:
            return method(*arguments)
        except Exception as error:  # noqa: BLE001 (the script never notices)
            self._give_up(error)
            return None
        finally:
            self._own_seconds += perf_counter() - began

    def _give_up(self, error: BaseException) -> None:
        self.has_ended = self.is_busy = True
        with suppress(Exception):
            self.look_for_models(False)
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = "" if trace is None else f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
            self.file.keep({"kind": "gave-up", "error": f"{type(error).__name__}: {error}{where}"[:_MESSAGE]})

    # Optimizers

    def construct_optimizer(self, args: Any, kwargs: Any) -> None:
        """A new optimizer: from now on there is something to watch, and models may have to be found."""
        del kwargs
        if self._torch.utils.data.get_worker_info() is not None:
            return
        if not self.file.is_open:
            self._open()
        self._optimizers.setdefault(id(args[0]), len(self._optimizers))
        self._models = weakref.WeakKeyDictionary()
        self._searching_steps = 0
        self.look_for_models(True)

    def _open(self) -> None:
        self.file.open({"kind": "open", **identity(self._torch), "time": time.time(), "argv": command_line()})

    def begin_step(self, optimizer: Any) -> None:
        """Before an optimizer's step; a closure may call forward and backward inside it."""
        if not self.file.is_open:  # a forked process that trains
            self._open()
        self.steps_begun += 1
        self._step_depth += 1
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if self._learning_rate is None:
            self._learning_rate = rate if isinstance(rate, (int, float)) else known(rate)

    def end_step(self, optimizer: Any) -> None:
        """After an optimizer's step."""
        self._step_depth = max(0, self._step_depth - 1)
        if self._step_depth:
            return
        if self.is_busy:
            # Optimizers of single parameters that step inside backward: the window ends when backward does.
            self._stepped_in_backward = optimizer
            return
        self._close(optimizer)

    def skip_step(self, optimizer: Any) -> None:
        """A scaler found a gradient that is not finite, and left the step out."""
        self._close(optimizer, skipped=True)

    def clear_gradients(self, args: Any, kwargs: Any) -> None:
        """`zero_grad`: micro-batches whose gradients had been added are gone. Of several optimizers, when all have cleared theirs."""
        del kwargs
        if not self._micros:
            return
        owner = args[0]
        if isinstance(owner, self._torch.nn.Module):
            if owner not in self._models:
                return
        else:
            self._cleared.add(id(owner))
            if id(owner) in self._stepped_last and not self._cleared >= self._stepped_last:
                return
        if not self._step_depth:  # a closure that is called again and again inside a step loses nothing
            self._discarded += len(self._micros)
        self._micros.clear()
        self._cleared.clear()

    # Forward and backward

    def begin_forward(self, module: Any) -> bool:
        """Whether this is a model: called from outside any other module, with weights that train."""
        if not self.file.is_open:
            return False
        is_model = self._models.get(module)
        if is_model is None:
            is_model = any(parameter.requires_grad for parameter in module.parameters())
            self._models[module] = is_model
            if is_model:
                self.found_model(module)
        if not is_model:
            return False
        self._began(perf_counter())
        self.is_busy = True
        self.look_for_models(False)
        return True

    def end_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """After a forward pass."""
        self._leave()
        given = Given(self._torch, args, kwargs, names_of(module))
        if not self._torch.is_grad_enabled():
            self._evaluated(given.rows)
            return
        self._wait_seconds += self._pending_wait
        self._pending_wait = 0.0
        self._mark = perf_counter()
        self._given += self.loaders.mark_training()
        self._calls.append(Call(module, given))
        del self._calls[:-_MOST_CALLS]
        self._consumed += 1
        if self._ends_in:
            self._ends_in -= 1
            if not self._ends_in:
                self._data_ended = "here"

    def _evaluated(self, rows: int | None) -> None:
        now = perf_counter()
        if self._mark is not None:
            self._evaluation_seconds += now - self._mark
        self._pending_wait = 0.0
        self._mark = now
        self._evaluations += 1
        self._evaluation_rows += rows or 0
        self.loaders.mark_evaluation()

    def begin_backward(self) -> None:
        """Layers that are computed again inside are no forward passes."""
        self.is_busy = True

    def end_backward(self, args: Any, kwargs: Any) -> None:
        """A micro-batch is done."""
        self._leave()
        self._mark = perf_counter()
        loss = _scalar(kwargs.get("tensors", args[0] if args else None), self._unscaled)
        self._unscaled = None
        if self._calls:
            self._evaluations += evaluations_among(self._calls)
            self._micros.append(Micro(self._calls, self._targets, loss))
            self._calls, self._targets = [], []
        elif not self._micros:
            self._unseen_backwards += 1
        elif self._micros[-1].loss is not None and loss is not None:
            self._micros[-1].loss = total([self._micros[-1].loss, loss])
        self._cleared.clear()
        if self._stepped_in_backward is not None:
            optimizer, self._stepped_in_backward = self._stepped_in_backward, None
            self._close(optimizer)

    def count_targets(self, args: Any, kwargs: Any) -> None:
        """After a loss that counts its targets."""
        if self.file.is_open and self._torch.is_grad_enabled():
            with suppress(Exception):
                self._targets.append(known(count_targets(args, kwargs)))
                del self._targets[:-_MOST_CALLS]

    def scale(self, args: Any, kwargs: Any) -> None:
        """After `GradScaler.scale`: backward will be called on a multiple of this loss."""
        self._unscaled = kwargs.get("outputs", args[1] if len(args) > 1 else None)

    def fail(self, phase: str, error: BaseException, given: Any) -> None:
        """An error on its way through. Whether the script catches it shows later; whether it is about memory is judged elsewhere."""
        if phase == "optimizer":
            self._step_depth = 0
        else:
            self._leave()
        if self._noted_error == id(error) or not self.file.is_open:
            return
        self._noted_error = id(error)
        rows = Given(self._torch, *given).rows if given else next((call.rows for call in self._calls), None)
        self._calls, self._targets = [], []
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__[:-2]]
        self.file.write(
            {"kind": "error", "phase": phase, "step": self._steps, "rows": rows, "types": names, "message": str(error)[:_MESSAGE]}
        )

    def _leave(self) -> None:
        self.is_busy = self.has_ended
        if self._searching_steps < 2:
            self.look_for_models(True)

    def _began(self, now: float) -> None:
        if self._window_began is None:
            self._window_began = self._mark = now - self._pending_wait

    # Waiting for data

    def begin_wait(self) -> float | None:
        """When the waiting began; None inside another wait, and before there is an optimizer."""
        if self.is_waiting or not self.file.is_open:
            return None
        self.is_waiting = True
        return perf_counter()

    def start_loader(self, began: float | None, loader: Any, iterator: Any) -> None:
        """A loader begins to run."""
        self._waited(began)
        self.loaders.start(loader, iterator)

    def end_wait(self, began: float, iterator: Any, is_exhausted: bool) -> None:
        """A batch is here, or there is none left."""
        self._waited(began)
        if not is_exhausted:
            self._given += self.loaders.give(iterator)
            if self.loaders.gave_last(iterator):
                self._ends_in = max(1, self._given - self._consumed)
                self._given, self._consumed = self._ends_in, 0
        elif self.loaders.stop(iterator):
            # Batches that were read ahead are still to be trained on: the data ends with the last of them.
            self._ends_in = max(0, self._given - self._consumed)
            if not self._ends_in:
                self._data_ended = "here" if self._micros or self._calls else "before"
            self._given, self._consumed = self._ends_in, 0

    def _waited(self, began: float | None) -> None:
        if began is not None:
            self._pending_wait += perf_counter() - began
            self.is_waiting = False

    # The end of a window

    def _close(self, optimizer: Any, *, skipped: bool = False) -> None:
        rate, self._learning_rate = self._learning_rate, None
        if self._calls:
            # A gradient that came without backward: each forward pass is a micro-batch then.
            self._micros += [Micro([call], self._targets if not place else [], None) for place, call in enumerate(self._calls)]
            self._calls, self._targets = [], []
        unseen, self._unseen_backwards = self._unseen_backwards, 0
        if not self._micros:
            self._stepped_last.add(id(optimizer))  # another optimizer of the same step
            if unseen:
                self._miss_step()
            return
        self._stepped_last = {id(optimizer)}
        if not self.file.is_open:
            self._open()
        if not self._steps:
            self.file.write(
                {
                    "kind": "rank",
                    **identity(self._torch),
                    **self._memory.device(self._device_type()),
                    "files": files_of_the_script(),
                }
            )
        self._steps += 1
        self._write(self._record(optimizer, rate, skipped=skipped))
        self._micros = []
        self._discarded = self._evaluations = self._evaluation_rows = 0
        self._wait_seconds = self._evaluation_seconds = 0.0
        self._data_ended = None
        self._window_began = self._mark = perf_counter()
        self._stop_searching()

    def _miss_step(self) -> None:
        """A step on what was not seen: perhaps of a model that came later, so models are looked for again."""
        self._unseen_steps += 1
        if self._unseen_steps <= _MOST_SEARCHES:
            self._models = weakref.WeakKeyDictionary()
            self._searching_steps = 0
            self.look_for_models(True)

    def _device_type(self) -> str:
        for model in self._models:
            for parameter in model.parameters():
                return str(parameter.device.type)
        return "cpu"

    def _record(self, optimizer: Any, rate: Any, *, skipped: bool) -> dict[str, Any]:
        micros, now = self._micros, perf_counter()
        own, self._told_own_seconds = self._own_seconds - self._told_own_seconds, self._own_seconds
        wall = now - (self._window_began if self._window_began is not None else now)
        return {
            "kind": "step", "step": self._steps, "time": time.time(), "optimizer": self._optimizers.get(id(optimizer), 0),
            "skipped": skipped, "rate": rate,
            "micros": [[micro.rows, micro.length] for micro in micros], "calls": max(micro.calls for micro in micros),
            "tokens": total([micro.tokens for micro in micros]), "targets": total([micro.targets for micro in micros]),
            "loss": total([micro.loss for micro in micros]),
            "seconds": wall, "wait": self._wait_seconds, "evaluation": self._evaluation_seconds, "own": own,
            "discarded": self._discarded, "evaluations": self._evaluations, "evaluation_rows": self._evaluation_rows,
            "data_ended": self._data_ended, **self._memory.read(), "pulse": self._pulse.read(now),
        }  # fmt: skip

    def _write(self, record: dict[str, Any]) -> None:
        """In order: a line waits while its numbers, or those of one before it, are still on the GPU."""
        self._waiting_lines.append(Waiting(self._torch, record))
        while self._waiting_lines and self._waiting_lines[0].is_here():
            self._write_line(self._waiting_lines.pop(0).read())

    def _write_line(self, record: dict[str, Any]) -> None:
        record["loss"] = number(record["loss"])
        self.file.write(record)

    def _stop_searching(self) -> None:
        self._searching_steps += 1
        if self._searching_steps >= 2:
            self.look_for_models(False)

    # The end of the process

    def end(self) -> None:
        """At the interpreter's end: what still waits, and what never reached a step."""
        if not self.file.is_open or self.pid != os.getpid():
            return
        for waiting in self._waiting_lines:
            with suppress(Exception):
                self._write_line(waiting.read(wait=True))
        self.file.write(
            {
                "kind": "end", "time": time.time(), "micros": [[micro.rows, micro.length] for micro in self._micros],
                "discarded": self._discarded, "evaluations": self._evaluations, "evaluation_rows": self._evaluation_rows,
                "unseen_steps": self._unseen_steps, "evaluation": self._evaluation_seconds, "data_ended": self._data_ended,
                "own": self._own_seconds - self._told_own_seconds, "loaders": self.loaders.counts(),
            }
        )  # fmt: skip

    def fork(self) -> None:
        """In a forked process: nothing has happened here yet."""
        with suppress(Exception):
            self.file.forget()
            self._begin_anew()


def _is_compiling(torch: Any) -> Callable[[], bool]:
    places = [getattr(torch, name, None) for name in ("compiler", "_utils")]
    compiles = next((found for place in places if (found := getattr(place, "is_compiling", None))), bool)
    records, modules = torch.jit.is_tracing, sys.modules

    def is_compiling() -> bool:
        if compiles():
            return True
        fx = modules.get("torch.fx._symbolic_trace")
        return records() or bool(getattr(fx, "_is_fx_tracing_flag", False))

    return is_compiling


def _scalar(tensors: Any, unscaled: Any) -> Any:
    """The number that backward is called on; None where it is not one number."""
    tensor = unscaled if unscaled is not None else tensors
    if not hasattr(tensor, "numel") or tensor.numel() != 1:
        return None
    return known(tensor.detach())
