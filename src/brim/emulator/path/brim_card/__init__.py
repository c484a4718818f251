"""Loaded by `import torch` on an emulated card (entry point `torch.backends`): operators that are computed on the host."""

# ruff: noqa: PTH110, PTH123, SLF001 (runs inside `import torch` of the user's program: nothing but the standard library's core)

from __future__ import annotations

import contextlib
import ctypes
import os

_library: ctypes.CDLL | None = None


def autoload() -> None:
    """Register the operators of the library that BRIM_CARD_VALUES names."""
    global _library
    path = os.environ.get("BRIM_CARD_VALUES")
    if not path or not os.path.exists(path):
        return
    import torch

    with contextlib.suppress(ImportError):  # registers Triton kernels for some operators; torch itself imports it after this
        import torch._native  # noqa: F401
    _library = ctypes.CDLL(path)
    _library.brim_card_values()
    torch.cuda._lazy_call(_library.brim_card_clean)


def uncomputed() -> list[str]:
    """Operators with float results that BRIM_CARD_COMPUTE=1 did not compute: their results are zeros."""
    if _library is None:
        return []
    size = _library.brim_card_uncomputed(None, 0)
    text = ctypes.create_string_buffer(size + 1)
    _library.brim_card_uncomputed(text, size + 1)
    return text.value.decode().split()
