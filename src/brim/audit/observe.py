"""`brim observe`: what batch is really in force in somebody else's script.

The command runs as it would without brim: in its own interpreter, with its own input and output. A small observer is put into that
interpreter by PYTHONPATH (observer/), writes down what enters the model and when the optimizer steps, and brim makes a ledger of it
(observing/).
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from brim.audit.observing.blaming import blame, diagnosis_of, with_source
from brim.audit.observing.following import Follower
from brim.audit.observing.running import run
from brim.audit.observing.telling import observation
from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from brim.records.observations import Observation

EVENTS = "events"
OBSERVATION = "observation.json"


def observe(
    command: Sequence[str],
    *,
    output: str | Path | None = None,
    configured: int | None = None,
    source: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Observation:
    """Run a command and say what it trained with.

    `output` is the folder for the ledger and the record (default: `brim-runs/SCRIPT-TIME`); `configured` the sequences per optimizer step
    that the script was asked for, where it cannot say so itself; `source=False` leaves the source audit out; `environment` takes the
    place of this process's. The command's output goes where ours goes, and its exit code is in the record.
    """
    words = [str(word) for word in command]
    if not words:
        raise UsageError(
            _("There is no command to observe."), hint=_("Write it after two dashes: brim observe -- python train.py")
        )
    if configured is not None and configured < 1:
        raise UsageError(_("An effective batch of {count} is none.").format(count=configured))
    folder = _made(Path(output) if output is not None else _folder_of(words))
    events = folder.resolve() / EVENTS
    follower = Follower(folder, events, configured)
    started_at, began = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    exit_code = run(words, events, follower.look, environment)
    reason = "" if exit_code == 0 else _("The command ended with exit code {code}.").format(code=exit_code)
    follower.end(finished=exit_code == 0, reason=reason)
    main = follower.main()
    found = observation(
        follower, words, started_at=started_at, seconds=time.monotonic() - began, exit_code=exit_code,
        configured=main.configured(configured) if main is not None else None,
    )  # fmt: skip
    if source:
        found = _with_source(found, main.run.first.identity.get("files", ()) if main is not None else ())
    found.write(folder / OBSERVATION)
    return found


def _with_source(found: Observation, files: Collection[str]) -> Observation:
    """What the script's source says: what it was asked for, and which lines change that."""
    script = Path(found.script) if found.script else None
    if script is None or found.in_force is None or not script.is_file():
        return found
    try:
        asked = with_source(found.configured, script, found.in_force.ranks)
    except Exception as error:  # noqa: BLE001 (as below)
        return replace(found, notes=(*found.notes, _unaudited(error)))
    found = replace(found, configured=asked)
    micro = found.in_force.micro_batch if found.in_force is not None else None
    if asked is not None and not found.differs and asked.micro_batch in (None, micro):
        return found
    try:
        diagnosis = diagnosis_of(script)
    except Exception as error:  # noqa: BLE001 (hours of observation are not lost to a defect of another part)
        return replace(found, notes=(*found.notes, _unaudited(error)))
    return found if diagnosis is None else replace(found, blamed=tuple(blame(diagnosis, files)))


def _unaudited(error: Exception) -> str:
    return _("The source could not be audited: {why}.").format(why=f"{type(error).__name__}: {error}")


def _folder_of(command: Sequence[str]) -> Path:
    """`brim-runs/SCRIPT-TIME`, of its own also where two start in the same second."""
    name = next((Path(word).stem for word in command if word.endswith(".py")), None)
    if name is None and "-m" in command[:-1]:
        name = command[list(command).index("-m") + 1]
    name = re.sub(r"[^\w.-]+", "-", name or Path(command[0]).name).strip("-.") or "run"
    stem = Path("brim-runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, place = stem, 1
    while folder.exists():
        place += 1
        folder = stem.with_name(f"{stem.name}-{place}")
    return folder


def _made(folder: Path) -> Path:
    """The output folder, which must not hold another run."""
    try:
        (folder / EVENTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(_("Cannot write {path}: {why}.").format(path=folder, why=error.strerror or error)) from error
    if (folder / OBSERVATION).exists() or any(folder.glob("ledger*.jsonl")) or any((folder / EVENTS).iterdir()):
        raise UsageError(
            _("{path} holds another run.").format(path=folder), hint=_("Take another output folder, or leave -o out.")
        )
    return folder
