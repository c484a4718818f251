"""From a recipe file to a `Recipe`: every key and every value is looked at, and what is wrong is told in one sentence.

A misspelt key that is passed over in silence would be a stitch that nobody asked for. No weight and no heavy library is touched here;
only `layers: all` looks at a donor, for its config.json says how deep it is.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from brim.errors import ConfigError
from brim.locale import _, sentences
from brim.stitching.documents import read_document
from brim.stitching.recipe import Adapter, AdapterKind, Piece, Recipe, Vocabulary
from brim.workload.cards import find_card
from brim.workload.words import Attention, DType

Say = Callable[[str], None]

_KEYS: Final = ("name", "donors", "layers", "train", "vocabulary", "attention", "dtype")
_PIECE_KEYS: Final = ("donor", "layers", "adapter")
_ADAPTER_KEYS: Final = ("kind", "rank", "width")
_RANGE: Final = re.compile(r"([0-9]{1,9})\s*([-:])\s*([0-9]{1,9})")
_DEEPEST: Final = 10_000


def read_recipe(given: str | os.PathLike[str] | Mapping[str, Any], *, say: Say | None = None) -> Recipe:
    """The recipe of a YAML file, or of a mapping with the same keys.

    Donors are looked for beside the file, or from the current folder for a mapping. `say` is told what is odd and not wrong.
    """
    if isinstance(given, Mapping):
        return _Reader(_("The recipe"), Path(), say).read(given)
    path = Path(os.fspath(given))
    read = _Reader(str(given), path.expanduser().parent, say).read(_filled(path))
    return replace(read, name=path.stem) if read.name == Recipe.name else read


def _filled(path: Path) -> Any:
    found = read_document(path)
    if found is None:
        raise ConfigError(_("The recipe {path} is empty.").format(path=path), hint=f"{_SHOWN['donors']}\n  {_SHOWN['layers']}")
    return found


class _Reader:
    """One recipe: errors name it, and paths begin where it lies."""

    def __init__(self, label: str, folder: Path, say: Say | None) -> None:
        self._label = label
        self._folder = folder
        self._say = say or (lambda _text: None)
        self._depths: dict[str, int] = {}

    def read(self, given: object) -> Recipe:
        """Check everything, from the top to the bottom."""
        facts = self._mapping(given, _("a mapping with donors and layers"))
        self._keys(facts, _KEYS, "")
        for name in ("donors", "layers"):
            if name not in facts:
                raise self._wrong(_("it has no {key!r}.").format(key=name), _SHOWN[name])
        donors = self._donors(facts["donors"])
        pieces = self._pieces(facts["layers"], donors)
        self._mention_unused(donors, pieces)
        settings: dict[str, Any] = {}
        if "train" in facts:
            settings["trains"] = self._trains(facts["train"])
        if "name" in facts:
            settings["name"] = self._text(facts["name"], "name")
        for name, words in (("vocabulary", get_args(Vocabulary)), ("attention", get_args(Attention)), ("dtype", get_args(DType))):
            if name in facts:
                settings[name] = self._word(facts[name], name, words)
        return Recipe(donors=donors, pieces=pieces, **settings)

    def _donors(self, given: object) -> dict[str, str]:
        facts = self._mapping(given, _("`name: model` lines"), "donors", empty=False)
        donors = {}
        for name, value in facts.items():
            if not name.strip():
                raise self._wrong(_("a donor has no name."), _SHOWN["donors"])
            donors[name] = self._place(self._text(value, f"donors: {name}"))
        return donors

    def _place(self, value: str) -> str:
        """A path beside the recipe as a path from here; names of the catalogue and of the Hub as they are."""
        try:
            beside = self._folder / Path(value).expanduser()
            is_there = beside.exists()
        except (OSError, ValueError, RuntimeError):  # what no file system takes, or the home folder of nobody
            return value
        if value.startswith(("./", "../", "/", "~")) or value in {".", ".."}:
            return str(beside)
        # As everywhere in brim: a folder that merely has the name of a model is not taken for one.
        is_model = is_there and (beside.is_file() or (beside / "config.json").is_file() or find_card(value) is None)
        return str(beside) if is_model else value

    def _pieces(self, given: object, donors: Mapping[str, str]) -> tuple[Piece, ...]:
        if not isinstance(given, list) or not given:
            raise self._wrong(
                _("'layers' should be a list of pieces, and is {found}.").format(found=_told(given)), _SHOWN["layers"]
            )
        return tuple(self._piece(each, number, donors) for number, each in enumerate(given, 1))

    def _piece(self, given: object, number: int, donors: Mapping[str, str]) -> Piece:
        where = _("piece {number}").format(number=number)
        facts = self._mapping(given, _("`donor: ...` and `layers: ...`"), where)
        self._keys(facts, _PIECE_KEYS, where)
        for name in ("donor", "layers"):
            if name not in facts:
                raise self._wrong(_("{where} has no {key!r}.").format(where=where, key=name), _SHOWN["layers"])
        donor = self._text(facts["donor"], f"{where}: donor")
        if donor not in donors:
            text = _("{where} takes layers of {donor!r}, and no donor has that name.").format(where=where, donor=donor)
            raise self._wrong(text, sentences(_nearest(donor, donors), _("Donors: {names}.").format(names=", ".join(donors))))
        adapter = self._adapter(facts["adapter"], f"{where}: adapter") if "adapter" in facts else None
        return Piece(donor=donor, layers=self._layers(facts["layers"], where, donor, donors[donor]), adapter=adapter)

    def _layers(self, given: object, where: str, donor: str, model: str) -> tuple[int, ...]:
        if given == "none" or given == []:
            return ()
        if given == "all":
            return tuple(range(self._depth(donor, model)))
        if isinstance(given, list):
            return tuple(layer for each in given for layer in self._some_layers(each, where))
        return self._some_layers(given, where)

    def _some_layers(self, given: object, where: str) -> tuple[int, ...]:
        """One number, or one range."""
        if isinstance(given, int) and not isinstance(given, bool):
            first, behind = given, given + 1
        else:
            match = _RANGE.fullmatch(given.strip()) if isinstance(given, str) else None
            if match is None:
                raise self._wrong(_("{where}: {found} names no layers.").format(where=where, found=_told(given)), _how_layers())
            first, behind = int(match[1]), int(match[3]) + (match[2] == "-")
        if first < 0:
            raise self._wrong(
                _("{where}: layers are counted from 0, and {number} is less.").format(where=where, number=first), _how_layers()
            )
        if behind <= first:
            raise self._wrong(_("{where}: the range {text!r} is empty.").format(where=where, text=given), _how_layers())
        if behind > _DEEPEST:
            raise self._wrong(_("{where}: no model has a layer {number}.").format(where=where, number=behind - 1), _how_layers())
        return tuple(range(first, behind))

    def _depth(self, donor: str, model: str) -> int:
        """How many layers a donor has: the only question to a donor here."""
        if donor not in self._depths:
            from brim.workload.facts import Facts
            from brim.workload.resolve import find_model

            found = find_model(model)
            if found.config is None:
                text = _("how many layers {donor!r} has is not known, for {model} is built by a function.")
                raise self._wrong(text.format(donor=donor, model=model), _("Write them down: layers: 0-11."))
            self._depths[donor] = Facts(found.config).layers
        return self._depths[donor]

    def _adapter(self, given: object, where: str) -> Adapter:
        facts = {"kind": given} if isinstance(given, str) else self._mapping(given, _("the kind of an adapter"), where)
        self._keys(facts, _ADAPTER_KEYS, where)
        if "kind" not in facts:
            raise self._wrong(_("{where} has no {key!r}.").format(where=where, key="kind"), _kinds())
        kind = self._word(facts["kind"], f"{where}: kind", get_args(AdapterKind))
        sizes = {name: self._positive(facts[name], f"{where}: {name}") for name in ("rank", "width") if name in facts}
        return Adapter(kind=kind, **sizes)

    def _trains(self, given: object) -> tuple[str, ...]:
        values = given if isinstance(given, list) else [given]
        return tuple(dict.fromkeys(self._text(value, "train") for value in values))

    def _mention_unused(self, donors: Mapping[str, str], pieces: Iterable[Piece]) -> None:
        used = {piece.donor for piece in pieces}
        unused = [name for name in donors if name not in used]
        if unused:
            self._say(_("{recipe}: no layers are taken of {names}.").format(recipe=self._label, names=", ".join(unused)))

    # What a value should be.

    def _mapping(self, given: object, what: str, where: str = "", *, empty: bool = True) -> dict[str, Any]:
        if not isinstance(given, Mapping) or (not given and not empty):
            text = (
                _("'{where}' should hold {what}, and is {found}.").format(where=where, what=what, found=_told(given))
                if where
                else _("it should be {what}, and is {found}.").format(what=what, found=_told(given))
            )
            raise self._wrong(text, _SHOWN.get(where))
        for key in given:
            if not isinstance(key, str):
                raise self._wrong(
                    _("the name {name!r} is not text.").format(name=key), _("Write it in quotes: '{name}'.").format(name=key)
                )
        return dict(given)

    def _keys(self, facts: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in facts:
            if key not in known:
                text = (
                    _("{where}: there is no key {key!r}.").format(where=where, key=key)
                    if where
                    else _("there is no key {key!r}.").format(key=key)
                )
                raise self._wrong(text, sentences(_nearest(key, known), _("Keys: {names}.").format(names=", ".join(known))))

    def _text(self, given: object, where: str) -> str:
        if not isinstance(given, str) or not given.strip():
            raise self._wrong(_("'{where}' should be text, and is {found}.").format(where=where, found=_told(given)))
        return given.strip()

    def _word(self, given: object, where: str, words: tuple[str, ...]) -> Any:
        if not isinstance(given, str) or given not in words:
            near = _nearest(given, words) if isinstance(given, str) else ""
            text = _("'{where}' cannot be {found}.").format(where=where, found=_told(given))
            raise self._wrong(text, sentences(near, _("One of: {words}.").format(words=", ".join(words))))
        return given

    def _positive(self, given: object, where: str) -> int:
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise self._wrong(
                _("'{where}' should be a whole number above 0, and is {found}.").format(where=where, found=_told(given))
            )
        return given

    def _wrong(self, text: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self._label}: {text}", hint=hint or None)


_SHOWN: Final[Mapping[str, str]] = {
    "donors": "donors: {small: ./llama-small, big: Qwen/Qwen2.5-1.5B}",
    "layers": "layers: [{donor: small, layers: 0-5}, {donor: big, layers: 12-27, adapter: linear}]",
}
"""What a thing looks like, where it is missing: YAML, and so the same in every language."""


def _how_layers() -> str:
    return _("Write 0-5 (both included), 0:6 (the end excluded), [0, 1, 5], one number, all or none.")


def _kinds() -> str:
    return _("Write linear, identity, {low} or {mlp}.").format(low="{kind: low-rank, rank: 64}", mlp="{kind: mlp, width: 1024}")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return _("Did you mean {near!r}?").format(near=near[0]) if near else ""


def _told(value: object) -> str:
    """A value of a YAML file, as a person would name it."""
    if value is None:
        return _("nothing")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return _("a mapping") if value else _("an empty mapping")
    if isinstance(value, list | tuple):
        return _("a list") if value else _("an empty list")
    return repr(value)[:80]
