"""First of all: what this is, and whether the promise was kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from brim.locale import _, sentences
from brim.pictures import words
from brim.pictures.emulation_words import verdict_of
from brim.pictures.markup import Html, join, tag
from brim.pictures.parts import Section, facts, listed
from brim.workload.settings import method_words

if TYPE_CHECKING:
    from brim.pictures.steps import Steps
    from brim.pictures.subject import Subject
    from brim.records import Candidate, Emulation, Measurement, Plan

_MOST_BROKEN: Final = 8
_BROKEN: Final = "run-promise-broken"
"""The audit's rule."""


@dataclass(frozen=True)
class Verdict:
    """A headline, what stands behind it, and how it looks: good, bad or care."""

    look: str
    headline: str
    texts: list[str] = field(default_factory=list)
    lines: tuple[str, ...] = ()


def verdict_section(subject: Subject, steps: Steps | None) -> Section:
    """Promise against fact, then the facts."""
    if subject.ledger is not None and steps is not None:
        found = _of_run(subject, steps)
    elif subject.run is not None:
        found = Verdict("care", _("No step has been taken yet."), [_("The run is prepared; its ledger is not there.")])
    elif subject.probe is not None:
        found = _of_probe(subject.probe)
    elif subject.plan is not None:
        found = _of_plan(subject.plan)
    elif subject.emulation is not None:
        found = _of_emulation(subject.emulation)
    else:
        found = Verdict("care", _("There is nothing to judge."))
    mark = {"good": "✓", "bad": "✗", "care": "!"}[found.look]
    box = tag(
        "div", tag("strong", f"{mark} {found.headline}"), *(tag("p", each) for each in found.texts if each), listed(found.lines),
        class_=f"verdict {found.look}",
    )  # fmt: skip
    title = _("Promise against fact") if subject.ledger is not None else _("In short")
    return Section("verdict", title, join([_not_in_force(subject), box, facts(_facts(subject, steps))]))


def _not_in_force(subject: Subject) -> Html | None:
    """What was asked for and is not honoured is told before everything else."""
    if subject.run is None or not subject.run.not_in_force:
        return None
    return tag("div", tag("strong", _("! Asked for, and not in force")), listed(subject.run.not_in_force), class_="verdict care")


def _of_run(subject: Subject, steps: Steps) -> Verdict:
    assert subject.ledger is not None
    if not len(steps):
        return Verdict("care", _("No step has been taken yet."), [_("The ledger has its header, and no line of a step.")])
    texts = [_ended(subject, steps), *_memory_texts(subject, steps)]
    kept, broken = steps.is_kept.count(True), steps.is_kept.count(False)
    if steps.stride > 1:
        text = _(
            "The run is long: one step in {stride} was looked at, and what is said here is about those. `brim doctor` reads them all."
        )
        texts.insert(0, text.format(stride=steps.stride))
    if any(header.observed for header in subject.ledger.headers):
        return _of_watched(subject, kept, broken, texts)
    if subject.promise or broken:
        return Verdict("bad", _("The promise was broken."), [_how_many(broken, kept), *texts], subject.promise[:_MOST_BROKEN])
    headline = _("The promise was kept.") if steps.stride == 1 else _("The promise was kept in every step that was looked at.")
    text = _("{count} steps took exactly the sequences that were promised, each once.")
    if steps.stride == 1:
        text = _("All {count} steps took exactly the sequences that were promised, each once.")
    return Verdict("good", headline, [text.format(count=words.count(kept)), *texts])


def _of_watched(subject: Subject, kept: int, broken: int, texts: list[str]) -> Verdict:
    """A script that is not brim's: how many sequences a step took is known, and not which."""
    if not kept and not broken:
        text = _("The script was only watched, and nobody said how many sequences a step should take.")
        return Verdict("care", _("There was no promise to be kept."), [text, *texts])
    if not broken:
        text = _("The steps, {count} of them, took as many sequences as was asked for. Which ones they were is not known.")
        return Verdict("good", _("The batch that was asked for was in force."), [text.format(count=words.count(kept)), *texts])
    if subject.is_checked and not any(finding.rule == _BROKEN for finding in subject.findings):
        text = _(
            "{broken} of {count} steps took fewer sequences than was asked for, which is usual for the last step of an epoch."
        )
        text = text.format(broken=words.count(broken), count=words.count(kept + broken))
        return Verdict("care", _("The batch that was asked for was in force, but for short steps."), [text, *texts])
    return Verdict("bad", _("The batch that was asked for was not in force."), [_how_many(broken, kept), *texts])


