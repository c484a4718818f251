"""Transformers' spellings on the command line: what a config file may say, a flag may say too.

`--per_device_train_batch_size 4` is `--micro-batch 4`, `--optim adamw_torch` is `--optimizer adamw`, `--bf16` is `--precision amp-bf16`.
The tables are those of the options themselves (`config_names`, `config_words`), so that there is one list of names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import click

_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def in_our_spelling(arguments: Sequence[str], parameters: Iterable[click.Parameter]) -> list[str]:
    """The same arguments with every alias replaced by the option that it means."""
    names, words = _tables(parameters)
    found: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*found, word, *waiting]
        name, has_value, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in {*names, *words}:
            found.append(word)
        elif key in words:
            flag, table = words[key]
            given = value if has_value else _next_value(waiting, table)
            meant = _meant(name, given, table)
            found += [] if meant is None else [flag, str(meant)]
        else:
            found += [names[key], value] if has_value else [names[key]]
    return found


def _tables(parameters: Iterable[click.Parameter]) -> tuple[dict[str, str], dict[str, tuple[str, Mapping[Any, Any]]]]:
    names: dict[str, str] = {}
    words: dict[str, tuple[str, Mapping[Any, Any]]] = {}
    own: set[str] = set()
    for parameter in parameters:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        if not flags:
            continue
        own |= {flag.removeprefix("--").replace("-", "_") for flag in [*parameter.opts, *parameter.secondary_opts]}
        names |= dict.fromkeys(getattr(parameter, "config_names", ()), flags[0])
        words |= {key: (flags[0], table) for key, table in getattr(parameter, "config_words", {}).items()}
    return {key: flag for key, flag in names.items() if key not in own}, {
        key: pair for key, pair in words.items() if key not in own
    }


def _next_value(waiting: list[str], table: Mapping[Any, Any]) -> str:
    """A switch (`--bf16`) stands alone, or has `true` or `false` behind it; a word always follows."""
    is_switch = any(isinstance(word, bool) for word in table)
    if is_switch:
        return waiting.pop(0) if waiting and waiting[0].lower() in _TRUTHS else "true"
    return waiting.pop(0) if waiting else ""


def _meant(name: str, given: str, table: Mapping[Any, Any]) -> Any:
    key = _TRUTHS.get(given.lower(), given) if any(isinstance(word, bool) for word in table) else given
    if key not in table:
        known = ", ".join(str(word).lower() if isinstance(word, bool) else str(word) for word in table)
        text = _("{name} {value} has no counterpart here; {known} have.")
        raise UsageError(text.format(name=name, value=given, known=known))
    return table[key]
