"""`[tool.brim.doctor]` in a project's pyproject.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from brim.audit.rules import names_of
from brim.errors import ConfigError, UnknownNameError
from brim.locale import _, sentences

FAIL_ON: Final = ("high", "medium", "low", "never")
ALL_RULES: Final = "all"
_KEYS: Final = ("select", "ignore", "per-file-ignores", "fail-on")


@dataclass(frozen=True)
class ProjectSettings:
    """What the table sets; nothing where there is none."""

    file: Path | None = None
    select: frozenset[str] = frozenset()
    all_rules: bool = False
    ignore: frozenset[str] = frozenset()
    per_file_ignores: Mapping[str, frozenset[str]] = field(default_factory=dict)
    fail_on: str | None = None

    def is_ignored(self, file: str, rule: str) -> bool:
        """Whether a pattern of `per-file-ignores` ignores the rule in this file."""
        names = [pattern for pattern, rules in self.per_file_ignores.items() if rule in rules]
        return bool(names) and any(_matches(file, pattern, self.file) for pattern in names)


def settings_for(target: Path) -> ProjectSettings:
    """The table of the nearest pyproject.toml that has one, from the target upwards."""
    start = target.resolve()
    for folder in (start, *start.parents) if start.is_dir() else start.parents:
        path = folder / "pyproject.toml"
        if path.is_file():
            table = _table(path)
            if table is not None:
                return _settings(path, table)
    return ProjectSettings()


def _table(path: Path) -> Mapping[str, Any] | None:
    """The table, or None if the file has none. A file that is not valid TOML is an error only if it seems to have one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except (OSError, ValueError) as error:
        if isinstance(error, tomllib.TOMLDecodeError) and "tool.brim" in text:
            raise ConfigError(_("{path} is not valid TOML: {why}.").format(path=path, why=error)) from error
        return None
    tool = document.get("tool")
    brim = tool.get("brim") if isinstance(tool, dict) else None
    if not isinstance(brim, dict) or "doctor" not in brim:
        return None
    if not isinstance(brim["doctor"], dict):
        raise ConfigError(_("{path}: tool.brim.doctor must be a table.").format(path=path))
    table: dict[str, Any] = brim["doctor"]
    return table


def _settings(path: Path, table: Mapping[str, Any]) -> ProjectSettings:
    for key in table:
        if key not in _KEYS:
            raise _error(path, key, _("is not a setting."), key, _KEYS)
    fail_on = table.get("fail-on")
    if fail_on is not None and fail_on not in FAIL_ON:
        raise _error(path, "fail-on", _("must be one of {names}.").format(names=", ".join(FAIL_ON)), str(fail_on), FAIL_ON)
    selected = _strings(path, "select", table.get("select", []))
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise _error(path, "per-file-ignores", _("must be a table of patterns and lists of rules."))
    return ProjectSettings(
        file=path,
        select=_rules(path, "select", [name for name in selected if name != ALL_RULES]),
        all_rules=ALL_RULES in selected,
        ignore=_rules(path, "ignore", _strings(path, "ignore", table.get("ignore", []))),
        per_file_ignores={
            pattern: _rules(path, "per-file-ignores", _strings(path, f"per-file-ignores.{pattern}", names))
            for pattern, names in per_file.items()
        },
        fail_on=fail_on,
    )


def _strings(path: Path, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _error(path, key, _("must be a list of rules."))
    return value


def _rules(path: Path, key: str, names: list[str]) -> frozenset[str]:
    try:
        return names_of(names)
    except UnknownNameError as error:
        raise _error(path, key, str(error)) from error


def _error(path: Path, key: str, why: str, given: str = "", allowed: tuple[str, ...] = ()) -> ConfigError:
    nearest = get_close_matches(given.replace("_", "-"), allowed, n=1)
    hint = _("Did you mean {name}?").format(name=nearest[0]) if nearest else ""
    return ConfigError(sentences(f"{path}: [tool.brim.doctor] {key}: {why}", hint))


def _matches(file: str, pattern: str, settings: Path | None) -> bool:
    """As git and ruff read patterns: without a slash any file or folder of that name, else a path from pyproject.toml's folder."""
    assert settings is not None
    try:
        path = Path(file).resolve().relative_to(settings.parent.resolve()).as_posix()
    except ValueError:
        return False
    if "/" not in pattern.rstrip("/"):
        return any(fnmatch(part, pattern.rstrip("/")) for part in path.split("/"))
    return fnmatch(path, pattern) or fnmatch(path, pattern.rstrip("/") + "/*")
