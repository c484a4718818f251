"""Memory: by kind against the limit, and predicted against measured on one axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.locale import _, sentences
from brim.pictures import words
from brim.pictures.bars import Bar, stacked_bars
from brim.pictures.charts import Drawing, Line, Note, byte_axis, count_axis, xy_chart
from brim.pictures.markup import Html, join
from brim.pictures.over_steps import line_of, table_of
from brim.pictures.parts import Key, Section, Table, figure, paragraphs
from brim.pictures.plot import Level, Symbol
from brim.pictures.scales import byte_ticks, bytes_short, is_far
from brim.pictures.sections_verdict import limit_of
from brim.pictures.thinning import known

if TYPE_CHECKING:
    from brim.pictures.steps import Steps
    from brim.pictures.subject import Subject
    from brim.records import Candidate, Measurement, MemoryPrediction, SpeedPrediction
    from brim.workload.words import Kind

_MOST_BARS: Final = 8
_DIFFER: Final = ("checkpointing", "precision", "attention", "optimizer", "method", "sharding", "offload")

Named = tuple[str, "MemoryPrediction", "SpeedPrediction | None"]
Points = list[tuple[int, int]]
"""Sequences, and bytes."""


def memory_section(subject: Subject, steps: Steps | None) -> Section | None:
    """Bars of what is predicted; then what was measured beside it."""
    parts = [
        _bars(subject),
        _of_trials(subject.probe) if subject.probe is not None else None,
        _of_steps(subject, steps) if steps is not None and len(steps) else None,
    ]
    found = [part for part in parts if part is not None]
    return Section("memory", _("Memory"), join(found)) if found else None


def _bars(subject: Subject) -> Html | None:
    candidates = _candidates(subject)
    if not candidates:
        return None
    limit = next((memory.limit_bytes for _label, memory, _speed in candidates if memory.limit_bytes), None)
    kinds = [kind for kind in words.KINDS if any(memory.by_kind.get(kind) for _label, memory, _speed in candidates)]
    bars = [
        Bar(label, words.size(memory.peak_device_bytes), _segments(memory), is_best=place == 0)
        for place, (label, memory, _speed) in enumerate(candidates)
    ]
    svg = stacked_bars(
        bars, ticks=lambda scale: byte_ticks(scale, 4), form=bytes_short,
        limit=(float(limit), _limit_text(limit), _("limit {size}, far to the right").format(size=words.size(limit))) if limit else None,
    )  # fmt: skip
    first, memory, _speed = candidates[0]
    largest = max(memory.by_kind.items(), key=lambda pair: pair[1], default=None)
    text = _("{name}: {needed} are predicted, of {limit}.")
    if subject.run is not None and memory is subject.run.predicted:
        text = _("For the costliest micro-batch of this run {needed} are predicted, of {limit}.")
    says = text.format(name=first, needed=words.size(memory.peak_device_bytes), limit=words.size(limit))
    if largest is not None:
        text = _("Most of it, {size}, are {kind}; the peak comes in the {phase} phase.")
        says = sentences(
            says, text.format(size=words.size(largest[1]), kind=words.kind(largest[0]), phase=words.phase(memory.peak_phase))
        )
    legend = [Key(words.kind(kind), kind, "field") for kind in kinds]
    return figure("memory", _("Memory by kind, as predicted"), says, svg, _numbers(candidates, kinds), legend=legend)


def _limit_text(limit: int) -> str:
    return _("limit {size}").format(size=words.size(limit))


def _numbers(candidates: list[Named], kinds: list[Kind]) -> Table:
    """By kind; and what each would take, where that is predicted."""
    heads = [_("candidate"), *(words.kind(kind) for kind in kinds), _("together")]
    rows = [
        [label, *(words.size(memory.by_kind.get(kind, 0)) for kind in kinds), words.size(memory.peak_device_bytes)]
        for label, memory, _speed in candidates
    ]
    if any(speed is not None for _label, _memory, speed in candidates):
        heads += [_("seconds a step"), _("speed")]
        for row, speed in zip(rows, [each[2] for each in candidates], strict=True):
            row += [words.seconds(speed.step_seconds if speed else None), words.speed(speed.tokens_per_second if speed else None)]
    return Table(heads, rows)


def _segments(memory: MemoryPrediction) -> list[tuple[str, float]]:
    if not any(memory.by_kind.values()):
        return [("rest", float(memory.peak_device_bytes))]
    return [(kind, float(memory.by_kind.get(kind, 0))) for kind in words.KINDS]


def _candidates(subject: Subject) -> list[Named]:
    """The plan's, the one in force first; where there is no plan, the one that was predicted."""
    found: list[Named] = []
    run, plan, probe = subject.run, subject.plan, subject.probe
    planned = [each for each in (plan.best, *plan.alternatives) if each is not None and each.memory is not None] if plan else []
    if run is not None and run.predicted is not None and not (planned and planned[0].memory == run.predicted):
        found.append((_("this run"), run.predicted, None))
    found += [(_label(each, planned), each.memory, each.speed) for each in planned if each.memory is not None]
    if not found and probe is not None and probe.predicted is not None and probe.largest is not None:
        found.append((_("micro-batch {size}").format(size=probe.largest.micro_batch), probe.predicted, None))
    return found[:_MOST_BARS]


