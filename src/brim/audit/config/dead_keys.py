"""Keys that nobody reads: gone, renamed, or misspelt."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.config import keys
from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from brim.audit.config.keys import Removed
    from brim.audit.config.kinds import Config, Kind
    from brim.audit.config.reading import Entry
    from brim.audit.found import Edit, Found
    from brim.records.findings import Confidence

RULE = "config-dead-key"
_SIMILAR: Final = 0.9
_SHORTEST: Final = 8
_PACKAGES: Final[dict[Kind, str]] = {"transformers": "transformers", "trl": "transformers"}
_KNOWN: Final[dict[Kind, frozenset[str]]] = {
    "transformers": keys.ARGUMENTS | keys.TRL,
    "trl": keys.ARGUMENTS | keys.TRL,
    "llama-factory": keys.ARGUMENTS | keys.LLAMA_FACTORY,
    "axolotl": keys.AXOLOTL,
    "deepspeed": keys.DEEPSPEED,
    "accelerate": keys.ACCELERATE,
}
_NEARLY_THE_SAME: Final = 0.95
_FOLDERS_UP: Final = 3
_LARGEST_CHARACTERS: Final = 64 * 1024
_PIN: Final = re.compile(
    r"""(?:^|["'])\s*transformers(?:\[[^\]\n]*\])?\s*((?:[<>=~!]{1,3}\s*[0-9][0-9a-z.*]*\s*,?\s*)+)""", re.MULTILINE
)
_RENAMED_ALIKE: Final = frozenset(
    {"per_gpu_train_batch_size", "per_gpu_eval_batch_size", "evaluation_strategy", "no_cuda", "include_tokens_per_second",
     "push_to_hub_token", "push_to_hub_model_id", "max_seq_length", "torch_dtype", "xpu_backend"}
)  # fmt: skip
"""Whose new name takes the same values."""


def check(config: Config) -> Iterator[Found]:
    """Of the first level, and of what DeepSpeed removed below it."""
    removed = _removed(config)
    for name, gone in removed.items():
        entry = config.get(name)
        if entry is not None:
            yield _gone(config, name, entry, gone)
    for entry in config.top():
        name = entry.name.removeprefix(config.prefix)
        if name not in removed and name not in keys.REMOVED_ARGUMENTS and name not in _KNOWN[config.kind]:
            yield from _unknown(config, name, entry)


def _removed(config: Config) -> Mapping[str, Removed]:
    if config.kind == "axolotl":
        return keys.REMOVED_AXOLOTL
    if config.kind == "deepspeed":
        return keys.REMOVED_DEEPSPEED
    if config.kind == "accelerate":
        return {}
    if config.kind == "llama-factory":
        return {name: keys.REMOVED_ARGUMENTS[name] for name in keys.REMOVED_EVERYWHERE}
    major = pinned_major(config.file) or _major("transformers")
    gone = {name: each for name, each in keys.REMOVED_ARGUMENTS.items() if major is None or each.since <= major}
    # A script of one's own may have arguments of these names; TRL's own scripts do not.
    return gone | keys.REMOVED_TRL if config.kind == "trl" and (_major("trl") or 1) >= 1 else gone


def _gone(config: Config, name: str, entry: Entry, gone: Removed) -> Found:
    since = _since(config, name)
    message = _("{key} is gone: {tool} does not read it.").format(key=name, tool=config.label)
    if since:
        message = _("{key} is gone since {version}: {tool} does not read it there.").format(
            key=name, version=since, tool=config.label
        )
    if gone.instead:
        message = sentences(message, _("Write {instead}.").format(instead=gone.instead))
    if name == "warmup_ratio":
        message = sentences(message, _("A number below 1 is a share of all steps there."))
    if name == "optimizer.params.max_grad_norm":
        message = _("{key} does not clip anything: DeepSpeed clips by gradient_clipping.").format(key=name)
    sure = _sure(config, name)
    return config.found(
        RULE,
        entry,
        message,
        confidence=sure,
        severity="medium" if not gone.changes_training or (since and (pinned_major(config.file) or 0) < gone.since) else None,
        edits=_mend(config, name, entry, gone),
        is_safe=sure == "high" and name in _RENAMED_ALIKE and config.get(gone.instead) is None,
    )


def _since(config: Config, name: str) -> str:
    """The version that took it away, where versions in wide use still have it."""
    if config.kind == "trl" and name == "torch_dtype":
        return "TRL 1"
    is_late = name in keys.REMOVED_ARGUMENTS and name not in keys.REMOVED_EVERYWHERE
    return "transformers 5" if is_late and config.kind in _PACKAGES else ""


def _sure(config: Config, name: str) -> Confidence:
    if name in keys.REMOVED_TRL or config.kind in {"llama-factory", "axolotl"} or config.prefix:
        return "medium"
    package = _PACKAGES.get(config.kind)
    return "medium" if package is not None and _major(package) is None else "high"


def _mend(config: Config, name: str, entry: Entry, gone: Removed) -> tuple[Edit, ...]:
    if gone.instead and config.get(gone.instead) is not None:
        return ()
    if name in _RENAMED_ALIKE or (name == "warmup_ratio" and isinstance(entry.value, float)):
        return entry.rename(gone.instead)
    if name == "group_by_length" and entry.value is True:
        return entry.rename(gone.instead) + entry.set_to("group_by_length")
    return entry.delete() if not gone.instead else ()


def _unknown(config: Config, name: str, entry: Entry) -> Iterator[Found]:
    """A near miss of a key that is not set; any unknown key where the tool refuses those."""
    # What a script of one's own calls its data is its own affair.
    known = sorted(each for each in _KNOWN[config.kind] if config.get(each) is None and not each.startswith("dataset"))
    near = get_close_matches(name, known, n=1, cutoff=_SIMILAR) if len(name) >= _SHORTEST else []
    if near:
        text = _("{key} is no key of {tool}, and nothing reads it. Did you mean {near}?")
        message = text.format(key=name, tool=config.label, near=near[0])
        confidence: Confidence = "medium" if config.prefix else "high"
        yield config.found(RULE, entry, message, confidence=confidence, edits=entry.rename(near[0]))
    elif twin := get_close_matches(name, _set_beside(config), n=1, cutoff=_NEARLY_THE_SAME) if len(name) >= _SHORTEST else []:
        text = _("{key} is no key of {tool}, and nothing reads it: {near} is what is in force.")
        message = text.format(key=name, tool=config.label, near=twin[0])
        yield config.found(RULE, entry, message, confidence="medium", edits=entry.delete())
    elif config.kind == "accelerate":
        text = _("{key} is no key of accelerate's file: accelerate refuses to start.")
        yield config.found(RULE, entry, text.format(key=name), confidence="medium", edits=entry.delete())


def _set_beside(config: Config) -> list[str]:
    return sorted(each for each in _KNOWN[config.kind] if config.get(each) is not None and not each.startswith("dataset"))


def pinned_major(file: str) -> int | None:
    """The major version of transformers that the project asks for, by the nearest requirements.txt or pyproject.toml that says so."""
    for folder in list(Path(file).absolute().parents)[:_FOLDERS_UP]:
        for name in ("requirements.txt", "pyproject.toml"):
            found = _pinned(folder / name)
            if found is not None:
                return found
    return None


@cache
def _pinned(path: Path) -> int | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            match = _PIN.search(stream.read(_LARGEST_CHARACTERS))
    except OSError:
        return None
    majors = []
    for sign, number, rest in re.findall(r"([<>=~]+)\s*([0-9]{1,4})([0-9.]*)", match[1] if match else ""):
        if sign in {"==", "===", "~=", "<="}:
            return int(number)
        if sign == "<":
            return int(number) - (0 if rest.strip(".0") else 1)
        majors.append(int(number))
    # A lower bound of an old version says nothing about the one in use.
    return next((major for major in majors if major >= keys.REMOVED_ARGUMENTS["warmup_ratio"].since), None)


@cache
def _major(package: str) -> int | None:
    """The major version that is installed here; None if none is."""
    try:
        first = version(package).partition(".")[0]
    except PackageNotFoundError:
        return None
    return int(first) if first.isdecimal() else None
