"""Keys that nothing reads: removed, renamed, or misspelt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from brim.audit.config import keys
from brim.audit.config.code_names import CodeNames
from brim.audit.config.keys import Removed
from brim.audit.config.reading import Entry, shown
from brim.audit.pins import Pins
from brim.locale import _, sentences
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from brim.audit.config.kinds import Config, Kind
    from brim.audit.found import Edit, Found
    from brim.records.findings import Confidence, Severity

RULE = "config-dead-key"
_SIMILAR: Final = 0.9
_SHORTEST: Final = 8
_PACKAGES: Final[dict[Kind, str]] = {
    "transformers": "transformers", "trl": "trl", "llama-factory": "llamafactory", "axolotl": "axolotl", "deepspeed": "deepspeed",
    "accelerate": "accelerate",
}  # fmt: skip
_KNOWN: Final[dict[Kind, frozenset[str]]] = {
    "transformers": keys.ARGUMENTS | keys.TRL,
    "trl": keys.ARGUMENTS | keys.TRL,
    "llama-factory": keys.ARGUMENTS | keys.LLAMA_FACTORY,
    "axolotl": keys.AXOLOTL,
    "deepspeed": keys.DEEPSPEED,
    "accelerate": keys.ACCELERATE,
}
_NEARLY_THE_SAME: Final = 0.95
_READ_BY_SCRIPTS: Final[tuple[Kind, ...]] = ("transformers", "trl")
"""Recognised by their keys alone: a script of the project may read them with code of its own."""
_READERS: Final = ("TrainingArguments", "HfArgumentParser", "TrlParser", "SFTConfig", "DPOConfig", "GRPOConfig")
"""What a project has in its code if Transformers or TRL reads its files."""
_STOPS: Final[tuple[Kind, ...]] = ("llama-factory", "deepspeed")
"""Tools that stop at a key that they removed: no value is used in its place, so the severity is at most medium."""
_CLIPPING: Final = "optimizer.params.max_grad_norm"


@dataclass(frozen=True)
class _Dead:
    """A removed key, its entry, and the package whose version decides."""

    name: str
    entry: Entry
    gone: Removed
    package: str
    pins: Pins


def check(config: Config, code: CodeNames | None = None) -> Iterator[Found]:
    """The first level, and what DeepSpeed removed below it. `code`: the project's own code; what that reads is not dead."""
    code = code or CodeNames()
    pins = Pins.of(config.file)
    removed = _removed(config)
    for name, (package, gone) in removed.items():
        entry = config.get(name)
        if entry is None or entry.value is None or _is_read(config, name, code):
            continue
        if gone.is_gone(package, pins):
            yield _weighed(config, _gone(config, _Dead(name, entry, gone, package, pins)), code)
    if pins.is_own(_PACKAGES[config.kind]):
        return  # the project may know keys that no release has
    for entry in config.top():
        name = entry.name.removeprefix(config.prefix)
        is_known = name in removed or name in keys.REMOVED_ARGUMENTS or name in _KNOWN[config.kind]
        if not is_known and entry.value is not None and not _is_read(config, name, code):
            yield from (_weighed(config, found, code) for found in _unknown(config, name, entry))


def _weighed(config: Config, found: Found, code: CodeNames) -> Found:
    """Low where the tool is a guess by the keys, and the project's code does not use it: something else may read the file."""
    is_guess = config.kind in _READ_BY_SCRIPTS and not code.mentions(*_READERS)
    return replace(found, severity="low", confidence="low", is_safe=False) if is_guess else found


def _is_read(config: Config, name: str, code: CodeNames) -> bool:
    if config.kind in _READ_BY_SCRIPTS:
        return code.reads(name)
    # A file of DeepSpeed may be edited before it is handed over.
    return config.kind == "deepspeed" and code.stores(name)


def _removed(config: Config) -> Mapping[str, tuple[str, Removed]]:
    """The keys that a release removed, and the package whose release that is."""
    if config.kind == "axolotl":
        return {name: ("axolotl", gone) for name, gone in keys.REMOVED_AXOLOTL.items()}
    if config.kind == "deepspeed":
        return {name: ("deepspeed", gone) for name, gone in keys.REMOVED_DEEPSPEED.items()}
    if config.kind == "accelerate":
        return {}
    names = keys.REMOVED_EVERYWHERE if config.kind == "llama-factory" else tuple(keys.REMOVED_ARGUMENTS)
    removed = {name: ("transformers", keys.REMOVED_ARGUMENTS[name]) for name in names}
    # A script of one's own may have arguments of these names; TRL's own scripts do not.
    return removed | {name: ("trl", gone) for name, gone in keys.REMOVED_TRL.items()} if config.kind == "trl" else removed


