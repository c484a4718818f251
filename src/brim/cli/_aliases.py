"""Other tools' names on the command line: what a config file may say, a flag may say too.

`--per_device_train_batch_size 4` is `--micro-batch 4`, `--optim adamw_torch` is `--optimizer adamw`, `--bf16` is `--precision amp-bf16`.
The names are those of the options themselves (`config_names`, `config_words`), so that there is one list of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MODEL_NAMES = ("model", "model_name_or_path", "base_model")
"""The argument MODEL, where people write an option."""
BATCH_NAMES = ("effective_batch_size", "global_batch_size", "total_batch_size", "train_batch_size", "bs")
"""The effective batch, beside `--effective-batch` and `--batch-size`."""
DATA_NAMES = ("train_file", "dataset", "data_path")
TOKENIZER_NAMES = ("tokenizer_name", "tokenizer_name_or_path")
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Refused:
    """In `config_words`: a value that brim knows and does not support, and what to do instead."""

    why: str


@dataclass(frozen=True)
class _Spelling:
    parameter: click.Parameter
    flag: str
    table: Mapping[Any, Any] | None = None
    """Where the values have words of their own."""

    @property
    def is_switch(self) -> bool:
        """Whether it stands alone, or has `true` or `false` behind it."""
        return bool(getattr(self.parameter, "is_flag", False)) if self.table is None else _has_truths(self.table)


def in_our_spelling(arguments: Sequence[str], parameters: Iterable[click.Parameter]) -> list[str]:
    """The same arguments with every alias replaced by the option that it means.

    One option under two names with different values is an error; under one name the last value counts, as everywhere.
    """
    parameters = list(parameters)
    spellings = _spellings(parameters)
    has_model = any(isinstance(parameter, click.Argument) and parameter.name == "model" for parameter in parameters)
    given: dict[str, tuple[str, str, str]] = {}
    found: list[str] = []
    waiting = deque(arguments)
    while waiting:
        word = waiting.popleft()
        if word == "--":
            return [*found, word, *waiting]
        name, has_value, value = word.partition("=")
        key, is_long = _key(name), name.startswith("--")
        if name.startswith("-") and key in spellings:
            found += _replaced(name, value if has_value else None, waiting, spellings[key], given)
        elif is_long and has_model and key in MODEL_NAMES:
            found += [value] if has_value else [waiting.popleft()] if waiting else [word]
        elif is_long and key in {"batch_size", *BATCH_NAMES} and "micro_batch" in spellings:
            raise UsageError(
                _("{name}: this command looks at one micro-batch and has no effective batch.").format(name=name),
                hint=_("Write --micro-batch N (sequences in one forward pass), or use `brim plan`."),
            )
        else:
            found.append(word)
    return found


def meaning_of(name: str, value: Any, table: Mapping[Any, Any]) -> Any:
    """What another tool's value means here; None where it changes nothing."""
    if not isinstance(value, str | bool) or value not in table:
        known = ", ".join(_shown(word) for word, meant in table.items() if not isinstance(meant, Refused))
        text = _("{name}: {value} is not supported; supported: {known}.")
        raise UsageError(text.format(name=name, value=_shown(value), known=known))
    meant = table[value]
    if isinstance(meant, Refused):
        raise UsageError(_("{name}: {value} is not supported.").format(name=name, value=_shown(value)), hint=_(meant.why))
    return meant


def is_same(parameter: click.Parameter, one: Any, other: Any) -> bool:
    """Whether two values of an option mean the same: `2e-4` and `0.0002`."""
    try:
        return bool(parameter.type.convert(one, parameter, None) == parameter.type.convert(other, parameter, None))
    except click.BadParameter:
        return bool(one == other)


def _spellings(parameters: Iterable[click.Parameter]) -> dict[str, _Spelling]:
    """Every name of the options that have several. An option's own name wins over the alias of another."""
    own: dict[str, _Spelling] = {}
    aliases: dict[str, _Spelling] = {}
    taken: set[str] = set()
    for parameter in parameters:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        taken |= {_key(flag) for flag in [*parameter.opts, *parameter.secondary_opts]}
        names, words = getattr(parameter, "config_names", ()), getattr(parameter, "config_words", {})
        if not flags or not (names or words or len(parameter.opts) > 1):
            continue
        own |= {_key(flag): _Spelling(parameter, flags[0]) for flag in parameter.opts}
        aliases |= {key: _Spelling(parameter, flags[0]) for key in names}
        aliases |= {key: _Spelling(parameter, flags[0], table) for key, table in words.items()}
    return {**{key: spelling for key, spelling in aliases.items() if key not in taken}, **own}


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else flag


def _replaced(
    name: str, value: str | None, waiting: deque[str], spelling: _Spelling, given: dict[str, tuple[str, str, str]]
) -> list[str]:
    """One option with its value as click takes it; nothing where it changes nothing."""
    if value is None and spelling.is_switch:
        value = waiting.popleft() if waiting and waiting[0].lower() in _TRUTHS else "true"
    elif value is None:
        if not waiting:
            return [spelling.flag]
        value = waiting.popleft()
    if spelling.table is not None:
        is_truth = spelling.is_switch and value.lower() in _TRUTHS
        meant = meaning_of(name, _TRUTHS[value.lower()] if is_truth else value, spelling.table)
        if meant is None:
            return []
        value = str(meant)
    elif spelling.is_switch:
        return [spelling.flag] if _TRUTHS.get(value.lower(), True) else []
    _refuse_another_value(name, value, spelling, given)
    return [spelling.flag, value]


def _refuse_another_value(name: str, value: str, spelling: _Spelling, given: dict[str, tuple[str, str, str]]) -> None:
    parameter = spelling.parameter
    shown = name if spelling.is_switch else f"{name} {value}"
    before, before_shown, before_value = given.get(spelling.flag, (name, shown, value))
    if before != name and not parameter.multiple and not is_same(parameter, before_value, value):
        text = _("{first} and {second} set the same option, {flag}, to different values.")
        raise UsageError(text.format(first=before_shown, second=shown, flag=spelling.flag), hint=_("Give one."))
    given[spelling.flag] = (name, shown, value)


def _has_truths(table: Mapping[Any, Any]) -> bool:
    return any(isinstance(word, bool) for word in table)


def _shown(word: object) -> str:
    return str(word).lower() if isinstance(word, bool) else str(word)
