"""`brim doctor RUN`: everything that a ledger says about the run that wrote it. A pure view of one file.

Without numpy, as in the base installation, the steps are compared with what was promised, and no figures are made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from brim.audit.found import Found
from brim.audit.run import promises
from brim.audit.run.reading import FEWEST_STEPS, Run, read_run
from brim.extras import INSTALL, missing
from brim.locale import _
from brim.planner.loss_curve import Verdict
from brim.step.ledger import LEDGER, read_ledger

if TYPE_CHECKING:
    from brim.audit.run.noise import NoiseScale  # noqa: TC004 (its module needs numpy, and nothing evaluates the annotation)
    from brim.records import Ledger
    from brim.records.observations import Observation


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What was found, what could not be said, and the figures that a view shows. None: not known."""

    found: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    tokens_per_second: float | None = None
    """Real tokens, since the run last moved to another machine and has settled."""
    sequences_per_second: float | None = None
    wait_share: float | None = None
    """Waiting for data, as a share of the time in steps."""
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    splits: int = 0
    loss: Verdict | None = None
    noise: NoiseScale | None = None


def examine_run(path: Path, shown: str) -> RunReport:
    """Audit a ledger: the file, or the folder of a run. `shown` is how the file is named in findings."""
    file = Path(path) / LEDGER if Path(path).is_dir() else Path(path)
    ledger = read_ledger(file)
    observation = promises.observation_of(file)
    if missing("numpy"):
        return _promises_only(read_run(ledger, shown), observation)
    return _with_figures(ledger, shown, observation)


def _promises_only(run: Run, observation: Observation | None) -> RunReport:
    notes = _notes(run)
    if len(run) >= FEWEST_STEPS:
        text = _("Speed, memory, loss and noise are not judged by the base installation. To judge them: {command}")
        notes.append(text.format(command=INSTALL))
    return RunReport(
        found=list(promises.check(run, observation)),
        notes=_named(run, notes),
        steps=len(run),
        limit_bytes=run.headers[-1].memory_limit_bytes if run.headers else None,
        splits=int(sum(run.numbers["splits"])),
    )


def _with_figures(ledger: Ledger, shown: str, observation: Observation | None) -> RunReport:
    from brim.audit.run import batch, loading, loss, memory, noise, speed  # they need numpy

    run = read_run(ledger, shown, noise.of_entry)
    found = list(promises.check(run, observation))
    verdict = scale = None
    if len(run) >= FEWEST_STEPS:
        verdict, scale = loss.verdict_of(run), batch.noise_of(run)
        for check in (loading.check, memory.check, speed.check):
            found += check(run)
        found += loss.check(run, verdict)
        found += batch.check(run, scale)
    notes = _notes(run)
    if len(run) >= FEWEST_STEPS and loading.device_is_busy(run) and (loading.wait_share(run.settled) or 0.0) >= loading.WAITS:
        notes.append(_("Steps wait for data, and the device is busy all the same: its queue is long enough."))
    told = batch.note_of(run, scale)
    settled = run.settled if len(run.settled) else run.columns
    return RunReport(
        found=found,
        notes=_named(run, [*notes, told] if told else notes),
        steps=len(run),
        tokens_per_second=speed.per_second(settled, settled.tokens),
        sequences_per_second=speed.per_second(settled, settled.sequences),
        wait_share=loading.wait_share(settled),
        peak_bytes=memory.peak_bytes(run),
        limit_bytes=run.headers[-1].memory_limit_bytes if run.headers else None,
        splits=int(run.columns.splits.sum()),
        loss=verdict,
        noise=scale,
    )


def _notes(run: Run) -> list[str]:
    """What the ledger itself says, without figures."""
    ledger, steps = run.ledger, len(run)
    notes = []
    if steps < FEWEST_STEPS:
        text = _("There are too few steps ({steps}) to judge speed, memory and loss: {least} are needed.")
        notes.append(text.format(steps=steps, least=FEWEST_STEPS))
    if ledger.torn:
        notes.append(_("The last line is not whole: the run was killed in the middle of writing it, or is writing it now."))
    if ledger.summary is None:
        notes.append(_("There is no summary: the run goes on, or was killed."))
    elif not ledger.summary.finished:
        text = _("The run ended early, after step {step}: {reason}")
        notes.append(text.format(step=ledger.summary.last_step, reason=ledger.summary.reason))
    if any(header.observed for header in run.headers):
        notes.append(_("The run was only watched: how many sequences each step took is known, and not which."))
    return notes


def _named(run: Run, notes: list[str]) -> list[str]:
    return [f"{run.shown}: {note}" for note in notes]
