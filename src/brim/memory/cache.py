"""Traces on disk: plain arrays in `.npz` files, named by all that shapes them, read without torch and without pickle.

The name of a file is a hash of the question, of the versions of the libraries that were traced, and of this room's own source: an answer is
found only if asking again would give the same. What cannot be written is not kept, and nothing
else happens. The folder stays below `MOST_BYTES`; the files that were not used for longest go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.machine.host import cache_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

MOST_BYTES = 256 << 20
_DIGEST = hashlib.sha256().digest_size
"""A file begins with the hash of what follows: a damaged one counts as absent."""
_LIBRARIES = ("torch", "transformers", "peft")


def key_of(question: dict[str, Any]) -> str:
    """The name of the answer to a question of plain values."""
    text = json.dumps({"question": question, "made_by": _made_by()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def load(key: str) -> Arrays | None:
    """The arrays of an answer; None where there is none that can be read."""
    path = _folder() / f"{key}.npz"
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) <= _DIGEST or hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
        return None
    with np.load(io.BytesIO(content[_DIGEST:]), allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    with contextlib.suppress(OSError):
        os.utime(path)
    return arrays


def is_stored(key: str) -> bool:
    """Whether there is an answer, whole or not."""
    return (_folder() / f"{key}.npz").exists()


def store(key: str, arrays: Arrays) -> None:
    """Keep an answer, whole or not at all."""
    buffer = io.BytesIO()
    save: Any = np.savez_compressed
    save(buffer, **arrays)
    temporary: Path | None = None
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
        temporary.replace(folder / f"{key}.npz")
        _prune(folder)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    files = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_folder() / "memory"


@cache
def _made_by() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return {**versions, "source": source.hexdigest()}
