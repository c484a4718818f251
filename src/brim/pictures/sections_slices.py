"""How the steps were sliced and what they took: micro-batches, splits, seconds, waiting for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.locale import _, sentences
from brim.pictures import words
from brim.pictures.charts import Line, count_axis, number_axis, stairs, xy_chart
from brim.pictures.markup import Html, join, tag
from brim.pictures.over_steps import line_of, table_of
from brim.pictures.parts import Key, Section, Table, facts, figure, table
from brim.pictures.thinning import known, smooth

if TYPE_CHECKING:
    from brim.pictures.steps import Steps

_MOST_SPLITS: Final = 40
_MOST_EVENTS: Final = 200
_FEW: Final = 8


def slices_section(steps: Steps) -> Section | None:
    """Of any run that has taken a step."""
    if not len(steps):
        return None
    utilisation = sorted(steps.utilisation)
    rows: list[tuple[str, object]] = [
        (_("Speed"), words.speed(steps.tokens_per_second) if steps.tokens_per_second else ""),
        (_("Seconds a step, median"), words.seconds(_median(steps.seconds))),
        (_("Waiting for data"), words.share(steps.wait_share) if steps.wait_share is not None else ""),
        (_("The device computed, median"), words.share(utilisation[len(utilisation) // 2]) if utilisation else ""),
    ]
    return Section(
        "slices",
        _("Slices and seconds"),
        join([facts(rows), _micro_batches(steps), _splits(steps), _seconds(steps), _speed(steps)]),
    )


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _micro_batches(steps: Steps) -> Html | None:
    counts = steps.micro_batches
    if not any(counts):
        return None
    line = line_of(_("micro-batches"), steps, counts, "s1")
    xs, ys = stairs(line.xs, line.ys)
    drawn = Line(line.name, xs, ys, "s1") if len(xs) > 1 else Line(line.name, xs, ys, "s1", "dot")
    y = number_axis([0.0, *counts], _("micro-batches"), from_zero=True)
    drawing = xy_chart(count_axis(steps.step, _("step")), y, [drawn], events=steps.split_steps[:_MOST_EVENTS], form=words.count)
    says = _cut_text(min(counts), max(counts)).format(
        least=words.count(min(counts)),
        most=words.count(max(counts)),
        largest=words.count(max(known(steps.largest), default=None)),
    )
    legend = [Key(_("micro-batches of a step, all ranks"), "s1", "line")]
    if steps.split_steps:
        legend.append(Key(_("memory ran out, and the step was split"), "event", "triangle"))
        says = sentences(says, _("Steps in which memory ran out: {count}.").format(count=words.count(len(steps.split_steps))))
    data = table_of(steps, [(_("micro-batches"), counts, words.count), (_("largest micro-batch"), steps.largest, words.count)])
    return figure("slices", _("Micro-batches of each step"), says, drawing, data, legend=legend)


def _cut_text(least: float, most: float) -> str:
    if most == 1:
        return _("Every step was one micro-batch, the largest of {largest} sequences.")
    if least == most:
        return _("Every step was cut into {most} micro-batches, the largest of {largest} sequences.")
    return _("A step was cut into {least} to {most} micro-batches, the largest of {largest} sequences.")


def _splits(steps: Steps) -> Html | None:
    if not steps.splits:
        return None
    rows = [
        [words.count(step), words.phase(phase), words.count(sequences), words.count(length), words.count(into)]
        for step, phase, sequences, into, length in steps.splits[:_MOST_SPLITS]
    ]
    heads = [_("step"), _("phase"), _("sequences that failed"), _("tokens per row"), _("cut into")]
    note = ""
    if len(steps.splits) > _MOST_SPLITS:
        note = _("The first {shown} of {all}.").format(shown=_MOST_SPLITS, all=words.count(len(steps.splits)))
    title = _("Out of memory, and survived")
    return join([tag("h3", title), table(Table(heads, rows, frozenset({1}), note), title)])


def _seconds(steps: Steps) -> Html:
    whole = steps.seconds
    lines = [
        line_of(_("whole step"), steps, whole, "s1", None if len(steps) >= _FEW else "dot"),
        line_of(_("waiting"), steps, steps.wait_seconds, "s2", None if len(steps) >= _FEW else "diamond"),
    ]
    y = number_axis([0.0, *whole], _("seconds"), from_zero=True)
    drawing = xy_chart(count_axis(steps.step, _("step")), y, lines, form=words.seconds)
    says = _("A step takes {median} (median), and {most} at most.").format(
        median=words.seconds(_median(whole)), most=words.seconds(max(whole))
    )
    if steps.wait_share is not None:
        says = sentences(says, _("{share} of the time goes to waiting for data.").format(share=words.share(steps.wait_share)))
    data = table_of(steps, [(_("whole step"), whole, words.seconds), (_("waiting for data"), steps.wait_seconds, words.seconds)])
    legend = [Key(_("whole step"), "s1", "line"), Key(_("waiting for data"), "s2", "line")]
    return figure("seconds", _("Seconds of each step"), says, drawing, data, legend=legend)


def _speed(steps: Steps) -> Html | None:
    speeds = [
        None if tokens is None or seconds <= 0 else tokens / seconds
        for tokens, seconds in zip(steps.tokens, steps.seconds, strict=True)
    ]
    numbers = known(speeds)
    if not numbers:
        return None
    lines = [line_of(_("speed"), steps, speeds, "raw", None if len(steps) >= _FEW else "dot")]
    lines += [line_of(_("smoothed"), steps, smooth(speeds), "s1")] if len(steps) >= _FEW else []
    drawing = xy_chart(
        count_axis(steps.step, _("step")), number_axis(numbers, _("tokens/s"), from_zero=True), lines, form=words.speed
    )
    says = _("Real tokens, padding not counted: {speed} over the whole run.").format(speed=words.speed(steps.tokens_per_second))
    data = table_of(steps, [(_("speed"), speeds, words.speed)])
    return figure("tokens", _("Speed of each step"), says, drawing, data)
