"""Where a stitched model goes: looked at before any donor is read, and replaced only as a whole."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import UsageError
from brim.locale import _
from brim.stitching.saving import save
from brim.workload.resolve import find_model

if TYPE_CHECKING:
    from brim.stitching.recipe import Recipe


def check_place(output: str, recipe: Recipe, *, replaces: bool) -> None:
    """Refuse a place that cannot be written to, or whose content is not ours to replace."""
    target = _absolute(output)
    if target.exists() and not target.is_dir():
        raise UsageError(_("{folder} is a file, and a folder is needed.").format(folder=output))
    if not target.exists() or not any(target.iterdir()):
        return
    if not replaces:
        text = _("{folder} exists already and is not empty.").format(folder=output)
        raise UsageError(text, hint=_("Give a folder that does not exist yet, or --force to replace the model in it."))
    if not (target / "config.json").is_file():
        text = _("{folder} holds something that is not a model, and brim does not delete it.").format(folder=output)
        raise UsageError(text, hint=_("Give a folder that does not exist yet."))
    for name, donor in recipe.donors.items():
        if target in _with_parents(donor):
            text = _("{folder} holds the donor {name}, which would be gone.").format(folder=output, name=name)
            raise UsageError(text, hint=_("Give another folder."))
    if target in _with_parents("."):
        text = _("{folder} is the folder that this command runs in, or one above it.").format(folder=output)
        raise UsageError(text, hint=_("Give another folder."))


def write(model: Any, output: str, recipe: Recipe, *, replaces: bool) -> Path:
    """Write a model with the tokenizer of the first donor. An old one stands until the new one is whole."""
    target, tokens = _absolute(output), find_model(recipe.donors[recipe.pieces[0].donor]).folder
    if not replaces or not target.exists():
        return save(model, target, tokenizer_from=tokens)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        new = save(model, aside / "new", tokenizer_from=tokens)
        target.rename(aside / "old")
        try:
            new.rename(target)
        except BaseException:
            (aside / "old").rename(target)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _absolute(text: str) -> Path:
    try:
        return Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(_("-o {folder!r} is not the name of a folder.").format(folder=text)) from error


def _with_parents(text: str) -> tuple[Path, ...]:
    path = Path(text).expanduser()
    return (path.resolve(), *path.resolve().parents) if path.exists() else ()