def _how_many(broken: int, kept: int) -> str:
    if not broken:
        return ""
    text = _("{broken} of {count} steps did not take what was promised.")
    return text.format(broken=words.count(broken), count=words.count(kept + broken))


def _ended(subject: Subject, steps: Steps) -> str:
    assert subject.ledger is not None
    summary = subject.ledger.summary
    last = words.count(steps.step[-1])
    if summary is None:
        total = subject.run.total_steps if subject.run is not None else None
        if total is None:
            return _("It goes on, or was killed: the last line is that of step {step}.").format(step=last)
        text = _("It goes on, or was killed: the last line is that of step {step} of {total}.")
        return text.format(step=last, total=words.count(total))
    if not summary.finished:
        text = _("It ended early, after step {step}: {reason}")
        return text.format(step=words.count(summary.last_step), reason=summary.reason or _("no reason is written down."))
    text = _("It came to its planned end after {steps} steps; its last part took {time}.")
    if len(subject.ledger.headers) == 1:
        text = _("It came to its planned end after {steps} steps, and took {time}.")
    return text.format(steps=words.count(steps.step[-1]), time=words.seconds(summary.seconds))


def _memory_texts(subject: Subject, steps: Steps) -> list[str]:
    texts = []
    peak, limit = steps.highest_peak, limit_of(subject)
    if peak is not None and limit:
        text = _("Memory peaked at {peak}, {share} of the limit of {limit}.")
        texts.append(text.format(peak=words.size(peak), share=words.share(peak / limit), limit=words.size(limit)))
    elif peak is not None:
        texts.append(_("Memory peaked at {peak}.").format(peak=words.size(peak)))
    if steps.splits:
        text = _("Memory ran out {count} times inside a step, and each time the step was finished in smaller slices.")
        if len(steps.splits) == 1:
            text = _("Memory ran out once inside a step, and the step was finished in smaller slices.")
        texts.append(text.format(count=len(steps.splits)))
    if any(steps.is_skipped):
        text = _("Steps that the optimizer left out: {count}.")
        texts.append(text.format(count=words.count(sum(steps.is_skipped))))
    return [sentences(*texts)] if texts else []


def limit_of(subject: Subject) -> int | None:
    """What the device may hold, from whoever says it."""
    if subject.run is not None and subject.run.memory_limit_bytes:
        return subject.run.memory_limit_bytes
    if subject.ledger is not None and subject.ledger.headers:
        return subject.ledger.headers[-1].memory_limit_bytes or None
    return None


def _of_emulation(emulation: Emulation) -> Verdict:
    look = "good" if emulation.verdict == "fits" else "bad" if emulation.verdict in {"out-of-memory", "failed"} else "care"
    headline = verdict_of(emulation)
    return Verdict(look, headline[:1].upper() + headline[1:] + ".")


def _of_plan(plan: Plan) -> Verdict:
    best = plan.best
    if best is None or not plan.fits:
        text = _("The smallest configuration needs {missing} more than there is.").format(missing=words.size(plan.missing_bytes))
        return Verdict("bad", _("It does not fit."), [text if plan.missing_bytes else ""], plan.hints)
    texts = [product(best)]
    if best.memory is not None:
        text = _("Predicted: {needed} of {limit}, with {margin} kept free.")
        memory = best.memory
        texts.append(
            text.format(
                needed=words.size(memory.peak_device_bytes),
                limit=words.size(memory.limit_bytes),
                margin=words.size(plan.margin_bytes),
            )
        )
    if best.speed is not None:
        text = _("Predicted: {time} a step, {speed}.")
        texts.append(text.format(time=words.seconds(best.speed.step_seconds), speed=words.speed(best.speed.tokens_per_second)))
    return Verdict("good", _("It fits."), [sentences(*texts)])


def product(best: Candidate) -> str:
    """The effective batch as what it is made of."""
    if best.slices:
        text = _(
            "Micro-batches of at most {micro}, {accumulation} on each of {ranks} ranks: {effective} sequences in every step."
        )
    else:
        text = _("{micro} × {accumulation} (accumulation) × {ranks} (ranks) = {effective} sequences in every step.")
    return text.format(
        micro=best.micro_batch, accumulation=best.accumulation, ranks=best.world_size, effective=best.effective_batch
    )


