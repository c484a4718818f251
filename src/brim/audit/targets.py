"""Which files `brim doctor` audits: the checks of a target, the runs below it, the scripts that a launcher calls."""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.audit.source.module import Source
from brim.errors import UsageError
from brim.locale import _
from brim.record import LARGEST_RECORD_BYTES
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LEDGER: Final = "ledger.jsonl"
SOURCES: Final = frozenset({".py", ".pyw", ".ipynb", ".sh", ".bash"})
CONFIGS: Final = frozenset({".yaml", ".yml", ".json", ".toml"})
_LAUNCHERS: Final = frozenset({".sh", ".bash"})
_OWN_RUNS: Final = "brim-runs"
_PASSED_OVER: Final = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_DEEPEST: Final = 2
_MOST_RUNS: Final = 20
_MOST_FOLDERS: Final = 5000
_MOST_NAMED: Final = 3
_MOST_SCRIPTS: Final = 20
_RECORD: Final = re.compile(r'\s*\{\s*"schema"\s*:\s*"brim\.')
_SCRIPT: Final = re.compile(r"[\w./-]+\.(?:py|sh|bash)\b")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*")
_LOOKED_AT_BYTES: Final = 8192
_MOST_TEXT_BYTES: Final = 4 << 20
_MOST_BYTES: Final = {".ipynb": LARGEST_RECORD_BYTES, ".jsonl": math.inf}
"""Exceptions: notebooks contain pictures, and ledgers are read line by line."""


def existing(given: str | Path) -> Path:
    """The target, or an error that says what can be given."""
    target = Path(given)
    try:
        if target.is_dir() and str(given).strip():
            return target
        if not target.exists() or not str(given).strip():
            raise UsageError(_("No such file or folder: {path}.").format(path=str(given) or "''"), hint=accepted_kinds())
        if not target.is_file() or target.suffix not in SOURCES | CONFIGS | {".jsonl"}:
            raise UsageError(_("{path} is not a file that doctor can audit.").format(path=target), hint=accepted_kinds())
        most, size = _MOST_BYTES.get(target.suffix, _MOST_TEXT_BYTES), target.stat().st_size
        if size > most:
            text = _("{path} has {size}; doctor reads scripts and configs of up to {most}.")
            raise UsageError(
                text.format(path=target, size=format_bytes(size), most=format_bytes(int(most))), hint=accepted_kinds()
            )
        with target.open("rb") as stream:
            start = stream.read(_LOOKED_AT_BYTES)
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        why = getattr(error, "strerror", None) or error
        raise UsageError(_("Cannot read {path}: {why}.").format(path=target, why=why), hint=accepted_kinds()) from error
    if b"\0" in start:
        raise UsageError(_("{path} is not a text file.").format(path=target), hint=accepted_kinds())
    if target.suffix == ".ipynb":
        _refuse_no_notebook(target)
    return target


