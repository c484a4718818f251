"""What the base installation lacks: the packages of `brim[train]`.

`pip install brim` is enough for `brim doctor`, `observe`, `emulate`, `watch`, `report`, `gpus`, `models` and `env`. What predicts,
measures or trains calls `require_train` first: a missing package is one line with the command that installs it.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from brim.errors import MissingPackageError
from brim.locale import _

TRAIN: Final = (
    "torch", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub", "tokenizers", "numpy", "pyarrow", "jinja2",
)  # fmt: skip
"""Import names of what `brim[train]` adds; a test compares them with pyproject.toml."""
INSTALL: Final = "pip install 'brim[train]'"


def missing(*packages: str) -> tuple[str, ...]:
    """Those of these packages that are not installed; without arguments, of all that `brim[train]` adds. Imports none of them."""
    return tuple(name for name in packages or TRAIN if not _is_installed(name))


def require_train(what: str, *packages: str) -> None:
    """An error where `what` cannot run because one of these packages is missing; without packages, any that `brim[train]` adds."""
    absent = missing(*packages)
    if absent:
        raise missing_package(what, absent[0])


def missing_package(what: str, package: str) -> MissingPackageError:
    """The error that says what needs which package, and how to install it."""
    text = _("{what} needs {package}, which is not installed. Install it with: {command}")
    return MissingPackageError(text.format(what=what, package=package, command=INSTALL), package=package)


def is_of_train(error: ModuleNotFoundError) -> bool:
    """Whether an import failed because a package of `brim[train]` is missing."""
    package = (error.name or "").partition(".")[0]
    return package in TRAIN and not _is_installed(package)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook that refuses it, or a module without a spec
        return False