def _of_probe(probe: Measurement) -> Verdict:
    if probe.largest is None:
        return Verdict("bad", _("Not even one sequence trains here."), list(probe.warnings))
    text = _("The largest micro-batch that trains here is {size}: {peak}, {speed}.")
    texts = [
        text.format(
            size=probe.largest.micro_batch,
            peak=words.size(probe.largest.peak_bytes),
            speed=words.speed(probe.largest.tokens_per_second),
        )
    ]
    if probe.fastest is not None:
        text = _("The fastest is {size}: {peak}, {speed}.")
        texts.append(
            text.format(
                size=probe.fastest.micro_batch,
                peak=words.size(probe.fastest.peak_bytes),
                speed=words.speed(probe.fastest.tokens_per_second),
            )
        )
    if probe.versus is not None:
        text = _("Predicted for {size}: {predicted}; measured: {measured}; off by {error}.")
        versus = probe.versus
        texts.append(
            text.format(
                size=versus.micro_batch, predicted=words.size(versus.predicted_bytes), measured=words.size(versus.measured_bytes),
                error=f"{versus.error:+.1%}",
            )
        )  # fmt: skip
    if not probe.complete:
        texts.append(_("The search ended early; a larger size may run."))
        return Verdict("care", _("Measured, and not to the end."), [sentences(*texts)])
    return Verdict("good", _("Measured."), [sentences(*texts)])


def _facts(subject: Subject, steps: Steps | None) -> list[tuple[str, object]]:
    if subject.run is not None:
        rows = _facts_of_run(subject)
    elif subject.ledger is not None and subject.ledger.headers:
        rows = _facts_of_ledger(subject)
    else:
        rows = _facts_of_workload(subject)
    if steps is not None and len(steps):
        rows += [
            (_("Speed"), words.speed(steps.tokens_per_second) if steps.tokens_per_second else ""),
            (_("Padding"), words.share(steps.padding) if steps.padding is not None else ""),
            (_("Waiting for data"), words.share(steps.wait_share) if steps.wait_share is not None else ""),
        ]
    return rows


def _facts_of_run(subject: Subject) -> list[tuple[str, object]]:
    run = subject.run
    assert run is not None
    settings = run.settings
    return [
        (_("Model"), run.model),
        (_("Data"), run.data.source),
        (_("Device"), f"{run.device}, {run.kernel}" if run.kernel else run.device),
        (_("How"), ", ".join([settings.method, settings.precision, settings.optimizer])),
        (_("Checkpointing"), settings.checkpointing),
        (_("Effective batch"), subject.batch or words.count(run.effective_batch)),
        (
            _("Steps"),
            _("{total}, {epoch} an epoch").format(total=words.count(run.total_steps), epoch=words.count(run.steps_per_epoch)),
        ),
        (_("Memory limit"), words.size(run.memory_limit_bytes) if run.memory_limit_bytes else ""),
        (_("Started"), words.moment(run.created_at)),
    ]


def _facts_of_ledger(subject: Subject) -> list[tuple[str, object]]:
    assert subject.ledger is not None
    header = subject.ledger.headers[-1]
    return [
        (_("Effective batch"), words.count(header.effective_batch) if header.effective_batch else ""),
        (_("Sequences in the data"), words.count(header.sequences_in_data) if header.sequences_in_data else ""),
        (_("Device"), header.device),
        (_("Ranks"), words.count(header.world_size)),
        (_("Memory limit"), words.size(header.memory_limit_bytes) if header.memory_limit_bytes else ""),
        (_("Started"), words.moment(header.started_at)),
        (_("Continued"), words.count(len(subject.ledger.headers) - 1) if len(subject.ledger.headers) > 1 else ""),
    ]


def _facts_of_workload(subject: Subject) -> list[tuple[str, object]]:
    found = subject.probe or subject.plan
    if found is None:
        return []
    workload = found.workload
    shape = words.count(workload.max_length)
    if workload.target_length is not None:
        shape += f" → {words.count(workload.target_length)}"
    return [
        (_("Model"), workload.model),
        (_("Data"), found.data.source if found.data is not None else ""),
        (_("Machine"), words.where(found.machine)),
        (_("How"), method_words(workload)),
        (_("Longest sequence"), _("{shape} tokens").format(shape=shape)),
        (_("Effective batch"), words.count(workload.effective_batch)),
        (_("Memory limit"), words.size(_workload_limit(subject))),
    ]


def _workload_limit(subject: Subject) -> int | None:
    if subject.probe is not None:
        return subject.probe.limit_bytes
    best = subject.plan.best if subject.plan is not None else None
    return best.memory.limit_bytes if best is not None and best.memory is not None else None
