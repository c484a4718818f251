"""`brim doctor RUN`: everything that a ledger says about the run that wrote it. A pure view of one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from brim.audit.found import Found
from brim.audit.run import batch, loading, loss, memory, promises, speed
from brim.audit.run.noise import NoiseScale
from brim.audit.run.reading import FEWEST_STEPS, Run, read_run
from brim.locale import _
from brim.planner.loss_curve import Verdict
from brim.step.arguments import ledger_file
from brim.step.ledger import read_ledger


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
    file = ledger_file(path) if Path(path).is_dir() else Path(path)
    assert file is not None
    run = read_run(read_ledger(file), shown)
    found = list(promises.check(run, promises.observation_of(file)))
    if len(run.columns) < FEWEST_STEPS:
        return _report(run, found, None, None)
    verdict, scale = loss.verdict_of(run), batch.noise_of(run)
    for check in (loading.check, memory.check, speed.check):
        found += check(run)
    found += loss.check(run, verdict)
    found += batch.check(run, scale)
    return _report(run, found, verdict, scale)


def _report(run: Run, found: list[Found], verdict: Verdict | None, scale: NoiseScale | None) -> RunReport:
    settled = run.settled if len(run.settled) else run.columns
    return RunReport(
        found=found,
        notes=[f"{run.shown}: {note}" for note in _notes(run, scale)],
        steps=len(run.columns),
        tokens_per_second=speed.per_second(settled, settled.tokens),
        sequences_per_second=speed.per_second(settled, settled.sequences),
        wait_share=loading.wait_share(settled),
        peak_bytes=memory.peak_bytes(run),
        limit_bytes=run.headers[-1].memory_limit_bytes if run.headers else None,
        splits=int(run.columns.splits.sum()),
        loss=verdict,
        noise=scale,
    )


def _notes(run: Run, scale: NoiseScale | None) -> list[str]:
    ledger, steps = run.ledger, len(run.columns)
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
    if steps >= FEWEST_STEPS and loading.device_is_busy(run) and (loading.wait_share(run.settled) or 0.0) >= loading.WAITS:
        notes.append(_("Steps wait for data, and the device is busy all the same: its queue is long enough."))
    told = batch.note_of(run, scale)
    return [*notes, told] if told else notes
