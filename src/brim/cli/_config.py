"""The config file: one YAML mapping for all verbs; default < file < flag.

Keys are the names of the options with `_` for `-`, or the names that other tools give the same thing (an option lists those as
`config_names` and `config_words`). A key that no verb knows is an error with a suggestion, because a misspelt setting that
is silently ignored is the very thing that brim is against. A key that only another verb uses is said on stderr and passed over.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli._aliases import MODEL_NAMES, is_same, meaning_of
from brim.cli._output import note
from brim.cli._verbs import VERBS
from brim.errors import ConfigError, UsageError
from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_FROM_FILES = frozenset({"config", "help"})


def defaults_from(path: str, command: click.Command, ctx: click.Context) -> dict[str, Any]:
    """Read and check the file; what it says for this command, by parameter name, ready to be click's `default_map`."""
    settings = read_config(path)
    own = _names(command)
    defaults: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unused = []
    for key, value in settings.items():
        parameter = own.get(key.replace("-", "_"))
        if parameter is not None:
            value = _in_our_words(path, key, value, parameter)
            if value is None:
                continue
        if parameter is None:
            if key.replace("-", "_") not in _known_anywhere():
                raise ConfigError(_unknown_key(path, key, own))
            unused.append(key)
            continue
        assert parameter.name is not None
        if value is not None:
            _check(path, key, value, parameter, ctx)
            value = [value] if parameter.multiple and isinstance(value, str) else value
            value = not value if _is_negative(key, parameter) else value
        if parameter.name in spelled and not is_same(parameter, defaults.get(parameter.name), value):
            text = _("{path}: {first} and {second} set the same thing to different values; keep one.")
            raise ConfigError(text.format(path=path, first=spelled[parameter.name], second=key))
        spelled[parameter.name] = key
        if value is not None:
            defaults[parameter.name] = value
    if unused:
        text = _("{path}: not used by `brim {verb}`: {keys}.")
        note(text.format(path=path, verb=ctx.info_name, keys=", ".join(unused)))
    return defaults


def read_config(path: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping."""
    import yaml

    from brim.record import LARGEST_CONFIG_BYTES, read_bounded  # imports pydantic, which --help does not need

    if not path.strip():
        raise ConfigError(_("--config needs the name of a file."))
    try:
        text = read_bounded(Path(path).expanduser(), LARGEST_CONFIG_BYTES).decode()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder of nobody (~nosuchuser)
        why = getattr(error, "strerror", None) or error
        raise ConfigError(_("Cannot read the config file {path}: {why}.").format(path=path, why=why)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(_("The config file {path} is not UTF-8 text.").format(path=path)) from error
    try:
        loaded = yaml.load(text, _loader())  # noqa: S506 (a SafeLoader that refuses repeated keys)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or str(error)
        if mark is None:
            text = _("The config file {path} is not valid YAML: {why}.").format(path=path, why=why)
        else:
            text = _("The config file {path} is not valid YAML in line {line}: {why}.").format(
                path=path, line=mark.line + 1, why=why
            )
        raise ConfigError(text) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(_("The config file {path} should hold lines of `key: value`.").format(path=path))
    return loaded


def _loader() -> type[Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML takes the last of two equal keys in silence; here that is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key_node, _value in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *base` fills in what is not there: no repetition
                    continue
                key = self.construct_object(key_node, deep=deep)
                if key in seen:
                    why = _("the key {key!r} appears twice").format(key=key)
                    raise yaml.constructor.ConstructorError(None, None, why, key_node.start_mark)
                if isinstance(key, str):
                    seen.add(key)
            return super().construct_mapping(node, deep=deep)

    return Loader


def _names(command: click.Command) -> dict[str, click.Parameter]:
    """Every spelling of a command's settings in a config file."""
    names: dict[str, click.Parameter] = {}
    own: dict[str, click.Parameter] = {}  # an option's own name wins over the alias of another
    for parameter in command.params:
        if parameter.name is None or parameter.name in _NOT_FROM_FILES:
            continue
        flags = [
            flag.lstrip("-").replace("-", "_") for flag in parameter.opts + parameter.secondary_opts if flag.startswith("--")
        ]
        names |= dict.fromkeys((*getattr(parameter, "config_names", ()), *getattr(parameter, "config_words", {})), parameter)
        own |= dict.fromkeys((parameter.name, *flags), parameter)
        if isinstance(parameter, click.Argument) and parameter.name == "model":
            names |= dict.fromkeys(MODEL_NAMES, parameter)
    return names | own


def _in_our_words(path: str, key: str, value: Any, parameter: click.Parameter) -> Any:
    """What a name that Transformers gives a setting, with words of its own, means here; None where it says nothing."""
    words = getattr(parameter, "config_words", {}).get(key.replace("-", "_"))
    if words is None:
        return value
    try:
        return meaning_of(key, value, words)
    except UsageError as error:
        raise ConfigError(_("{path}: {why}").format(path=path, why=error.message), hint=error.hint) from error


def _is_negative(key: str, parameter: click.Parameter) -> bool:
    """Whether a key names the other side of a pair of flags: `unpadded: true` means `padded: false`."""
    return f"--{key.replace('_', '-')}" in parameter.secondary_opts


def _known_anywhere() -> set[str]:
    known: set[str] = set()
    for verb in VERBS.values():
        known |= set(_names(importlib.import_module(verb.module).command))
    return known


def _unknown_key(path: str, key: str, own: Mapping[str, click.Parameter]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), list(own) + sorted(_known_anywhere()), n=1)
    text = _("{path}: there is no setting {key!r}.").format(path=path, key=key)
    return sentences(text, _("Did you mean {near!r}?").format(near=near[0]) if near else "")


def _check(path: str, key: str, value: Any, parameter: click.Parameter, ctx: click.Context) -> None:
    """Let the option's own type judge the value, and name the file instead of a flag that nobody typed."""
    if parameter.multiple and isinstance(value, str):
        value = [value]
    takes_lists = parameter.multiple or parameter.nargs != 1 or getattr(parameter.type, "takes_lists", False)
    takes_mappings = getattr(parameter.type, "takes_mappings", False)
    if (isinstance(value, dict) and not takes_mappings) or (isinstance(value, list) and not takes_lists):
        text = _("{path}: {key} takes one value, and the file gives {found}.")
        raise ConfigError(text.format(path=path, key=key, found=_("a mapping") if isinstance(value, dict) else _("a list")))
    try:
        parameter.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise ConfigError(_("{path}: {key}: {why}").format(path=path, key=key, why=error.message)) from error
