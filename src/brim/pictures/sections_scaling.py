"""What more GPUs would do: speed, efficiency and links against their number, and the guide to the batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from brim.locale import _, sentences
from brim.pictures import scaling_words, words
from brim.pictures.charts import Drawing, Line, Note, xy_chart
from brim.pictures.markup import Html, join, tag
from brim.pictures.parts import Key, Section, Table, figure, paragraphs, table
from brim.pictures.plot import Axis, Level
from brim.pictures.scales import Scale, plain, spanning

if TYPE_CHECKING:
    from brim.pictures.subject import Subject
    from brim.records import ScalePoint, Scaling

_MOST_TICKS: Final = 5


def scaling_section(subject: Subject) -> Section | None:
    """Only a plan for several GPUs has a curve."""
    plan = subject.plan
    # A run's own figures stand in its ledger; the plan beside it was made for the GPUs that it has.
    if plan is None or plan.scaling is None or subject.ledger is not None:
        return None
    scaling, gpus = plan.scaling, plan.machine.world_size
    fitting = [point for point in scaling.points if point.efficiency is not None]
    parts: list[Html] = []
    if fitting:
        parts = [_speed(scaling, fitting, gpus), _efficiency(scaling, fitting, gpus), _links(scaling, fitting, gpus)]
    return Section("scaling", _("More GPUs"), join([*parts, _batches(scaling, gpus)]))


def _speed(scaling: Scaling, points: list[ScalePoint], gpus: int) -> Html:
    xs = [float(point.gpus) for point in points]
    speeds = [point.tokens_per_second for point in points]
    one = max(point.tokens_per_second / point.gpus for point in points)
    ideal = [one * x for x in xs]
    scale = spanning([*speeds, *ideal], is_log=True)
    y = Axis(scale, scale.ticks(), plain, _("tokens/s"))
    lines = [Line(_("ideal"), xs, list(ideal), "predicted"), Line(_("predicted"), xs, list(speeds), "s1", "dot")]
    drawing = xy_chart(_gpu_axis(points), y, lines, notes=_marks(scaling, points, gpus, speeds), form=words.speed)
    legend = [Key(_("predicted"), "s1", "dot"), Key(_("ideal: every GPU as good as the best"), "predicted", "line")]
    says = sentences(scaling_words.knee(scaling), scaling_words.planned(scaling, gpus))
    return figure(
        "scaling-speed",
        _("Speed against the number of GPUs"),
        says,
        drawing,
        _numbers(scaling),
        legend=legend + _keys(scaling, gpus),
    )


def _efficiency(scaling: Scaling, points: list[ScalePoint], gpus: int) -> Html:
    xs, shares = [float(point.gpus) for point in points], [point.efficiency or 0.0 for point in points]
    y = Axis(Scale(0.0, 1.06), [0.0, 0.25, 0.5, 0.75, 1.0], lambda share: f"{share:.0%}", _("efficiency"))
    drawing = xy_chart(
        _gpu_axis(points), y, [Line(_("efficiency"), xs, list(shares), "s1", "dot")],
        across=[Level(scaling.knee_share, "", "limit")], notes=_marks(scaling, points, gpus, shares), form=words.share,
    )  # fmt: skip
    text = _("Tokens per second and GPU at the same effective batch, against those of {count} GPUs, the best of the curve.")
    rows = [
        [words.count(point.gpus), words.share(point.efficiency), words.size(point.device_bytes), words.count(point.idle_gpus)]
        for point in scaling.points
    ]
    data = Table([_("GPUs"), _("efficiency"), _("memory of a GPU"), _("GPUs without a sequence")], rows, frozenset())
    legend = [Key(_("efficiency"), "s1", "dot"), Key(words.share(scaling.knee_share), "limit", "line"), *_keys(scaling, gpus)]
    says = text.format(count=words.count(scaling.reference_gpus))
    return figure("scaling-efficiency", _("Efficiency against the number of GPUs"), says, drawing, data, legend=legend)


def _links(scaling: Scaling, points: list[ScalePoint], gpus: int) -> Html:
    xs = [float(point.gpus) for point in points]
    series = [
        (_("computing"), [point.compute_seconds for point in points], "s3"),
        (_("inside a node: {name}").format(name=scaling.inside.name), [point.inside_seconds for point in points], "s1"),
        (_("between nodes: {name}").format(name=scaling.between.name), [point.between_seconds for point in points], "s2"),
        (_("waited for"), [point.exposed_seconds for point in points], "predicted"),
    ]
    scale = spanning([value for _name, values, _look in series for value in values], is_log=True)
    y = Axis(scale, scale.ticks(), plain, _("seconds of a step"))
    lines = [Line(name, xs, [value or None for value in values], look, "dot") for name, values, look in series]
    drawing: Drawing = xy_chart(_gpu_axis(points), y, lines, form=words.seconds)
    point = next((each for each in points if each.gpus == gpus), points[-1])
    text = _(
        "On {gpus} GPUs a step computes for {compute}; the links are busy for {inside} inside a node and {between} between nodes, and "
        "{waits} of that is waited for."
    )
    says = text.format(
        gpus=words.count(point.gpus), compute=words.seconds(point.compute_seconds), inside=words.seconds(point.inside_seconds),
        between=words.seconds(point.between_seconds), waits=words.seconds(point.exposed_seconds),
    )  # fmt: skip
    rows = [
        [
            words.count(each.gpus),
            *map(words.seconds, (each.compute_seconds, each.inside_seconds, each.between_seconds, each.exposed_seconds)),
        ]
        for each in scaling.points
    ]
    data = Table([_("GPUs"), *(name for name, _values, _look in series)], rows, frozenset())
    legend = [Key(name, look, "dot") for name, _values, look in series]
    return figure("scaling-links", _("Communication by link"), says, drawing, data, legend=legend)


def _batches(scaling: Scaling, gpus: int) -> Html:
    guide = scaling.batches
    has_noise = guide.noise_scale is not None
    heads = [_("effective batch"), _("step"), _("speed"), _("efficiency")]
    heads += [_("steps"), _("sequences"), _("time to a loss")] if has_noise else []
    rows = []
    for point in guide.points:
        known = [f"{value:.2f} ×" for value in (point.steps, point.examples, point.time) if value is not None]
        row = [words.count(point.effective_batch), words.seconds(point.step_seconds), words.speed(point.tokens_per_second)]
        rows.append([*row, words.share(point.efficiency), *known])
    said = paragraphs(scaling_words.batch(scaling, gpus), scaling_words.noise(scaling))
    title = _("Other batches on {gpus} GPUs").format(gpus=words.count(gpus))
    return join([tag("h3", title), said, table(Table(heads, rows, frozenset()), title)])


def _gpu_axis(points: list[ScalePoint]) -> Axis:
    """Doublings are equally far apart; of many, some are named."""
    counts = [float(point.gpus) for point in points]
    stride = math.ceil(len(counts) / _MOST_TICKS)
    low, high = (counts[0], counts[-1]) if len(counts) > 1 else (counts[0] / 2, counts[0] * 2)
    return Axis(Scale(low, high, is_log=True), counts[::-stride][::-1], lambda count: f"{count:,.0f}", _("GPUs"))


def _marks(scaling: Scaling, points: list[ScalePoint], gpus: int, values: list[float]) -> list[Note]:
    found = {point.gpus: value for point, value in zip(points, values, strict=True)}
    marks = []
    if scaling.knee_gpus in found and scaling.knee_gpus != gpus:
        marks.append(Note(scaling.knee_gpus, found[scaling.knee_gpus], "", "diamond", "s2"))
    if gpus in found:
        marks.append(Note(gpus, found[gpus], "", "star", "s3"))
    return marks


def _keys(scaling: Scaling, gpus: int) -> list[Key]:
    keys = [Key(_("the plan: {count} GPUs").format(count=words.count(gpus)), "s3", "star")]
    if scaling.knee_gpus != gpus:
        keys.append(Key(_("the knee: {count} GPUs").format(count=words.count(scaling.knee_gpus)), "s2", "diamond"))
    return keys


def _numbers(scaling: Scaling) -> Table:
    rows = [
        [
            words.count(point.gpus),
            f"{point.micro_batch} × {point.accumulation}",
            words.size(point.device_bytes),
            words.seconds(point.step_seconds) if point.fits else _("does not fit"),
            words.speed(point.tokens_per_second) if point.fits else "–",
        ]
        for point in scaling.points
    ]
    return Table([_("GPUs"), _("slices"), _("memory of a GPU"), _("step"), _("speed")], rows, frozenset())
