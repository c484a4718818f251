"""Follows the training: optimizer steps, phases, shapes of micro-batches, out-of-memory errors; writes the report; stops the command."""

# ruff: noqa: PTH100, PTH118, PTH120, SLF001 (no pathlib in the user's interpreter; torch's internals are hooked)

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from .peaks import Peaks

_STOP_SECONDS = 60.0
"""How long a rank waits for the others before it stops."""
_MAX_SHAPES = 200
_MAX_MESSAGE = 4000
"""Characters of an error message."""
_COMPILE_ERRORS = ("BackendCompilerFailed", "InductorError")


class Watch:
    """Follows the training in one process of the command."""

    def __init__(self, session: str, settings: dict[str, Any], redirected: dict[str, None]) -> None:
        self._session = session
        self._settings = settings
        self._redirected = redirected
        self._torch: Any = None
        self._pid = os.getpid()
        self._peaks: Peaks | None = None
        self._depth = threading.local()
        self._phase = "loading"
        self._steps: dict[int, int] = {}
        self._engine_steps: int | None = None
        self._shapes: dict[tuple[str, int, int | None], int] = {}
        self._longest = 0
        self._rank, self._world = 0, 1
        self._is_due = False
        self._reached: dict[str, None] = {}
        self._failures: list[dict[str, Any]] = []
        self._error: dict[str, str] | None = None
        self._notes: list[dict[str, Any]] = []
        self._stopped = False
        self._began = 0.0

    @property
    def steps(self) -> int:
        """Optimizer steps so far: those of the DeepSpeed engine, if there is one, else of the optimizer that has stepped most often."""
        return self._engine_steps if self._engine_steps is not None else max(self._steps.values(), default=0)

    # ---- installation

    def on_torch(self, torch: Any) -> None:
        """Hook into torch, right after its import."""
        self._torch = torch
        self._peaks = Peaks(torch)
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(lambda stepping, *_given: self._before_step(stepping))
        optimizer.register_optimizer_step_post_hook(lambda stepped, *_given: self._after_step(stepped))
        self._wrap_calls(torch)
        self._wrap_backward(torch)
        self._refuse_compile(torch)
        self._peaks.keep_before_resets()
        torch.cuda._lazy_call(self._on_cuda)

    def start(self) -> None:
        """Install the hooks for the end of the process, before the code of the command runs."""
        excepthook = sys.excepthook

        def remember(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            with contextlib.suppress(Exception):
                self.failed(error)
            excepthook(kind, error, trace)

        sys.excepthook = remember
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A forked child writes its own report and starts with no CUDA state."""
        self._pid = os.getpid()
        self._steps, self._engine_steps, self._is_due = {}, None, False
        self._shapes, self._failures, self._error, self._longest = {}, [], None, 0
        self._phase, self._reached, self._notes = "loading", {}, []
        if self._peaks is not None:
            self._peaks.devices = {}

    def on_deepspeed(self, module: Any) -> None:
        """DeepSpeed's engine steps its optimizer several times per training step, so the engine's own steps are counted."""
        step = module.DeepSpeedEngine.step

        @functools.wraps(step)
        def counted(engine: Any, *given: Any, **options: Any) -> Any:
            self._engine_steps = self._engine_steps or 0
            self._enter("optimizer")
            result = step(engine, *given, **options)
            if engine.global_steps > self._engine_steps:
                self._engine_steps = engine.global_steps
                self._finish_step()
            else:
                self._enter("other")
            return result

        module.DeepSpeedEngine.step = counted

    def _on_cuda(self) -> None:
        assert self._peaks is not None
        self._began = time.monotonic()
        with contextlib.suppress(Exception):  # the cudaMallocAsync backend keeps no history: peaks without owners
            self._peaks.record()
        attach = getattr(self._torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._ran_out)

    def _wrap_calls(self, torch: Any) -> None:
        call = torch.nn.Module.__call__

        @functools.wraps(call)
        def counted(module: Any, *given: Any, **options: Any) -> Any:
            depth = getattr(self._depth, "now", 0)
            if depth == 0 and not self._in_backward() and next(module.parameters(), None) is not None:
                self._enter_model(module, given, options)
            self._depth.now = depth + 1
            try:
                return call(module, *given, **options)
            finally:
                self._depth.now = depth

        torch.nn.Module.__call__ = counted

    def _wrap_backward(self, torch: Any) -> None:
        for name in ("backward", "grad"):
            original = getattr(torch.autograd, name)

            @functools.wraps(original)
            def counted(*given: Any, _original: Any = original, **options: Any) -> Any:
                assert self._peaks is not None
                # Inside a forward (autograd.grad) or another backward (reentrant checkpointing) the outer phase continues afterwards.
                is_nested = bool(getattr(self._depth, "now", 0)) or self._in_backward()
                before = self._phase
                self._peaks.backward_line = self._caller()
                self._enter("backward")
                result = _original(*given, **options)
                self._enter(before if is_nested else "other")
                return result

            setattr(torch.autograd, name, counted)

    def _refuse_compile(self, torch: Any) -> None:
        """Reject torch.compile: the card does not run compiled code. The error is raised at the first call, when torch compiles."""
        if os.environ.get("TORCHDYNAMO_DISABLE") == "1" or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            return
        compiled = torch.compile

        def refuse(*_given: Any, **_options: Any) -> Any:
            self.note("torch-compile")
            raise RuntimeError(
                "torch.compile is not supported on an emulated card. Set TORCH_COMPILE_DISABLE=1 to emulate the same script in eager mode."
            )

        @functools.wraps(compiled)
        def compile_(model: Any = None, **options: Any) -> Any:
            options.pop("mode", None)
            options.pop("options", None)
            options["backend"] = refuse
            return compiled(model, **options)

        torch.compile = compile_

    def _in_backward(self) -> bool:
        return bool(self._torch._C._current_graph_task_id() != -1)

    # ---- events of the training

    def _enter(self, phase: str) -> None:
        """Start a phase. Memory that was allocated until now belongs to the previous one."""
        if self._peaks is not None and self._torch.cuda.is_initialized():
            self._peaks.read(self.steps + (self._phase != "loading"), self._phase)
            self._peaks.where = (self.steps + 1, phase)
        self._phase = phase

    def _enter_model(self, module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._stop_if_due()
        trains = self._torch.is_grad_enabled()
        if not trains and not module.training and self.steps:
            self._reached.setdefault("evaluation")
        self._enter("forward" if trains else "evaluation")
        shape = shape_of(self._torch, given, options)
        if shape is None:
            return
        key = ("training" if trains else "evaluation", *shape)
        if key in self._shapes or len(self._shapes) < _MAX_SHAPES:
            self._shapes[key] = self._shapes.get(key, 0) + 1
        if trains:
            self._longest = max(self._longest, shape[1] or 0)

    def saving(self) -> None:
        """Called before the command saves a file."""
        self._stop_if_due()
        if self.steps:
            self._reached.setdefault("saving")

    def _before_step(self, optimizer: Any) -> None:
        if self._is_due and self._steps.get(id(optimizer), 0) >= self.steps:
            self._stop_if_due()  # a second optimizer may still have to take its last step
        self._enter("optimizer")

    def _after_step(self, optimizer: Any) -> None:
        if self._engine_steps is not None:
            return
        self._steps[id(optimizer)] = before = self._steps.get(id(optimizer), 0) + 1
        if before == self.steps:
            self._finish_step()
        else:
            self._enter("other")

    def _finish_step(self) -> None:
        assert self._peaks is not None
        if self._torch.cuda.is_initialized():
            self._peaks.read(self.steps, "optimizer")
            self._peaks.find_owners()
        self._phase = "other"
        self._peaks.where = (self.steps + 1, "other")
        self.write()
        wanted = self._settings.get("steps")
        self._is_due = wanted is not None and self.steps >= wanted and self._torch.cuda.is_initialized()

    def _stop_if_due(self) -> None:
        """Stop the command if the requested number of steps is complete. Called before other work begins."""
        if self._is_due:
            self._stop()

    def _ran_out(self, device: int, requested: int, _held: int, free: int) -> None:
        """Called by the allocator before it raises an out-of-memory error."""
        with contextlib.suppress(Exception):
            self._note_failure(device, requested, free)

    def _note_failure(self, device: int, requested: int, free: int) -> None:
        assert self._peaks is not None
        failure = {"device": device, "step": self.steps + 1, "phase": self._phase, "asked_bytes": requested, "free_bytes": free}
        failure["where"] = self._peaks.backward_line if self._phase == "backward" else self._caller()
        self._failures.append(failure)
        self._peaks.read(self.steps + 1, self._phase)
        self._peaks.find_owners()
        self.write()

    def failed(self, error: BaseException) -> None:
        """Record an uncaught exception."""
        if type(error).__name__ in _COMPILE_ERRORS:
            self.note("torch-compile")
        message = str(error)
        # Launchers quote the error of a worker at the end of their own message, so both ends are kept.
        shown = message if len(message) <= _MAX_MESSAGE else f"{message[: _MAX_MESSAGE // 2]} ... {message[-_MAX_MESSAGE // 2 :]}"
        self._error = {"type": type(error).__name__, "message": shown}
        self.write()

    def note(self, code: str, **values: Any) -> None:
        """Add a note to the record."""
        self._notes.append({"code": code, "values": values})

    # ---- the report

    def finish(self) -> None:
        """Write the final report. Called when the interpreter exits."""
        if os.getpid() != self._pid or self._torch is None or self._stopped:
            return
        with contextlib.suppress(Exception):
            self._finish()

    def _finish(self) -> None:
        if self._torch.cuda.is_initialized() and self._peaks is not None:
            self._peaks.read(self.steps + 1 if self._phase != "other" else max(1, self.steps), self._phase)
            if any(device.is_new for device in self._peaks.devices.values()):
                self._peaks.find_owners()
        self.write()

    def write(self) -> None:
        """Write the report of this process. The file is replaced atomically."""
        if os.getpid() != self._pid:
            return
        path = os.path.join(self._session, f"process-{self._pid}.json")
        with _open(path + ".part", "w") as stream:
            json.dump(self._report(), stream)
        _replace(path + ".part", path)

    def _report(self) -> dict[str, Any]:
        torch = self._torch
        used = torch is not None and bool(torch.cuda.is_initialized())
        if torch is not None:
            self._rank, self._world = _rank_and_world(torch, self._rank, self._world)
        devices = []
        for index, device in sorted(self._peaks.devices.items()) if self._peaks is not None else ():
            retries, ooms = self._peaks.counts(index)  # type: ignore[union-attr]
            devices.append(
                {
                    "device": index, "peak_allocated_bytes": device.allocated, "peak_reserved_bytes": device.reserved,
                    "peak_device_bytes": _device_peak(index), "peak_step": device.step, "peak_phase": device.phase,
                    "owners": device.owners, "unaccounted_bytes": device.unaccounted, "retries": retries, "ooms": ooms,
                }
            )  # fmt: skip
        return {
            "pid": self._pid, "versions": _versions(), "rank": self._rank, "world_size": self._world, "launch": self._launch(),
            "uses_cuda": used, "began": self._began, "ended": time.monotonic(),
            "devices": devices, "steps": self.steps, "stopped": self._stopped, "reached": list(self._reached), "longest": self._longest,
            "shapes": [[mode, rows, length, count] for (mode, rows, length), count in self._shapes.items()],
            "failures": self._failures, "error": self._error, "notes": self._notes, "written": list(self._redirected)[:1000],
            "uncomputed": _from_card("uncomputed"), "uncomputed_shapes": _from_card("uncomputed_shapes"), "refused": _refused(),
        }  # fmt: skip

    def _stop(self) -> None:
        """Exit with code 0 when all ranks have arrived. No code of the command runs after its last step."""
        self._stopped = True
        self.write()
        # The name contains the launch, so that a second launch in the same session waits for its own ranks.
        mark = os.path.join(self._session, f"stop-{self._launch()}")
        if self._world > 1:
            _open(f"{mark}-{self._rank}", "w").close()
            deadline = time.monotonic() + _STOP_SECONDS
            while time.monotonic() < deadline and not all(_exists(f"{mark}-{rank}") for rank in range(self._world)):
                time.sleep(0.02)
        for child in multiprocessing.active_children():
            child.terminate()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)

    def _launch(self) -> str:
        """An identifier that is the same for all ranks of one launch, which have the same parent. A single process is its own launch."""
        return f"{os.getppid()}-{os.environ.get('MASTER_PORT', '')}" if self._world > 1 else str(self._pid)

    def _caller(self) -> str:
        """`file:line` of the innermost frame outside torch and this agent."""
        plumbing = (os.path.dirname(self._torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep, "<")
        frame: Any = sys._getframe(1)
        while frame is not None:
            if not frame.f_code.co_filename.startswith(plumbing):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


# The originals, before they are replaced: reports are not redirected to the shadow.
_open, _replace, _exists = open, os.replace, os.path.exists


def shape_of(torch: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int | None] | None:
    """Rows and length of a micro-batch, from the arguments of the model."""
    named = [options.get(name) for name in ("input_ids", "inputs_embeds", "decoder_input_ids")]
    for value in named:
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return int(value.shape[0]), int(value.shape[1])
    for value in (*given, *options.values()):
        shape = shape_of(torch, (), dict(value)) if isinstance(value, Mapping) else None
        if shape is not None:
            return shape
        if isinstance(value, torch.Tensor) and value.dim():
            # A two-dimensional integer tensor holds tokens. For other inputs only the number of rows is known.
            is_tokens = value.dim() == 2 and not value.is_floating_point()
            return int(value.shape[0]), int(value.shape[1]) if is_tokens else None
    return None


def _device_peak(index: int) -> int:
    """Peak memory of this process on the card, from the preloaded library."""
    card = ctypes.CDLL(None)
    card.brim_card_peak.restype = ctypes.c_size_t
    return int(card.brim_card_peak(index))


def _refused() -> list[str]:
    """Features that the program used and the card does not support, such as `cuSOLVER`."""
    card = ctypes.CDLL(None)
    card.brim_card_refused.restype = ctypes.c_char_p
    names: list[str] = []
    while name := card.brim_card_refused(len(names)):
        names.append(name.decode())
    return names


def _from_card(name: str) -> list[str]:
    """The result of a function of `brim_card`; empty if that module is not loaded."""
    card = sys.modules.get("brim_card")
    return list(getattr(card, name)()) if card is not None and hasattr(card, name) else []


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed", "lightning")
    return {name: str(getattr(sys.modules[name], "__version__", "")) for name in names if name in sys.modules}


def _rank_and_world(torch: Any, rank: int, world: int) -> tuple[int, int]:
    """Rank and world size. After the process group is destroyed: those of the launcher's environment, else the given ones."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank()), int(torch.distributed.get_world_size())
    return int(os.environ.get("RANK") or rank), int(os.environ.get("WORLD_SIZE") or world)
