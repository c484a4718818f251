"""`brim observe`: what batch is really in force in somebody else's script.

The command runs as it would without brim: in its own interpreter, with its own input and output. A small observer is put into that
interpreter by PYTHONPATH (observer/), writes down what enters the model and when the optimizer steps, and brim makes a ledger of it
(observing/).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.audit.observing.blaming import Ran, blame, project_of, with_source
from brim.audit.observing.following import Follower
from brim.audit.observing.telling import observation
from brim.errors import BrimError, UsageError
from brim.locale import _
from brim.machine.foreground import run_foreground
from brim.records.observations import OBSERVATION_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from brim.audit.observing.following import Followed
    from brim.records.observations import Observation

EVENTS = "events"
_OBSERVER = Path(__file__).parent / "observer" / "path"
"""The folder that Python searches first, for its `sitecustomize`."""


def observe(
    command: Sequence[str],
    *,
    output: str | Path | None = None,
    effective_batch: int | None = None,
    source: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Observation:
    """Run a command and say what it trained with.

    `command` is a list of words: `["python", "train.py", "--lr", "1e-4"]`. `output` is the folder for the ledger and the record (default:
    `brim-runs/SCRIPT-TIME`); `effective_batch` the sequences per optimizer step that the script was asked for, where it cannot say so
    itself; `source=False` leaves the source audit out; `environment` takes the place of this process's. The command's output goes where
    ours goes, and its exit code is in the record.
    """
    words = _words(command)
    if effective_batch is not None and effective_batch < 1:
        raise UsageError(_("An effective batch of {count} is none.").format(count=effective_batch))
    folder = _made(Path(output) if output is not None else _folder_of(words))
    events = folder.resolve() / EVENTS
    follower = Follower(folder, events, effective_batch)
    hint = _("Write the command as you would without brim: brim observe -- python train.py")
    exit_code = run_foreground(words, surroundings(events, environment), hint=hint, look=follower.look)
    reason = "" if exit_code == 0 else _("The command ended with exit code {code}.").format(code=exit_code)
    follower.end(finished=exit_code == 0, reason=reason)
    main = follower.main()
    found = observation(
        follower, words, exit_code=exit_code, configured=main.configured(effective_batch) if main is not None else None
    )
    if source and main is not None:
        found = _with_source(found, main)
    return _written(_printable(found), folder / OBSERVATION_FILE)


def surroundings(events: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The command's environment: ours, with the observer's folder first on PYTHONPATH and the folder for its events."""
    given = dict(os.environ if environment is None else environment)
    # An empty entry would mean the working folder.
    path = os.pathsep.join(filter(None, (str(_OBSERVER), given.get("PYTHONPATH"))))
    return {**given, "PYTHONPATH": path, "BRIM_OBSERVE": str(events)}


def _written(found: Observation, path: Path) -> Observation:
    """Also where it cannot be: the command has run, and what was seen is told."""
    try:
        found.write(path)
    except (OSError, BrimError) as error:
        why = (
            error.message
            if isinstance(error, BrimError)
            else _("Cannot write {path}: {why}.").format(path=path, why=error.strerror)
        )
        return replace(found, notes=(*found.notes, why))
    return found


def _printable(value: Any) -> Any:
    """The same with a question mark for each byte that is no letter: names of files may hold such, and a record may not."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, tuple):
        return tuple(_printable(each) for each in value)
    if isinstance(value, dict):
        return {_printable(name): _printable(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _printable(getattr(value, each.name)) for each in fields(value) if each.init})
    return value


def _words(command: Sequence[str]) -> list[str]:
    if isinstance(command, str):
        raise UsageError(
            _("observe takes the command as a list of words, and {command!r} is one string.").format(command=command),
            hint=_("Use {call}.").format(call=f"brim.observe({command.split()})"),
        )
    words = [str(word) for word in command]
    if not words:
        raise UsageError(
            _("There is no command to observe."), hint=_("Write it after two dashes: brim observe -- python train.py")
        )
    return words


def _with_source(found: Observation, main: Followed) -> Observation:
    """What the script's source says: what it was asked for, and which lines change that."""
    script = Path(found.script) if found.script else None
    if script is None or found.in_force is None or not script.is_file():
        return found
    opening, identity = main.run.first.opening, main.run.first.identity
    ran = Ran(found.command, script, opening.get("argv", ()), identity.get("files", ()))
    try:
        project = project_of(ran)
        if project is None:
            return found
        asked, batch = with_source(found.configured, project, found.in_force.ranks), found.in_force
        found = replace(found, configured=asked)
        if asked is not None and not found.differs and asked.micro_batch in (None, batch.micro_batch):
            return found
        return replace(found, blamed=blame(project, ran))
    except Exception as error:  # noqa: BLE001 (hours of observation are not lost to a defect of another part)
        return replace(found, notes=(*found.notes, _unaudited(error)))


def _unaudited(error: Exception) -> str:
    return _("The source could not be audited: {why}.").format(why=f"{type(error).__name__}: {error}")


def _folder_of(command: Sequence[str]) -> Path:
    """`brim-runs/SCRIPT-TIME`, of its own also where two start in the same second."""
    name = next((Path(word).stem for word in command if word.endswith(".py")), None)
    if name is None and "-m" in command[:-1]:
        name = command[list(command).index("-m") + 1]
    name = re.sub(r"[^\w.-]+", "-", name or Path(command[0]).name).strip("-.") or "run"
    stem = _runs() / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, place = stem, 1
    while folder.exists():
        place += 1
        folder = stem.with_name(f"{stem.name}-{place}")
    return folder


def _runs() -> Path:
    """`brim-runs`; where it is made here, with a word to git that what lies in it is nobody's source."""
    folder = Path("brim-runs")
    if not folder.exists():
        with suppress(OSError):  # told when the run's own folder is made
            folder.mkdir()
            (folder / ".gitignore").write_text("*\n")
    return folder


def _made(folder: Path) -> Path:
    """The output folder, which must not hold another run."""
    try:
        (folder / EVENTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(_("Cannot write {path}: {why}.").format(path=folder, why=error.strerror or error)) from error
    if (folder / OBSERVATION_FILE).exists() or any(folder.glob("ledger*.jsonl")) or any((folder / EVENTS).iterdir()):
        raise UsageError(
            _("{path} holds another run.").format(path=folder), hint=_("Take another output folder, or leave -o out.")
        )
    return folder
