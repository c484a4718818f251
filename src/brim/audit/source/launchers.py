"""Shell launchers: which values they hand to which script, by flag, by place or by environment variable.

`train.sh 64` with `python train.py --batch-size "$1"` inside sets the script's flag. Shell is followed as far as launchers go:
assignments, `${1:-8}`, exports, lines continued by a backslash, one script that calls another. Nothing is run.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.source.module import Module, Source

_ASSIGNED = re.compile(
    r"^\s*(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)?)?(?P<name>\w+)=(?P<value>\([^)]*\)|(?:\"[^\"]*\"|'[^']*'|\S)*)"
)
_VARIABLE = re.compile(r"\$\{(?P<braced>\w+)(?::?[-=](?P<default>[^}]*))?\}|\$(?P<plain>\w)|\$(?P<word>[A-Za-z_]\w*)")
_MOST_DEPTH = 4


@dataclass(frozen=True)
class Launched:
    """A value that a launcher hands over."""

    value: Any
    file: str
    line: int
    text: str = ""
    """As the launcher says it: `$1`, `${BATCH:-8}`, 64."""


@dataclass(frozen=True)
class Launch:
    """One call of a Python script in a launcher."""

    script: str
    """The last part of its path, or the module's dotted name after -m."""
    file: str
    line: int
    flags: dict[str, Launched] = field(default_factory=dict)
    places: tuple[Launched, ...] = ()
    environment: dict[str, Launched] = field(default_factory=dict)


@dataclass
class Launches:
    """All of a project."""

    found: list[Launch] = field(default_factory=list)

    def value_of(self, name: str, module: Module) -> Launched | None:
        """What a launcher sets a flag, `argv[1]` or an environment variable to, for the script or for whatever it imports."""
        ordered = sorted(self.found, key=lambda each: not _is_for(each, module))
        for launch in ordered:
            place = re.fullmatch(r"argv\[(\d+)\]", name)
            if place is not None:
                index = int(place[1]) - 1
                if _is_for(launch, module) and 0 <= index < len(launch.places):
                    return launch.places[index]
                continue
            known = launch.flags.get(name.replace("-", "_")) or launch.environment.get(name)
            if known is not None:
                return known
        return None


def _is_for(launch: Launch, module: Module) -> bool:
    return launch.script in {PurePath(module.source.file).name, module.name}


def launches_of(shells: list[Source]) -> Launches:
    """Every script that the launchers call, with what they hand over."""
    by_name = {PurePath(each.file).name: each for each in shells}
    called = {name: args for shell in shells for name, args in _shells_called(shell, by_name)}
    found = Launches()
    for shell in shells:
        arguments = called.get(PurePath(shell.file).name, ())
        found.found += _launches(shell, arguments)
    return found


def _shells_called(shell: Source, by_name: dict[str, Source]) -> Iterator[tuple[str, tuple[Launched, ...]]]:
    """Launchers that a launcher calls, with their arguments: `bash train.sh 64`."""
    for number, line in logical_lines(shell.text):
        words = _words(line)
        for index, word in enumerate(words):
            name = PurePath(word).name
            if name in by_name and by_name[name] is not shell:
                yield name, tuple(Launched(_number(each), shell.file, number, each) for each in words[index + 1 :])


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a script, continued ones joined, with the number of the first."""
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start or number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        yield start, pending + line
        pending, start = "", 0
    if pending:
        yield start, pending


def _launches(shell: Source, arguments: tuple[Launched, ...]) -> Iterator[Launch]:
    variables: dict[str, Launched] = {str(index): each for index, each in enumerate(arguments, start=1)}
    exported: dict[str, Launched] = {}
    for number, line in logical_lines(shell.text):
        plain = line.split(" #")[0]
        match = _ASSIGNED.match(plain)
        if match is not None:
            value = _expand(match["value"].strip("\"'"), variables, shell.file, number)
            variables[match["name"]] = value
            if plain.lstrip().startswith("export"):
                exported[match["name"]] = value
            plain = plain[match.end() :]
            inline = {match["name"]: value}
            while (match := _ASSIGNED.match(plain)) is not None:
                inline[match["name"]] = _expand(match["value"].strip("\"'"), variables, shell.file, number)
                plain = plain[match.end() :]
        else:
            inline = {}
        launch = _launch(_spread(_words(plain), variables), variables, {**exported, **inline}, shell.file, number)
        if launch is not None:
            yield launch


_SPREAD = re.compile(r"\$\{?(\w+)(\[[@*]\])?\}?")


def _spread(words: list[str], variables: dict[str, Launched]) -> list[str]:
    """`"${ARGS[@]}"` and `$OPTS`, whose value is several words, as those words."""
    found: list[str] = []
    for word in words:
        match = _SPREAD.fullmatch(word)
        known = variables.get(match[1]) if match is not None else None
        text = known.value if known is not None and isinstance(known.value, str) else ""
        found += _words(text.strip("()")) if " " in text else [word]
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _launch(
    words: list[str], variables: dict[str, Launched], environment: dict[str, Launched], file: str, line: int
) -> Launch | None:
    for index, word in enumerate(words):
        if word.endswith(".py"):
            script, rest = PurePath(word).name, words[index + 1 :]
            break
        if (
            word == "-m"
            and index + 1 < len(words)
            and index
            and "python" in words[index - 1]
            and not words[index + 1].startswith("torch")
        ):
            script, rest = words[index + 1], words[index + 2 :]
            break
    else:
        return None
    flags: dict[str, Launched] = {}
    places: list[Launched] = []
    waiting: str | None = None
    for word in rest:
        if word in {"|", "&&", "||", ";", "&", ">", "2>&1", "\\"}:
            break
        if re.match(r"^--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            waiting = None if equals else name.replace("-", "_")
            if equals:
                flags[name.replace("-", "_")] = _expand(value, variables, file, line)
        elif re.match(r"^\+?[\w.]+=\S", word):  # hydra: train.batch_size=64
            name, _equals, value = word.lstrip("+").partition("=")
            flags[name.rpartition(".")[2]] = _expand(value, variables, file, line)
        elif waiting is not None:
            flags[waiting], waiting = _expand(word, variables, file, line), None
        else:
            places.append(_expand(word, variables, file, line))
    return Launch(script, file, line, flags, tuple(places), environment)


def _expand(text: str, variables: dict[str, Launched], file: str, line: int, depth: int = 0) -> Launched:
    """A word with its variables put in; a value that is only an argument of the launcher stays open."""
    match = _VARIABLE.fullmatch(text.strip("\"'"))
    if match is None or depth > _MOST_DEPTH:
        return Launched(_number(text), file, line, text)
    name = match["braced"] or match["plain"] or match["word"]
    known = variables.get(name)
    if known is not None and known.value is not None:
        return Launched(known.value, known.file, known.line, text)
    if match["default"]:
        return _expand(match["default"], variables, file, line, depth + 1)
    return Launched(None, file, line, text)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None if text.startswith("$") else text
