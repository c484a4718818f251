"""The formats by name, and their files written into a folder."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from brim.errors import UnknownNameError, UnsupportedError
from brim.locale import _, sentences
from brim.planner.emit import axolotl, deepspeed, launchers, llama_factory, transformers, trl
from brim.planner.emit.recipe import Recipe, recipe_of
from brim.record import write_atomically
from brim.records.predictions import Emitted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from brim.planner.emit.files import Files
    from brim.records import Plan

_MAKERS: Final[dict[str, Callable[[Recipe], Files]]] = {
    "transformers": transformers.files,
    "accelerate": launchers.accelerate_files,
    "deepspeed": deepspeed.files,
    "trl": trl.files,
    "axolotl": axolotl.files,
    "llama-factory": llama_factory.files,
    "torchrun": launchers.torchrun_files,
    "slurm": launchers.slurm_files,
}
FORMATS: Final[tuple[str, ...]] = tuple(_MAKERS)
ALL: Final = "all"


def files_of(plan: Plan, format_name: str, data: str | None = None) -> dict[str, str]:
    """File names and texts of one format; refused where it cannot say the plan."""
    return _make(plan, format_name, data).texts


def emit(plan: Plan, formats: Sequence[str], folder: Path | None, *, data: str | None = None) -> Emitted:
    """The formats, written into the folder if there is one; `all` means every one that can say the plan.

    Nothing is written if a format that was named cannot.
    """
    made: list[Files] = []
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(_expand(formats)):
        try:
            made.append(_make(plan, name, data))
        except UnsupportedError as error:
            if ALL not in formats or name in formats:
                raise
            skipped[name] = sentences(error.message.removeprefix(f"{name}: "), error.hint or "")
    texts = {name: text for files in made for name, text in files.texts.items()}
    paths = tuple(write_atomically(folder / name, text) for name, text in texts.items()) if folder is not None else ()
    for path in paths:
        if path.suffix == ".sh":
            path.chmod(path.stat().st_mode | 0o111)
    notes = dict.fromkeys(note for files in made for note in files.notes)
    return Emitted(texts=texts, paths=paths, skipped=skipped, notes=tuple(notes))


def _expand(formats: Sequence[str]) -> list[str]:
    return [known for name in formats for known in (FORMATS if name == ALL else (name,))]


def check_formats(formats: Sequence[str]) -> None:
    """Refuse names that are no format, before anything is planned for them."""
    for name in _expand(formats):
        if name not in _MAKERS:
            near = tuple(get_close_matches(name, FORMATS, n=1))
            hint = _("One of: {words}.").format(words=", ".join((*FORMATS, ALL)))
            raise UnknownNameError(_("There is no format {name!r}.").format(name=name), nearest=near, hint=hint)


def _make(plan: Plan, name: str, data: str | None) -> Files:
    check_formats([name])
    try:
        return _MAKERS[name](recipe_of(plan, data))
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error.message}", hint=error.hint) from error