def _gone(config: Config, dead: _Dead) -> Found:
    gone, pins = dead.gone, dead.pins
    is_certain = not gone.until or pins.requires(dead.package, f">={gone.until}")
    is_supported = not gone.since or pins.requires(dead.package, f">={gone.since}")
    is_sure = is_certain and not config.prefix
    return config.found(
        RULE,
        dead.entry,
        _message(config, dead),
        confidence="high" if is_sure else "medium",
        severity=_severity(config, dead),
        in_force=_rows(config, dead),
        edits=_mend(config, dead),
        is_safe=is_sure and is_supported and gone.same_values and config.get(gone.instead) is None and dead.name != _CLIPPING,
    )


def _message(config: Config, dead: _Dead) -> str:
    gone = dead.gone
    if dead.name == _CLIPPING:
        return _("{key} does not clip gradients: DeepSpeed clips by gradient_clipping, which is {value}.").format(
            key=dead.name, value=config.value("gradient_clipping", 0.0)
        )
    text = _("{key} was removed in {package} {version}: {tool} does not read it.")
    message = text.format(key=dead.name, package=dead.package, version=gone.until, tool=config.label)
    if gone.instead:
        message = sentences(message, _("Write {instead}.").format(instead=gone.instead))
    if dead.name == "warmup_ratio":
        message = sentences(message, _("A number below 1 is a share of all steps there."))
    if not dead.pins.knows(dead.package) and not dead.pins.is_own(dead.package):
        message = sentences(
            message, _("The project pins no version of {package}: the newest is assumed.").format(package=dead.package)
        )
    return message


def _severity(config: Config, dead: _Dead) -> Severity | None:
    """High only if every admitted version lacks the key, or where the value that is used instead is known."""
    value = dead.entry.value
    is_off = isinstance(value, dict) and value.get("enabled") is False
    if not dead.gone.changes_training or is_off or value in dead.gone.idle:
        return "low"
    if not dead.gone.until:
        return None
    return "medium" if config.kind in _STOPS or not dead.pins.requires(dead.package, f">={dead.gone.until}") else None


def _rows(config: Config, dead: _Dead) -> tuple[InForce, ...]:
    if dead.name != _CLIPPING:
        return ()
    return (
        InForce(setting="gradient_clipping", set=shown(dead.entry.value), in_force=shown(config.value("gradient_clipping", 0.0))),
    )


def _mend(config: Config, dead: _Dead) -> tuple[Edit, ...]:
    gone, entry = dead.gone, dead.entry
    if dead.name == _CLIPPING or (gone.instead and config.get(gone.instead) is not None):
        return ()
    if gone.same_values or (dead.name == "warmup_ratio" and isinstance(entry.value, float)):
        return entry.rename(gone.instead)
    if dead.name == "group_by_length" and entry.value is True:
        return entry.rename(gone.instead) + entry.set_to("group_by_length")
    return entry.delete() if not gone.instead else ()


def _unknown(config: Config, name: str, entry: Entry) -> Iterator[Found]:
    """A near miss of a key that is not set; any unknown key where the tool refuses those."""
    # What a script of one's own calls its data is its own affair.
    known = sorted(each for each in _KNOWN[config.kind] if config.get(each) is None and not each.startswith("dataset"))
    near = get_close_matches(name, known, n=1, cutoff=_SIMILAR) if len(name) >= _SHORTEST else []
    if near:
        text = _("{tool} has no key {key}, so nothing reads it. Did you mean {near}?")
        message = text.format(key=name, tool=config.label, near=near[0])
        confidence: Confidence = "medium" if config.prefix else "high"
        yield config.found(RULE, entry, message, confidence=confidence, severity="medium", edits=entry.rename(near[0]))
    elif twin := get_close_matches(name, _set_beside(config), n=1, cutoff=_NEARLY_THE_SAME) if len(name) >= _SHORTEST else []:
        text = _("{tool} has no key {key}, so nothing reads it: {near} is used.")
        message = text.format(key=name, tool=config.label, near=twin[0])
        row = InForce(setting=twin[0], set=shown(entry.value), in_force=shown(config.value(twin[0])))
        differs = row.set != row.in_force
        yield config.found(
            RULE,
            entry,
            message,
            confidence="medium",
            severity=None if differs else "low",
            in_force=(row,) if differs else (),
            edits=entry.delete(),
        )
    elif config.kind == "accelerate":
        text = _("{key} is no key of accelerate's file: accelerate refuses to start.")
        yield config.found(RULE, entry, text.format(key=name), confidence="medium", severity="medium", edits=entry.delete())


def _set_beside(config: Config) -> list[str]:
    return sorted(each for each in _KNOWN[config.kind] if config.get(each) is not None and not each.startswith("dataset"))
