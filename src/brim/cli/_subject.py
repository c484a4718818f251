"""What lies at a path, read for pictures: a run's folder, its ledger, a plan, a probe, an observed run."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from brim.cli._repeating import commands_of
from brim.errors import BrimError, RecordError, UsageError
from brim.locale import _
from brim.pictures.steps import is_long
from brim.pictures.subject import Subject
from brim.record import Record, read_file
from brim.records import Emulation, Evaluation, Measurement, Observation, Plan, RunCard, Verification
from brim.trainer.words import product

if TYPE_CHECKING:
    from brim.records import Finding, Ledger

Kind = TypeVar("Kind", bound=Record)

LEDGER: Final = "ledger.jsonl"
_MOST_BROKEN: Final = 20
_COLUMNS: Final = ("phase", "layer", "allocated_bytes", "reserved_bytes")
_RECORDS: Final[dict[str, type[Record]]] = {
    each.schema: each for each in (Plan, Measurement, RunCard, Observation, Verification, Emulation)
}


def read_subject(path: str | Path) -> Subject:
    """All records that belong together there. What is no record of brim's is an error that says what can be given."""
    given = Path(path)
    try:
        is_folder, is_file = given.is_dir(), given.is_file()
    except (OSError, ValueError) as error:
        raise UsageError(_("Cannot read {path}: {why}.").format(path=given, why=error), hint=_takes()) from error
    if is_folder:
        return _of_folder(given)
    if not is_file:
        raise UsageError(_("There is no file or folder {path}.").format(path=given), hint=_takes())
    if given.suffix == ".jsonl":
        # A ledger in its run's folder has its records beside it.
        return _of_folder(given.parent, given) if given.name == LEDGER else _of_ledger(given)
    return _of_record(given)


def _takes() -> str:
    return _("Give the folder of a run, its ledger.jsonl, or a file of brim plan, probe or emulate (-o writes one).")


def _of_record(path: Path) -> Subject:
    schema = _schema_of(path)
    kind = _RECORDS.get(schema)
    if kind is None:
        raise UsageError(_("{path} holds nothing that a page can be made of.").format(path=path), hint=_takes())
    record = kind.read(path)
    if isinstance(record, RunCard | Observation):
        return _of_folder(path.parent)
    if isinstance(record, Verification):
        return Subject(title=record.model, verification=record, commands=commands_of(verification=record))
    if isinstance(record, Emulation):
        title = _("{command} on {gpu}").format(command=" ".join(record.command), gpu=record.gpu)
        return Subject(title=title, emulation=record, commands=commands_of(emulation=record))
    assert isinstance(record, Plan | Measurement)
    title = _title_of(record)
    if isinstance(record, Plan):
        return Subject(title=title, plan=record, commands=commands_of(plan=record))
    return Subject(title=title, probe=record, commands=commands_of(probe=record))


def _schema_of(path: Path) -> str:
    try:
        document = json.loads(read_file(path))
    except (ValueError, RecursionError):
        return ""
    found = document.get("schema") if isinstance(document, dict) else None
    return found if isinstance(found, str) else ""


def _title_of(record: Plan | Measurement) -> str:
    text = _("{model}: the plan") if isinstance(record, Plan) else _("{model}: what was measured")
    return text.format(model=record.workload.model)


def _of_folder(folder: Path, ledger_file: Path | None = None) -> Subject:
    file = ledger_file or folder / LEDGER
    if not file.is_file() and not (folder / "run.json").is_file():
        for name in ("plan.json", "probe.json"):
            if (folder / name).is_file():
                return _of_record(folder / name)
        raise UsageError(
            _("{path} is not the folder of a run: it holds no run.json and no ledger.").format(path=folder), hint=_takes()
        )
    notes: list[str] = []
    run = _beside(folder / "run.json", RunCard, notes)
    plan = _beside(folder / "plan.json", Plan, notes)
    probe = _beside(folder / "probe.json", Measurement, notes)
    verification = _beside(folder / "verify.json", Verification, notes)
    observation = _beside(folder / "observation.json", Observation, notes)
    ledger = _ledger(file, run, notes)
    findings, mends = _findings(file, ledger, notes)
    return Subject(
        title=run.name if run is not None else _name_of(observation, folder),
        run=run,
        batch=product(run) if run is not None else "",
        plan=plan,
        probe=probe,
        verification=verification,
        observation=observation,
        ledger=ledger,
        evaluations=_evaluations(folder / "evaluations.jsonl", notes),
        timeline=_timeline(folder / "timeline.json", notes),
        findings=findings,
        mends=mends,
        promise=_promise(ledger),
        is_checked=ledger is None or not is_long(ledger),
        commands=commands_of(run=run, plan=plan, probe=probe, verification=verification, observation=observation, folder=folder),
        notes=tuple(notes),
    )


