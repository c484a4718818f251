"""A YAML file of a person: read safely, without YAML's surprises, and with one sentence where it cannot be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from brim.errors import ConfigError
from brim.locale import _
from brim.record import LARGEST_CONFIG_BYTES, read_bounded

if TYPE_CHECKING:
    from pathlib import Path

_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)$")
"""Whole numbers as people write them, and no others: not those of base 8, 16 or 60."""


def read_document(path: Path) -> Any:
    """What a YAML file holds; None where it holds nothing."""
    import yaml

    try:
        file = path.expanduser()
        is_folder = file.is_dir()
        text = "" if is_folder else read_bounded(file, LARGEST_CONFIG_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(_("The recipe {path} is not UTF-8 text.").format(path=path)) from error
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the home folder of nobody (~nosuchuser)
        why = getattr(error, "strerror", None) or error
        raise ConfigError(_("Cannot read the recipe {path}: {why}.").format(path=path, why=why)) from error
    if is_folder:
        raise ConfigError(_("{path} is a folder, and a recipe is a YAML file.").format(path=path))
    try:
        return yaml.load(text, _loader())  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise _not_yaml(path, error) from error


def _not_yaml(path: Path, error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    why = getattr(error, "problem", None) or str(error).partition("\n")[0]
    if mark is None:
        return ConfigError(_("The recipe {path} is not valid YAML: {why}.").format(path=path, why=why))
    text = _("The recipe {path} is not valid YAML in line {line}: {why}.")
    return ConfigError(text.format(path=path, line=mark.line + 1, why=why))


def _loader() -> type[Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """A key that stands twice is an error, and 12:28 is a range: YAML would take the last key, and a number of base 60."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _value in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *base` fills in what is not there: no repetition
                    continue
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    why = _("the key {key!r} appears twice").format(key=key)
                    raise yaml.constructor.ConstructorError(None, None, why, key_node.start_mark)
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, _INTEGER if tag == "tag:yaml.org,2002:int" else pattern) for tag, pattern in resolvers]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader
