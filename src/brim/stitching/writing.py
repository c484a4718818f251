"""Where a stitched model goes: looked at before any donor is read, and replaced only as a whole."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _
from brim.stitching.blueprint import used_donors
from brim.stitching.saving import TOKENIZER_FILES, save
from brim.workload.resolve import find_model

if TYPE_CHECKING:
    from brim.stitching.recipe import Recipe

_FILES: Final = frozenset({"config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER_FILES})
_WEIGHTS: Final = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


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
    for name, donor in recipe.donors.items():
        if target in _with_parents(donor):
            raise _holds_a_donor(output, name)
    if target in _with_parents("."):
        text = _("{folder} is the folder that this command runs in, or one above it.").format(folder=output)
        raise UsageError(text, hint=_("Give another folder."))
    _refuse_more_than_a_model(target, output)
    for name in used_donors(recipe):
        folder = find_model(recipe.donors[name]).folder  # of the Hub's cache, say
        if folder is not None and target in _with_parents(str(folder)):
            raise _holds_a_donor(output, name)


def _refuse_more_than_a_model(target: Path, output: str) -> None:
    """What is replaced is deleted, so it must be a model and nothing else."""
    if not _describes_a_model(target / "config.json") or not any(_WEIGHTS.fullmatch(entry.name) for entry in target.iterdir()):
        text = _("{folder} holds something that is not a model, and brim does not delete it.").format(folder=output)
        raise UsageError(text, hint=_("Give a folder that does not exist yet."))
    for entry in sorted(target.iterdir()):
        if entry.is_dir() or not (entry.name in _FILES or _WEIGHTS.fullmatch(entry.name)):
            text = _("{folder} holds {name}, which is no part of a model, and brim does not delete it.")
            raise UsageError(
                text.format(folder=output, name=entry.name),
                hint=_("Move it elsewhere, or give a folder that does not exist yet."),
            )


def _describes_a_model(config: Path) -> bool:
    try:
        facts = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and isinstance(facts.get("model_type"), str)


def _holds_a_donor(output: str, name: str) -> UsageError:
    text = _("{folder} holds the donor {name}, which would be gone.").format(folder=output, name=name)
    return UsageError(text, hint=_("Give another folder."))


def write(model: Any, output: str, recipe: Recipe, *, replaces: bool) -> Path:
    """Write a model with the tokenizer of the first donor. An old one stands until the new one is whole."""
    target, tokens = _absolute(output), find_model(recipe.donors[recipe.pieces[0].donor]).folder
    if not replaces or not target.exists():
        return save(model, target, tokenizer_from=tokens)
    _refuse_more_than_a_model(target, output)  # it may have changed since it was looked at
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    old = aside / "old"
    try:
        new = save(model, aside / "new", tokenizer_from=tokens)
        target.rename(old)
        new.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        if target.exists():  # whatever interrupts this, and however often: one of the two stays
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
