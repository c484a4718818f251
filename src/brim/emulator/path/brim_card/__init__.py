"""Loaded by `import torch` on an emulated card (entry point `torch.backends`): operators that are computed on the host."""

# ruff: noqa: PTH110, SLF001 (runs inside `import torch` of the user's program: nothing but the standard library's core)

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_library: ctypes.CDLL | None = None


def autoload() -> None:
    """Register the operators of the library that BRIM_CARD_VALUES names."""
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
        sys.meta_path.insert(0, _ComputedPackages())


class _ComputedPackages:
    """Finds modules that register the last kernels of a namespace, and wraps its operators after the import."""

    namespaces = {"bitsandbytes.backends.cuda.ops": "bitsandbytes"}  # noqa: RUF012

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        if name not in self.namespaces:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: object) -> None:
            execute(module)  # type: ignore[arg-type]
            if _library is not None:
                _library.brim_card_values_of(self.namespaces[name].encode())

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def uncomputed() -> list[str]:
    """Names of operators with float results that BRIM_CARD_COMPUTE=1 did not compute: their results are zeros."""
    return list(uncomputed_reasons())


def uncomputed_reasons() -> dict[str, str]:
    """Why each of them was not computed: no kernel for the CPU, a tensor above the size limit, or the error of the first attempt."""
    return dict(line.split("\t", 1) for line in _lines("brim_card_uncomputed"))


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
