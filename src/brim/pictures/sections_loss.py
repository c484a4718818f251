"""What was learnt: loss, gradient norm, learning rate over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.locale import _, sentences
from brim.pictures import words
from brim.pictures.charts import Line, count_axis, number_axis, xy_chart
from brim.pictures.markup import Html, join, tag
from brim.pictures.over_steps import line_of, table_of
from brim.pictures.parts import Key, Section, Table, figure, table
from brim.pictures.scales import plain
from brim.pictures.thinning import known, smooth, spread, thin

if TYPE_CHECKING:
    from brim.pictures.steps import Column, Steps
    from brim.pictures.subject import Subject

_MOST_EVENTS: Final = 200
_FEW: Final = 8
"""Of fewer points a smoothed line would say nothing that the points do not."""


def loss_section(subject: Subject, steps: Steps) -> Section | None:
    """Only what was written down."""
    parts = [_loss(subject, steps), tag("div", _norm(steps), _rate(steps), class_="pair")]
    found = [part for part in parts if part and part != tag("div", class_="pair")]
    return Section("loss", _("Loss"), join(found)) if found else None


def _loss(subject: Subject, steps: Steps) -> Html | None:
    losses = steps.loss
    evaluated = sorted((each.step, each.loss) for each in subject.evaluations if each.loss is not None)
    numbers = known(losses)
    strange = sum(loss is not None for loss in losses) - len(numbers)
    if not numbers and not evaluated and not strange:
        return None
    smoothed = smooth(losses)
    lines = [line_of(_("loss"), steps, losses, "raw" if len(numbers) >= _FEW else "s1", None if len(numbers) >= _FEW else "dot")]
    legend = [Key(_("loss of each step"), "raw", "line") if len(numbers) >= _FEW else Key(_("loss of each step"), "s1", "dot")]
    if len(numbers) >= _FEW:
        lines.append(line_of(_("smoothed"), steps, smoothed, "s1"))
        legend.append(Key(_("smoothed"), "s1", "line"))
    # The first evaluation may come before the first step, and the last after the last.
    chosen = [evaluated[place] for place in thin([loss for _step, loss in evaluated], 300)]
    if chosen:
        lines.append(
            Line(_("evaluation"), [float(step) for step, _loss in chosen], [loss for _step, loss in chosen], "s2", "diamond")
        )
        legend.append(Key(_("evaluation"), "s2", "diamond"))
    if steps.split_steps:
        legend.append(Key(_("memory ran out, and the step was split"), "event", "triangle"))
    xs = [*steps.step, *(float(step) for step, _loss in chosen)]
    y = number_axis([*numbers, *known([loss for _step, loss in chosen])], _("loss"), may_be_log=True)
    drawing = xy_chart(count_axis(xs, _("step")), y, lines, events=steps.split_steps[:_MOST_EVENTS], form=plain)
    says = _says(steps, numbers, smoothed, strange)
    if evaluated:
        text = _("The last evaluation, after step {step}, gave {loss}.")
        says = sentences(says, text.format(step=words.count(evaluated[-1][0]), loss=words.number(evaluated[-1][1])))
    data = table_of(steps, [(_("loss"), losses, words.number), (_("smoothed"), smoothed, words.number)])
    return join([figure("loss", _("Loss"), says, drawing, data, legend=legend), _evaluations(subject)])


def _says(steps: Steps, numbers: list[float], smoothed: Column, strange: int) -> str:
    said = []
    if len(numbers) == 1:
        said.append(_("There is one loss so far: {loss}.").format(loss=words.number(numbers[0])))
    elif numbers:
        text = _("The loss goes from {first} in step {start} to {last} in step {end}; smoothed, it ends at {smoothed}.")
        said.append(
            text.format(
                first=words.number(numbers[0]), last=words.number(numbers[-1]), smoothed=words.number(smoothed[-1]),
                start=words.count(steps.step[0]), end=words.count(steps.step[-1]),
            )
        )  # fmt: skip
    if strange:
        said.append(_("In {count} steps it is not a finite number: the line has a gap there.").format(count=words.count(strange)))
    return sentences(*said)


def _evaluations(subject: Subject) -> Html | None:
    found = subject.evaluations
    if not found:
        return None
    names = list(dict.fromkeys(name for each in found for name in each.metrics))[:8]
    rows = [
        [words.count(each.step), words.number(each.loss), *(words.number(each.metrics.get(name)) for name in names),
         words.count(each.sequences), words.seconds(each.seconds)]
        for each in (found[place] for place in spread(len(found)))
    ]  # fmt: skip
    heads = [_("after step"), _("loss"), *names, _("sequences"), _("seconds")]
    return join([tag("h3", _("Evaluations")), table(Table(heads, rows, frozenset()), _("Evaluations"))])


def _norm(steps: Steps) -> Html | None:
    norms = steps.grad_norm
    numbers = known(norms)
    if not numbers:
        return None
    y = number_axis(numbers, _("gradient norm"), from_zero=True, may_be_log=True)
    smoothed = smooth(norms)
    lines = [line_of(_("gradient norm"), steps, norms, "raw", None if len(numbers) >= _FEW else "dot")]
    lines += [line_of(_("smoothed"), steps, smoothed, "s1")] if len(numbers) >= _FEW else []
    drawing = xy_chart(count_axis(steps.step, _("step")), y, lines, form=plain)
    middle, highest = sorted(numbers)[len(numbers) // 2], max(numbers)
    says = _("Before clipping: {middle} (median), {highest} at most.").format(
        middle=words.number(middle), highest=words.number(highest)
    )
    if y.scale.is_log:
        says = sentences(says, _("The axis is logarithmic."))
    data = table_of(steps, [(_("gradient norm"), norms, words.number)])
    return figure("norm", _("Gradient norm"), says, drawing, data)


def _rate(steps: Steps) -> Html | None:
    rates = steps.learning_rate
    numbers = known(rates)
    if not numbers:
        return None
    drawing = xy_chart(
        count_axis(steps.step, _("step")), number_axis(numbers, _("learning rate"), from_zero=True),
        [line_of(_("learning rate"), steps, rates, "s3", None if len(numbers) >= _FEW else "dot")], form=plain,
    )  # fmt: skip
    says = _("It begins at {first}, is {highest} at most, and ends at {last}.").format(
        first=words.number(numbers[0]), highest=words.number(max(numbers)), last=words.number(numbers[-1])
    )
    return figure("rate", _("Learning rate"), says, drawing, table_of(steps, [(_("learning rate"), rates, words.number)]))
