"""Which versions of a package a project runs with, by the files in which it asks for them.

    pins = Pins.of("project/src/train.py")      # a file or a folder
    pins.allows("transformers", ">=5.15")       # may one of these versions be installed?
    pins.requires("transformers", ">=4.41")     # is every version that may be installed one of these?
    pins.knows("transformers")                  # does the project ask for a version at all?
    pins.is_own("axolotl")                      # is the project this package?

Read are requirements files, pyproject.toml, setup.cfg, setup.py, environment.yml, Pipfile, the lock files of Poetry, uv, PDM and pipenv,
and `pip install` in Dockerfiles, shell scripts and, for a notebook, in its own cells. The nearest folder that asks for a version of a
package decides; if several files there do, `allows` and `requires` hold for each of them. Without any, `allows` is true (the newest
release is assumed) and `requires` is false. A project that is the package itself runs with its own version.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Version = tuple[float, ...]
_NEWEST: Final[Version] = (float("inf"),)
_PARTS: Final = 4
_MOST_FOLDERS: Final = 6
_LARGEST_BYTES: Final = 8 << 20
_MOST_FILES: Final = 40
_DEEPEST_INCLUDE: Final = 3
_ROOTS: Final = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_CLAUSE: Final = re.compile(r"(===|==|~=|!=|>=|<=|>|<|=|\^|~)?\s*v?([0-9][0-9A-Za-z.*+!_-]*)")
_REQUIREMENT: Final = re.compile(r"""\s*(?:[\w-]+::)?([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?\s*([=<>!~^][^;#"')@]*)?""")
_GIT_TAG: Final = re.compile(r"git\+\S+?/([\w.-]+?)(?:\.git)?@v?([0-9]+\.[0-9][\w.]*)")
_GIT_COMMIT: Final = re.compile(r"git\+\S+?/([\w.-]+?)(?:\.git)?@(?!(?:main|master)\b)\w")
_INSTALL: Final = re.compile(
    r"^(?P<before>[^#\n]*?)\b(?:pip3?|uv)\s+(?:pip\s+)?(?:install|add)\s+(?P<words>[^\n]+)", re.MULTILINE
)
_LOCKED: Final = re.compile(r'^\[\[package\]\]\s*\nname = "([^"]+)"\s*\nversion = "([^"]+)"', re.MULTILINE)
_CONDA: Final = re.compile(r"""^\s*-\s*["']?([^"'#\n]+)""", re.MULTILINE)
_WORD: Final = re.compile(r"""'[^']*'|"[^"]*"|[^\s;&|]+""")


@dataclass(frozen=True)
class Range:
    """Versions from `low` on, and below `high`."""

    low: Version = (0,)
    high: Version = _NEWEST

    @classmethod
    def of(cls, specifier: str) -> Range | None:
        """The range of `>=4.30,<5`, `==4.36.*`, `~=4.36`, `^4.36` or `4.36.2`; None if it names no version."""
        ranges = [_clause(sign, number) for sign, number in _CLAUSE.findall(specifier) if sign != "!="]
        if not ranges:
            return None
        return cls(max(each.low for each in ranges), min(each.high for each in ranges))

    def meets(self, other: Range) -> bool:
        """Whether the two have a version in common."""
        return max(self.low, other.low) < min(self.high, other.high)

    def is_within(self, other: Range) -> bool:
        """Whether every version of this one is in the other."""
        return other.low <= self.low and self.high <= other.high


_A_COMMIT: Final = Range((-1,), (-1,))
"""A commit of a repository: one unknown version, about which nothing can be said."""
_NEEDS: Final = {"transformers": (("huggingface-hub", "<1", Range(high=(5, 0, 0, 0))),)}
"""Packages that hold back another: transformers 5 needs huggingface-hub 1 (https://github.com/huggingface/transformers/blob/v5.0.0/setup.py)."""


@dataclass
class _Asked:
    """What one file, or one folder, asks for."""

    ranges: dict[str, list[Range]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Packages that are built here."""

    def add(self, package: str, specifier: str) -> None:
        found = Range.of(specifier)
        if found is not None:
            self.ranges.setdefault(_plain(package), []).append(found)

    def add_text(self, requirement: str) -> None:
        """A requirement as pip reads it: `transformers[torch]>=4.30,<5  # why`."""
        tagged = _GIT_TAG.search(requirement)
        if tagged is not None:
            self.add(tagged[1], f"=={tagged[2]}")
        elif (commit := _GIT_COMMIT.search(requirement)) is not None:
            self.ranges.setdefault(_plain(commit[1]), []).append(_A_COMMIT)
        elif (match := _REQUIREMENT.match(requirement.partition(" --")[0])) is not None and match[2]:
            self.add(match[1], match[2])

    def add_own(self, package: object, version: object) -> None:
        if isinstance(package, str):
            self.names.add(_plain(package))
            if isinstance(version, str):
                self.ranges[_plain(package)] = [each for each in [Range.of(f"=={version}")] if each is not None]

    def take(self, other: _Asked) -> None:
        for package, ranges in other.ranges.items():
            self.ranges.setdefault(package, []).extend(ranges)
        self.names |= other.names


@dataclass(frozen=True)
class Pins:
    """The versions that one file or folder of a project may run with."""

    _levels: tuple[_Asked, ...] = ()

    @classmethod
    def of(cls, place: str | Path) -> Pins:
        """Of a file or a folder: what is asked for there and in the folders above, up to the project's own."""
        path = Path(place).absolute()
        levels = [_read(path, _notebook)] if path.suffix == ".ipynb" else []
        levels += [_of_folder(folder) for folder in _folders(path if path.is_dir() else path.parent)]
        return cls(tuple(level for level in levels if level.ranges or level.names))

    def allows(self, package: str, specifier: str) -> bool:
        """Whether a version that fits `specifier` may be installed; true where nothing is known, for `>=`."""
        wanted = _wanted(specifier)
        ranges = self._ranges(package)
        return all(each.meets(wanted) for each in ranges) if ranges else wanted.high == _NEWEST

    def requires(self, package: str, specifier: str) -> bool:
        """Whether every version that may be installed fits `specifier`; false where nothing is known."""
        wanted = _wanted(specifier)
        ranges = self._ranges(package)
        return bool(ranges) and all(each.is_within(wanted) for each in ranges)

    def knows(self, package: str) -> bool:
        """Whether the project asks for a version of the package."""
        return bool(self._ranges(package))

    def is_own(self, package: str) -> bool:
        """Whether the project is this package."""
        return any(_plain(package) in level.names for level in self._levels)

    def _ranges(self, package: str) -> list[Range]:
        name = _plain(package)
        own = next((level for level in self._levels if name in level.names), None)
        levels = self._levels if own is None else (own,)
        ranges = next((level.ranges[name] for level in levels if level.ranges.get(name)), [])
        for other, held, most in _NEEDS.get(name, ()):
            if own is None and self.requires(other, held):
                ranges = [replace(each, high=min(each.high, most.high)) for each in ranges or [Range()]]
        return ranges


def is_within(specifier: str, other: str) -> bool:
    """Whether every version that fits one specifier fits the other: `>=4.0` is within `>=2.11`."""
    return _wanted(specifier).is_within(_wanted(other))


def _wanted(specifier: str) -> Range:
    found = Range.of(specifier)
    if found is None:
        raise ValueError(specifier)
    return found


def _clause(sign: str, text: str) -> Range:
    numbers = [int(number) for number in re.match(r"[0-9]*(?:\.[0-9]+)*", text)[0].split(".") if number]  # type: ignore[index]
    version = _padded(numbers)
    is_prefix = text.endswith("*")
    if sign == ">=":
        return Range(low=version)
    if sign == ">":
        return Range(low=_after(version))
    if sign == "<=":
        return Range(high=_after(version))
    if sign == "<":
        return Range(high=version)
    if sign == "~=":
        return Range(version, _raised(numbers[:-1] or numbers))
    if sign == "~":
        return Range(version, _raised(numbers[:2]))
    if sign == "^":
        # Poetry: up to the next change of the first number that is not 0.
        place = next((index for index, number in enumerate(numbers) if number), len(numbers) - 1)
        return Range(version, _raised(numbers[: place + 1]))
    if is_prefix or sign == "=":
        return Range(version, _raised(numbers))
    return Range(version, _after(version))


def _padded(numbers: list[int]) -> Version:
    return tuple([*numbers, *[0] * _PARTS][:_PARTS])


def _after(version: Version) -> Version:
    """The bound directly behind a version."""
    return (*version, 1)


def _raised(numbers: list[int]) -> Version:
    """`4.36` to `4.37`."""
    return _padded([*numbers[:-1], numbers[-1] + 1]) if numbers else _NEWEST


def _plain(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _folders(start: Path) -> Iterator[Path]:
    """A folder and those above it, up to the one that looks like the project's."""
    home = Path.home()
    for folder in [start, *start.parents][:_MOST_FOLDERS]:
        # What lies in a home folder, or in one that all users share, is of other projects.
        if folder != start and (folder == home or len(folder.parts) <= 2):
            return
        yield folder
        if any((folder / name).exists() for name in _ROOTS):
            return


def _of_folder(folder: Path) -> _Asked:
    asked = _Asked()
    try:
        changed = folder.stat().st_mtime_ns
    except OSError:
        return asked
    for name in _files_of(str(folder), changed):
        # The files of requirements/ have any name.
        asked.take(_read(Path(name), _reader(Path(name).name) or _requirements))
    return asked


@lru_cache(maxsize=512)
def _files_of(folder: str, _changed: int) -> tuple[str, ...]:
    """The files of a folder that may ask for versions."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in entries)
    except OSError:
        return ()
    found = [str(Path(folder, name)) for name in names if _reader(name) is not None]
    if "requirements" in names:
        found += sorted(str(path) for path in Path(folder, "requirements").glob("*.txt"))
    return tuple(found[:_MOST_FILES])


def _read(path: Path, reader: Callable[[str, Path], _Asked]) -> _Asked:
    try:
        facts = path.stat()
    except OSError:
        return _Asked()
    return _read_once(str(path), facts.st_mtime_ns, facts.st_size, reader)


@lru_cache(maxsize=1024)
def _read_once(path: str, _changed: int, size: int, reader: Callable[[str, Path], _Asked]) -> _Asked:
    """A file that cannot be read, or is broken, asks for nothing."""
    if size > _LARGEST_BYTES and reader is not _notebook:
        return _Asked()
    try:
        return reader(Path(path).read_text(encoding="utf-8-sig", errors="replace"), Path(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, configparser.Error):
        return _Asked()


def _reader(name: str) -> Callable[[str, Path], _Asked] | None:
    if name.endswith((".txt", ".in")) and "requirements" in name:
        return _requirements
    if name.endswith((".sh", ".bash")) or "Dockerfile" in name:
        return _shell
    if name.endswith((".yml", ".yaml")) and name.startswith(("environment", "conda", "env.")):
        return _conda
    return _READERS.get(name)


def _requirements(text: str, path: Path, depth: int = 0) -> _Asked:
    asked = _Asked()
    for line in text.splitlines():
        include = re.match(r"\s*(?:-r|--requirement|-c|--constraint)[\s=]+(\S+)", line)
        if include is None:
            if not line.lstrip().startswith(("#", "-")):
                asked.add_text(line)
        elif depth < _DEEPEST_INCLUDE and (other := path.parent / include[1]).is_file():
            asked.take(_requirements(other.read_text(encoding="utf-8", errors="replace"), other, depth + 1))
    return asked


def _pyproject(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    document = tomllib.loads(text)
    project, poetry = document.get("project", {}), document.get("tool", {}).get("poetry", {})
    groups = [
        project.get("dependencies", []), *project.get("optional-dependencies", {}).values(),
        *document.get("dependency-groups", {}).values(), document.get("tool", {}).get("uv", {}).get("dev-dependencies", []),
    ]  # fmt: skip
    _add_all(asked, (each for group in groups for each in group))
    tables = [poetry, *poetry.get("group", {}).values()]
    for table in (each.get(name, {}) for each in tables for name in ("dependencies", "dev-dependencies")):
        _add_table(asked, table)
    asked.add_own(project.get("name"), project.get("version"))
    asked.add_own(poetry.get("name"), poetry.get("version"))
    return asked


def _pipfile(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    document = tomllib.loads(text)
    for name in ("packages", "dev-packages"):
        _add_table(asked, document.get(name, {}))
    return asked


def _pipfile_lock(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    document = json.loads(text)
    for name in ("default", "develop"):
        _add_table(asked, document.get(name, {}))
    return asked


def _lock(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    for package, version in _LOCKED.findall(text):
        asked.add(package, f"=={version}")
    return asked


def _setup_cfg(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    groups = [parser.get("options", "install_requires", fallback="")]
    if parser.has_section("options.extras_require"):
        groups += [value for _name, value in parser.items("options.extras_require")]
    _add_all(asked, "\n".join(groups).splitlines())
    asked.add_own(parser.get("metadata", "name", fallback=None), parser.get("metadata", "version", fallback=None))
    return asked


def _setup_py(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            _add_all(asked, (each.value for each in node.elts if isinstance(each, ast.Constant)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "setup":
            given = {each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)}
            asked.add_own(given.get("name"), given.get("version"))
    return asked


def _conda(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    _add_all(asked, (re.sub(r"^([^=\s]+=[^=\s]+)=\S*$", r"\1", each.strip()) for each in _CONDA.findall(text)))
    return asked


def _shell(text: str, _path: Path) -> _Asked:
    asked = _Asked()
    for line in _INSTALL.finditer(re.sub(r"\\\n", " ", text)):
        words = _WORD.findall(line["words"].partition(" #")[0])
        _add_all(asked, (word.strip("'\"") for word in words if not word.startswith("-")))
    return asked


def _notebook(text: str, path: Path) -> _Asked:
    cells = json.loads(text).get("cells", [])
    sources = (each.get("source", "") for each in cells if each.get("cell_type") == "code")
    return _shell("\n".join("".join(source) if isinstance(source, list) else str(source) for source in sources), path)


def _add_all(asked: _Asked, requirements: Iterable[Any]) -> None:
    for each in requirements:
        if isinstance(each, str):
            asked.add_text(each)


def _add_table(asked: _Asked, table: dict[str, Any]) -> None:
    """`transformers = "^4.36"`, or `{version = "^4.36", extras = [...]}`."""
    for package, wanted in table.items():
        version = wanted.get("version") if isinstance(wanted, dict) else wanted
        if isinstance(version, str):
            asked.add(package, version)


_READERS: Final[dict[str, Callable[[str, Path], _Asked]]] = {
    "pyproject.toml": _pyproject,
    "setup.cfg": _setup_cfg,
    "setup.py": _setup_py,
    "Pipfile": _pipfile,
    "Pipfile.lock": _pipfile_lock,
    "poetry.lock": _lock,
    "uv.lock": _lock,
    "pdm.lock": _lock,
}