def _refuse_no_notebook(target: Path) -> None:
    """Whether its cells hold valid Python is another question."""
    from brim.audit.source.files import notebook

    try:
        notebook(str(target), target.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(_("{path} cannot be read as a notebook: {why}.").format(path=target, why=error)) from error


def accepted_kinds() -> str:
    """What a target can be."""
    return _("Give a Python file, a notebook, a launcher (.sh), a config (.yaml, .json), a ledger (.jsonl), or a folder of them.")


@dataclass(frozen=True)
class Run:
    """A ledger, and whether the user named it or we came upon it."""

    file: Path
    is_named: bool


@dataclass
class Runs:
    """The ledgers of all targets."""

    found: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _folders: set[Path] = field(default_factory=set)
    """Output folders of runs: what lies in them is a record of what was, and no config."""

    @classmethod
    def of(cls, targets: Iterable[Path]) -> Runs:
        """The ledgers that were named, and those in folders that were named, up to two levels down."""
        runs = cls()
        for target in targets:
            if is_only_a_run(target):
                runs._add(target / LEDGER if target.is_dir() else target, is_named=True)
            if target.is_dir():
                runs._look_below(target)
        return runs

    def holds(self, config: Source) -> bool:
        """Whether a file that could be a config is a record of a run."""
        if _RECORD.match(config.text):
            return True
        return not self._folders.isdisjoint(Path(config.file).resolve().parents)

    def _add(self, file: Path, *, is_named: bool) -> None:
        if all(file.resolve() != run.file.resolve() for run in self.found):
            self.found.append(Run(file, is_named))

    def _look_below(self, target: Path) -> None:
        near, far, is_all = _ledgers_below(target)
        newest = sorted(near, key=_changed_at, reverse=True)
        for file in sorted(newest[:_MOST_RUNS]):
            self._add(file, is_named=False)
        self._folders |= {folder.resolve() for folder in (*(file.parent for file in near), *far) if is_only_a_run(folder)}
        left = [*(file.parent for file in newest[_MOST_RUNS:]), *far]
        if left:
            command = shlex.join(["brim", "doctor", *map(str, left[:_MOST_NAMED])]) + (" ..." if left[_MOST_NAMED:] else "")
            text = _("Not every run in {folder} was audited. To audit the others: `{command}`")
            self.notes.append(text.format(folder=repr(str(target)), command=command))
        if not is_all:
            text = _("Only the first {count} folders of {folder} were searched for runs.")
            self.notes.append(text.format(count=_MOST_FOLDERS, folder=repr(str(target))))


def is_only_a_run(target: Path) -> bool:
    """A ledger, or the output folder of a run: its JSON files are no configs of ours. A project that has a ledger in it is both."""
    if not target.is_dir():
        return target.suffix == ".jsonl"
    return (target / LEDGER).is_file() and not any(path.suffix in SOURCES for path in target.iterdir())


def with_launched(targets: Sequence[Path], notes: list[str]) -> list[Path]:
    """The targets, and behind them the scripts that launchers among them call: a value that is handed over says nothing alone."""
    found = list(targets)
    seen = {target.resolve() for target in targets}
    waiting = [target for target in targets if target.suffix in _LAUNCHERS]
    while waiting:
        for path in _called(waiting.pop(0), notes):
            if path.resolve() not in seen and len(found) < len(targets) + _MOST_SCRIPTS:
                seen.add(path.resolve())
                found.append(path)
                waiting += [path] if path.suffix in _LAUNCHERS else []
    return found


def _ledgers_below(target: Path) -> tuple[list[Path], list[Path], bool]:
    """Ledgers near enough to be looked at, folders of others, and whether every folder was seen."""
    near: list[Path] = []
    far: list[Path] = []
    for seen, (name, folders, files) in enumerate(os.walk(target)):
        here = Path(name)
        depth = len(here.relative_to(target).parts)
        if seen == _MOST_FOLDERS:
            return near, far, False
        if _OWN_RUNS in folders and any((here / _OWN_RUNS).glob(f"*/{LEDGER}")):
            far.append(here / _OWN_RUNS)
        folders[:] = sorted(each for each in folders if not _is_passed_over(here / each))
        if LEDGER in files and (here / LEDGER).is_file():
            if depth <= _DEEPEST:
                near.append(here / LEDGER)
            else:
                far.append(here)
    return near, far, True


def _is_passed_over(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in {_OWN_RUNS, *_PASSED_OVER} or (folder / "pyvenv.cfg").exists()


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _called(launcher: Path, notes: list[str]) -> Iterator[Path]:
    """The scripts that a launcher calls, where they lie beside it or below the folder that we are in."""
    from brim.audit.source.files import shown
    from brim.audit.source.launchers import launches_of

    try:
        text = launcher.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # whoever reads it as source says so
    words = list(dict.fromkeys(_SCRIPT.findall("\n".join(_COMMENT.sub("", line) for line in text.splitlines()))))
    yield from (path for word in words if Path(word).suffix in _LAUNCHERS and (path := _lying(launcher, [word])) is not None)
    for script in dict.fromkeys(launch.script for launch in launches_of([Source(str(launcher), text)]).found):
        stem = script.replace(".", "/")
        spelt = [word for word in words if Path(word).name == script]
        path = _lying(launcher, [*spelt, script] if script.endswith(".py") else [f"{stem}.py", f"{stem}/__main__.py"])
        if path is not None:
            yield path
        else:
            note = _("{file} calls {script}, which is neither in its folder nor in the current one, and was not read.")
            notes.append(note.format(file=shown(launcher), script=script))


def _lying(launcher: Path, names: Iterable[str]) -> Path | None:
    places = (base / name for name in names for base in (launcher.parent, Path()))
    return next((place for place in places if place.is_file()), None)
