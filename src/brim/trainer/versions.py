"""What a run was made with, for its card."""

from __future__ import annotations

import platform
from importlib import metadata

from brim.version import __version__

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "tokenizers", "safetensors", "bitsandbytes", "numpy")


def versions() -> dict[str, str]:
    """Of brim, of Python, and of the packages that are here."""
    found = {"brim": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
