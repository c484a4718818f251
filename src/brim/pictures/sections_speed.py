"""Tokens per second against the micro-batch, and where more of it stops helping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _, sentences
from brim.pictures import words
from brim.pictures.charts import Line, Note, count_axis, number_axis, xy_chart
from brim.pictures.parts import Key, Section, Table, figure

if TYPE_CHECKING:
    from brim.pictures.subject import Subject
    from brim.records import Measurement


def speed_section(subject: Subject) -> Section | None:
    """Only a probe has measured it."""
    probe = subject.probe
    curve = curve_of(probe) if probe is not None else {}
    if probe is None or not curve:
        return None
    sizes, speeds = [float(size) for size in curve], list(curve.values())
    fastest = max(curve, key=lambda size: (curve[size], -size))
    largest = probe.largest.micro_batch if probe.largest is not None else None
    notes = [Note(fastest, curve[fastest], _("fastest: {size}").format(size=fastest), "star", "s2")]
    if largest is not None and largest != fastest and largest in curve:
        notes.append(
            Note(largest, curve[largest], _("largest: {size}").format(size=largest), "diamond", "predicted", above=False)
        )
    x = count_axis([0.0, max(sizes) * 1.06], _("micro-batch"), from_zero=True)
    y = number_axis(speeds, _("tokens/s"), from_zero=True)
    drawing = xy_chart(x, y, [Line(_("speed"), sizes, list(speeds), "s1", "dot")], notes=notes, form=words.speed)
    says = _("The fastest micro-batch is {size}, with {speed}.").format(size=fastest, speed=words.speed(curve[fastest]))
    if largest in curve and largest != fastest:
        text = _("The largest that fits, {size}, reaches {share} of that: beyond the knee more memory buys no speed.")
        says = sentences(says, text.format(size=largest, share=words.share(curve[largest] / (curve[fastest] or 1.0))))
    rows = [
        [words.count(size), words.speed(speed), words.share(speed / (curve[fastest] or 1.0))] for size, speed in curve.items()
    ]
    data = Table([_("micro-batch"), _("speed"), _("of the fastest")], rows, frozenset())
    legend = [Key(_("useful tokens, padding not counted"), "s1", "dot"), Key(_("fastest"), "s2", "star")]
    legend += [Key(_("largest that fits"), "predicted", "diamond")] if len(notes) > 1 else []
    return Section("speed", _("Speed"), figure("speed", _("Speed against the micro-batch"), says, drawing, data, legend=legend))


def curve_of(probe: Measurement) -> dict[int, float]:
    """Useful tokens per second at the longest sequences, by size; the fastest run of each."""
    runs = [
        *((trial.micro_batch, trial.tokens_per_second) for trial in probe.trials if trial.verdict == "ok"),
        *(
            (point.sequences, point.tokens_per_second)
            for point in probe.points
            if point.length == probe.workload.max_length and point.padded == probe.workload.padded
        ),
    ]
    speeds: dict[int, float] = {}
    for size, speed in runs:
        if speed:
            speeds[size] = max(speeds.get(size, speed), speed)
    return dict(sorted(speeds.items()))