def _label(candidate: Candidate, among: list[Candidate]) -> str:
    """The slices, and what else tells it from the others."""
    micro, count = candidate.micro_batch, candidate.accumulation
    said = [f"{micro} × {count}"]
    if candidate.slices:
        said = [_("{count} of up to {size}").format(count=count, size=micro)]
    for name in _DIFFER:
        if len({getattr(each, name) for each in among}) > 1:
            value = getattr(candidate, name)
            said.append(_("checkpointing {word}").format(word=value) if name == "checkpointing" else str(value))
    return ", ".join(said)


def _of_trials(probe: Measurement) -> Html | None:
    """Peaks of the sizes that ran, the line through them, what was predicted, the limit."""
    ran = sorted(
        (trial.micro_batch, trial.peak_device_bytes)
        for trial in probe.trials
        if trial.verdict == "ok" and trial.peak_device_bytes
    )
    failed = sorted(trial.micro_batch for trial in probe.trials if trial.verdict != "ok")
    shapes = sorted((point.sequences, point.peak_bytes) for point in probe.points if point.length == probe.workload.max_length)
    if not ran and not shapes:
        return None
    limit, versus, fit = probe.limit_bytes, probe.versus, probe.fit
    sizes = [float(size) for size, _peak in (*ran, *shapes)] + [float(size) for size in failed]
    high = max(sizes)
    x = count_axis([0.0, high * 1.06], _("micro-batch"), from_zero=True)
    top = [float(peak) for _size, peak in (*ran, *shapes)] + ([float(versus.predicted_bytes)] if versus else [])
    near = float(limit) if limit and not is_far(limit, top) else None
    top += [near] if near else []
    lines = [
        Line(name, [float(size) for size, _peak in points], [float(peak) for _size, peak in points], look, mark, is_drawn=False)
        for name, points, look, mark in _series(ran, shapes)
    ]
    if fit is not None:
        ends = [0.0, high]
        lines.append(Line(_("line"), ends, [max(0.0, fit.base_bytes + fit.bytes_per_sequence * size) for size in ends], "fit"))
    legend = [Key(_("trial, a process of its own"), "s1", "dot")]
    if shapes:
        legend.append(Key(_("timed shape"), "s3", "triangle"))
    legend += [Key(_("line through the trials"), "fit", "line")] if fit is not None else []
    notes = []
    if versus is not None:
        notes.append(Note(versus.micro_batch, versus.predicted_bytes, "", "diamond", "predicted"))
        legend.append(Key(_("predicted {size}").format(size=words.size(versus.predicted_bytes)), "predicted", "diamond"))
    if failed:
        heights = [max(top)] * len(failed)
        lines.append(Line(_("failed"), [float(size) for size in failed], heights, "limit", "cross", is_drawn=False))
        legend.append(Key(_("failed, drawn at the limit") if near else _("failed, drawn at the top"), "limit", "cross"))
    across = [Level(near, "", "limit")] if near else []
    legend += [Key(_limit_text(limit), "limit", "line")] if near and limit else []
    drawing = xy_chart(x, byte_axis(top, _("peak memory")), lines, across=across, notes=notes, form=words.size)
    rows = [
        [words.count(trial.micro_batch), words.verdict(trial.verdict), words.phase(trial.phase) if trial.phase else "",
         words.size(trial.peak_device_bytes), words.seconds(trial.step_seconds), words.speed(trial.tokens_per_second)]
        for trial in probe.trials
    ] + [
        [words.count(point.sequences), _("timed shape"), "", words.size(point.peak_bytes), words.seconds(point.seconds),
         words.speed(point.tokens_per_second)]
        for point in probe.points if point.length == probe.workload.max_length
    ]  # fmt: skip
    data = Table(
        [_("micro-batch"), _("how it ended"), _("phase"), _("peak memory"), _("seconds"), _("speed")], rows, frozenset({1, 2})
    )
    return figure("measured", _("Predicted against measured"), _says_trials(probe), drawing, data, legend=legend)