def _of_ledger(file: Path) -> Subject:
    """A ledger by itself, under any name."""
    from brim.step.ledger import read_ledger

    notes: list[str] = []
    ledger = read_ledger(file)
    findings, mends = _findings(file, ledger, notes)
    return Subject(
        title=file.stem, ledger=ledger, findings=findings, mends=mends, promise=_promise(ledger),
        is_checked=not is_long(ledger), commands=commands_of(folder=file), notes=tuple(notes),
    )  # fmt: skip


def _name_of(observation: Observation | None, folder: Path) -> str:
    if observation is not None and observation.script:
        return _("{script}, observed").format(script=observation.script)
    return folder.resolve().name


def _ledger(file: Path, run: RunCard | None, notes: list[str]) -> Ledger | None:
    """A run that has just begun has no line yet; without a card the ledger is all there is, and must be right."""
    from brim.step.ledger import read_ledger

    if not file.is_file():
        return None
    try:
        return read_ledger(file)
    except RecordError as error:
        if run is None:
            raise
        notes.append(error.message)
        return None


def _beside(file: Path, kind: type[Kind], notes: list[str]) -> Kind | None:
    """A record that may be there. A broken one is told on the page: the others are worth showing all the same."""
    if not file.is_file():
        return None
    try:
        return kind.read(file)
    except RecordError as error:
        notes.append(error.message)
        return None


def _evaluations(file: Path, notes: list[str]) -> tuple[Evaluation, ...]:
    """Of two lines of one step the later counts; a torn end is a line that is being written."""
    if not file.is_file():
        return ()
    found: dict[int, Evaluation] = {}
    for number, line in enumerate(read_file(file).splitlines(keepends=True), 1):
        try:
            each = Evaluation.from_json(line, where=_("{path}, line {number}").format(path=file, number=number))
        except RecordError as error:
            if line.endswith(b"\n"):
                notes.append(error.message)
            continue
        found[each.step] = each
    return tuple(found[step] for step in sorted(found))


def _timeline(file: Path, notes: list[str]) -> dict[str, Any] | None:
    """`brim.timeline/1`, if its columns are what they should be."""
    if not file.is_file():
        return None
    try:
        found = json.loads(read_file(file))
        lengths = {len(found[name]) for name in _COLUMNS} | {len(column) for column in found["kind_bytes"].values()}
        numbers = [
            *found["allocated_bytes"],
            *found["reserved_bytes"],
            *(each for column in found["kind_bytes"].values() for each in column),
        ]
        is_right = found["schema"] == "brim.timeline/1" and len(lengths) == 1 and all(type(each) is int for each in numbers)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, BrimError):
        is_right = False
    if is_right:
        return dict(found)
    notes.append(_("{path} is not a timeline of brim's, and is left out.").format(path=file))
    return None


def _promise(ledger: Ledger | None) -> tuple[str, ...]:
    """The first sentences of what is not as promised. Of a long run nothing: reading it all takes minutes."""
    if ledger is None or not ledger.headers or is_long(ledger):
        return ()
    if any(header.observed for header in ledger.headers):
        # The short windows of a watched script are judged by the audit, which knows them from what is wrong.
        return ()
    from brim.step.checker import broken_in

    return tuple(sentence for _place, sentence in islice(broken_in(ledger), _MOST_BROKEN))


def _findings(file: Path, ledger: Ledger | None, notes: list[str]) -> tuple[tuple[Finding, ...], dict[str, str]]:
    """What the doctor says of the run, and how to fix each kind."""
    if ledger is None or is_long(ledger):
        return (), {}
    from brim.audit.patching import Desk
    from brim.audit.publishing import publish_all
    from brim.audit.rules import RULES
    from brim.audit.run.examine import examine_run

    report = examine_run(file, file.name)
    notes += report.notes
    found = publish_all(report.found, {}, Desk({}))
    return found, {each.rule: _(RULES[each.rule].fix) for each in found}
