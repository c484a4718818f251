"""Writing a stitched model: all of it or nothing, with the tokenizer of the donor whose tokens it speaks."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError

from brim.errors import RunError, UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def save(model: Any, folder: str | os.PathLike[str], *, tokenizer_from: str | os.PathLike[str] | None = None) -> Path:
    """Write a model into a new folder, with the tokenizer's files of another folder where one is given.

    It is written beside its place and moved there at the end, so that a folder which can be seen is whole.
    """
    target = Path(folder).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            _("{folder} exists already and is not empty.").format(folder=folder), hint=_("Give a folder that does not exist yet.")
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with written_or_told(folder):
            model.save_pretrained(beside)
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from).expanduser(), beside)
        beside.chmod(0o777 & ~_umask())
        if target.exists():
            target.rmdir()
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


@contextmanager
def written_or_told(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A full disk is an OSError while Python writes, and an error of its own kind while safetensors does."""
    try:
        yield
    except SafetensorError as error:
        why = str(error).strip().rstrip(".")
        raise RunError(_("The weights cannot be written to {folder}: {why}.").format(folder=folder, why=why)) from error


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _umask() -> int:
    """What this process withholds from others; it can only be read by setting it."""
    current = os.umask(0o077)
    os.umask(current)
    return current
