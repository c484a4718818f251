"""The lines that did it, as far as the source audit knows them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.errors import BrimError
from brim.locale import _
from brim.records.observations import Configured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.source.module import Source
    from brim.audit.source.project import Project
    from brim.audit.source.settings import SetInSource, SetTo
    from brim.records import Finding

BLAMED: Final = (
    "batch-clamped", "batch-hard-coded", "accumulation-clamped", "accumulation-hard-coded", "accumulation-floored", "setting-unused",
    "dead-argument", "auto-batch-drift", "step-every-micro-batch", "zero-grad-misplaced", "last-window-dropped", "drop-last-small",
)  # fmt: skip
"""The rules whose findings change how many sequences are in a step."""
_MOST_FILES: Final = 200
"""A script's folder with more Python files than these is somebody's home rather than a project."""


@dataclass(frozen=True)
class Ran:
    """What was run: the command as it was observed, and the script that trained in it."""

    command: Sequence[str]
    script: Path
    arguments: Sequence[str] = ()
    """The command line of the script's own interpreter."""
    files: Collection[str] = ()
    """The script's files that were imported."""


def project_of(ran: Ran) -> Project | None:
    """The script and what it imports, launched as it was: of other scripts and launchers beside it nothing follows for this run."""
    from brim.audit.source.files import read_project

    try:
        project = read_project([_target(ran), *_launchers_named(ran.command)])
    except BrimError:
        return None
    mine = {ran.script.resolve(), *(Path(each).resolve() for each in ran.files)}
    if ran.files:
        project.modules = [each for each in project.modules if Path(each.source.file).resolve() in mine]
    # First, so that it wins: what a launcher hands over by a flag has come to this line anyway.
    project.shells = [_as_launcher(ran), *_launchers_that_ran(project.shells, ran.command)]
    return project


def with_source(asked: Configured | None, project: Project, ranks: int) -> Configured | None:
    """What was asked for, completed by the script's own settings as they are before its code changes them."""
    if asked is not None and (asked.micro_batch is None or asked.accumulation is not None):
        return asked
    known = _set_in_source(project)
    if known is None:
        return asked
    accumulation = known.accumulation.value if known.accumulation is not None else 1
    if asked is not None and asked.micro_batch is not None:
        if known.accumulation is None:
            return asked
        return replace(
            asked,
            effective_batch=asked.micro_batch * accumulation * ranks,
            accumulation=accumulation,
            source=f"{asked.source}, {known.accumulation.name}",
            where=_where(known.accumulation),
        )
    if known.batch is None:
        return None
    return Configured(
        effective_batch=known.batch.value * accumulation * ranks,
        micro_batch=known.batch.value,
        accumulation=accumulation,
        ranks=ranks,
        source=", ".join(each.name for each in (known.batch, known.accumulation) if each is not None),
        where=_where(known.batch),
    )


def _set_in_source(project: Project) -> SetInSource | None:
    from brim.audit.source.examine import flow_of
    from brim.audit.source.settings import configured

    try:
        return configured(flow_of(project))
    except BrimError:
        return None


def _where(setting: SetTo) -> str | None:
    return None if setting.file == _command_line() else f"{setting.file}:{setting.line}"


def blame(project: Project, ran: Ran) -> tuple[Finding, ...]:
    """The findings that change how many sequences are in a step; where the files are known that ran, only those in them."""
    from brim.audit.ignoring import hold_back
    from brim.audit.patching import Desk
    from brim.audit.publishing import in_order, publish_all
    from brim.audit.source.examine import examine_project

    sources = {each.file: each for each in (*(module.source for module in project.modules), *project.shells)}
    wanted = [
        replace(each, message=_without_line(each.message), is_safe=each.is_safe and _is_beside(each, ran))
        for each in examine_project(project)
        if each.rule in BLAMED and _has_run(each.file, ran.files)
    ]
    kept, _ignored, _remarks = hold_back(in_order(wanted), sources)
    return publish_all(kept, sources, Desk(sources))


def _has_run(file: str, files: Collection[str]) -> bool:
    if file == _command_line():
        return False
    return not files or Path(file).suffix != ".py" or Path(file).resolve() in {Path(each).resolve() for each in files}


def _is_beside(found: Found, ran: Ran) -> bool:
    """Whether `brim doctor --fix` of the script's folder may write there."""
    folder = ran.script.parent.resolve()
    return all(folder in Path(edit.file).resolve().parents for edit in found.edits)


def _target(ran: Ran) -> Path:
    """The folder above the script's package, in which imports are found; the script alone where that is not one project's folder."""
    folder = ran.script.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    count = sum(1 for _path in islice(folder.rglob("*.py"), _MOST_FILES + 1))
    return folder if ran.files and 0 < count <= _MOST_FILES else ran.script


def _as_launcher(ran: Ran) -> Source:
    """The observed command line as a launcher of one line, so that the audit knows what the flags were set to."""
    from brim.audit.source.module import Source

    words = (word.replace("\n", " ") for word in _arguments_of_script(ran))
    return Source(_command_line(), shlex.join(["python", ran.script.name, *words]) + "\n")


def _arguments_of_script(ran: Ran) -> Sequence[str]:
    for place, word in enumerate(ran.arguments):
        if Path(word).name == ran.script.name:
            return ran.arguments[place + 1 :]
        if word == "-m":
            return ran.arguments[place + 2 :]
    return ()


def _launchers_named(command: Sequence[str]) -> list[Path]:
    return [Path(word) for word in command if word.endswith((".sh", ".bash")) and Path(word).is_file()]


def _launchers_that_ran(shells: Sequence[Source], command: Sequence[str]) -> Iterator[Source]:
    """Those that the command names, and those that they call."""
    from brim.audit.source.launchers import logical_lines

    named, left = {path.resolve() for path in _launchers_named(command)}, list(shells)
    called: set[str] = set()
    while mine := [each for each in left if Path(each.file).resolve() in named or Path(each.file).name in called]:
        left = [each for each in left if each not in mine]
        called |= {Path(word).name for each in mine for _line, text in logical_lines(each.text) for word in text.split()}
        yield from mine


def _command_line() -> str:
    """How the audit's sentences name the line that was observed."""
    return _("the command line")


def _without_line(message: str) -> str:
    return message.replace(f"{_command_line()}:1", _command_line())
