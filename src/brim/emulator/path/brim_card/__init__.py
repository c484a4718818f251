"""Loaded by `import torch` on an emulated card (entry point `torch.backends`): registers the operators that are computed on the host."""

# ruff: noqa: PTH110, SLF001 (runs inside `import torch` of the user's program: nothing but the standard library's core)

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_library: ctypes.CDLL | None = None
_launched: dict[str, None] = {}
"""Names of the Triton kernels that were launched; recorded with BRIM_CARD_COMPUTE=1 only."""


def autoload() -> None:
    """Load the library of BRIM_CARD_VALUES and register its operators."""
    global _library
    path = os.environ.get("BRIM_CARD_VALUES")
    if not path or not os.path.exists(path):
        return
    import torch

    with contextlib.suppress(ImportError):  # registers Triton kernels for some operators; torch itself imports it after this
        import torch._native
    torch.backends.cudnn.enabled = False  # cuDNN is not emulated: torch's own convolutions and attention kernels run instead
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    _library = ctypes.CDLL(path)
    _library.brim_card_values()
    torch.cuda._lazy_call(_library.brim_card_clean)  # type: ignore[no-untyped-call]
    if os.environ.get("BRIM_CARD_COMPUTE") == "1":
        sys.meta_path.insert(0, _ImportHook())


class _ImportHook:
    """Finds modules that must be patched after their import."""

    def __init__(self) -> None:
        self._after_import: dict[str, Callable[[Any], None]] = {
            "bitsandbytes.backends.cuda.ops": lambda _module: _wrap_operators("bitsandbytes"),
            "triton.runtime.jit": _note_launches,
        }

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        if name not in self._after_import:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._after_import[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap_operators(namespace: str) -> None:
    """Compute the operators of a namespace. Called after the import that registers the last kernels of the namespace."""
    if _library is not None:
        _library.brim_card_values_of(namespace.encode())


def _note_launches(jit: Any) -> None:
    """Record launches of Triton kernels, which are not run. Those of torch itself implement operators, which are computed."""
    run = jit.JITFunction.run

    def noted(self: Any, *given: Any, **options: Any) -> Any:
        if not str(self.fn.__module__).startswith("torch."):
            _launched.setdefault(f"triton::{self.fn.__name__}")
        return run(self, *given, **options)

    jit.JITFunction.run = noted


def uncomputed() -> list[str]:
    """Names of operators and Triton kernels that BRIM_CARD_COMPUTE=1 did not compute: their float results are zeros."""
    return list(uncomputed_reasons())


def uncomputed_reasons() -> dict[str, str]:
    """The names with the reason: no kernel for the CPU, a tensor above the size limit, or the error of the first attempt."""
    kernels = dict.fromkeys(_launched, "Triton kernels are not run")
    return kernels | dict(line.split("\t", 1) for line in _lines("brim_card_uncomputed"))


def uncomputed_shapes() -> list[str]:
    """Names of operators whose results have a shape that depends on values that were not computed."""
    return _lines("brim_card_uncomputed_shapes")


def _lines(function: str) -> list[str]:
    if _library is None:
        return []
    write = getattr(_library, function)
    size = write(None, 0)
    text = ctypes.create_string_buffer(size + 1)
    write(text, size + 1)
    return text.value.decode(errors="replace").splitlines()