def _series(ran: Points, shapes: Points) -> list[tuple[str, Points, str, Symbol]]:
    return [(_("trial"), ran, "s1", "dot"), (_("timed shape"), shapes, "s3", "triangle")]


def _says_trials(probe: Measurement) -> str:
    said = []
    if probe.fit is not None:
        text = _("As measured, a step takes {base} and {each} more for each sequence.")
        said.append(
            text.format(base=words.size(max(0.0, probe.fit.base_bytes)), each=words.size(max(0.0, probe.fit.bytes_per_sequence)))
        )
    if probe.versus is not None:
        text = _("At {size} sequences {predicted} were predicted and {measured} measured: {error}.")
        versus = probe.versus
        said.append(
            text.format(
                size=versus.micro_batch, predicted=words.size(versus.predicted_bytes), measured=words.size(versus.measured_bytes),
                error=f"{versus.error:+.1%}",
            )
        )  # fmt: skip
    if probe.limit_bytes:
        text = _("The limit is {limit}; {margin} of it stay free in every trial.")
        said.append(text.format(limit=words.size(probe.limit_bytes), margin=words.size(probe.margin_bytes)))
    return sentences(*said) or _("The peak of every size that ran.")


def _of_steps(subject: Subject, steps: Steps) -> Html | None:
    peak = steps.highest_peak
    if peak is None:
        return paragraphs(_("The run's memory was not measured, so there is nothing to hold against the prediction."))
    limit = limit_of(subject)
    predicted = subject.run.predicted if subject.run is not None else None
    # On the CPU there is no allocator that reserves: what counts there is the same as what counts against the limit.
    expected = predicted.peak_reserved_bytes if predicted is not None else None
    across, legend = [], [Key(_("measured in each step"), "s1", "line")]
    if expected:
        across.append(Level(expected, "", "predicted"))
        legend.append(Key(_("predicted {size}").format(size=words.size(expected)), "predicted", "line"))
    peaks = [value or None for value in steps.peak_bytes]
    top = [*known(peaks), *(level.value for level in across)]
    # A limit far above would press the picture flat: it is said in words then.
    if limit and not is_far(limit, top):
        across.append(Level(limit, "", "limit"))
        legend.append(Key(_limit_text(limit), "limit", "line"))
        top.append(limit)
    line = line_of(_("peak"), steps, peaks, "s1")
    drawing: Drawing = xy_chart(
        count_axis(steps.step, _("step")), byte_axis(top, _("peak memory")), [line], across=across, events=steps.split_steps[:200],
        form=words.size,
    )  # fmt: skip
    says = _("The highest peak of a step was {peak}.").format(peak=words.size(peak))
    if expected:
        text = _("{predicted} were predicted for the costliest micro-batch: the measured peak is {share} of that.")
        says = sentences(
            says, text.format(predicted=words.size(expected), share=words.share(peak / expected)), _other(subject, steps)
        )
    if limit:
        says = sentences(says, _("The limit was {limit}.").format(limit=words.size(limit)))
    if steps.split_steps:
        legend.append(Key(_("memory ran out, and the step was split"), "event", "triangle"))
    data = table_of(steps, [(_("peak memory"), peaks, words.size)])
    title = _("Predicted against measured, step by step") if expected else _("Peak memory, step by step")
    return figure("peaks", title, says, drawing, data, legend=legend)


def _other(subject: Subject, steps: Steps) -> str:
    """Where the steps were not cut as the prediction has it, the two cannot be held against each other."""
    largest = max(known(steps.largest), default=0)
    if subject.run is None or largest <= subject.run.micro_batch:
        return ""
    text = _("The prediction is for micro-batches of up to {size} sequences, and this run had some of {largest}.")
    return text.format(size=words.count(subject.run.micro_batch), largest=words.count(largest))
