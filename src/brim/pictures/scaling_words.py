"""What a curve over GPUs says, in sentences: the same on the terminal and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _, sentences

if TYPE_CHECKING:
    from brim.records import Scaling


def knee(scaling: Scaling) -> str:
    """Where adding GPUs stops paying."""
    last = scaling.points[-1]
    if scaling.knee_gpus == last.gpus:
        text = _("Adding GPUs pays as far as was looked, up to {count:,} of them.")
        return text.format(count=last.gpus)
    text = _(
        "Adding GPUs beyond {count:,} pays less than {share:.0%}: each brings less than that of what one of {reference:,} does."
    )
    return text.format(count=scaling.knee_gpus, share=scaling.knee_share, reference=scaling.reference_gpus)


def planned(scaling: Scaling, gpus: int) -> str:
    """How well the planned GPUs are used."""
    point = next(each for each in scaling.points if each.gpus == gpus)
    if point.efficiency is None or not point.step_seconds:
        return ""
    text = _(
        "{gpus:,} GPUs reach {efficiency:.0%} of the tokens per GPU of {reference:,}; {share:.0%} of a step waits for communication."
    )
    said = text.format(
        gpus=gpus,
        efficiency=point.efficiency,
        reference=scaling.reference_gpus,
        share=point.exposed_seconds / point.step_seconds,
    )
    if not point.idle_gpus:
        return said
    return sentences(said, _("{count:,} GPUs have no sequence to work on.").format(count=point.idle_gpus))


def batch(scaling: Scaling, gpus: int) -> str:
    """From which batch on the planned GPUs are worth it."""
    guide = scaling.batches
    if guide.enough_batch is None:
        text = _("None of the batches here keeps {gpus:,} GPUs {share:.0%} busy: the links are what is short.")
        return text.format(gpus=gpus, share=scaling.knee_share)
    text = _("{gpus:,} GPUs pay from an effective batch of {batch:,} on: less than that leaves them below {share:.0%}.")
    if guide.points[0].effective_batch == guide.enough_batch:
        text = _("{gpus:,} GPUs pay with the effective batch of {batch:,}: they are at {share:.0%} or above.")
    return text.format(gpus=gpus, batch=guide.enough_batch, share=scaling.knee_share)


def noise(scaling: Scaling) -> str:
    """How far the batch may grow for the sake of learning."""
    guide = scaling.batches
    if guide.noise_scale is None:
        return _(
            "How far the batch may grow before it only costs is told by the gradient's noise scale, which is not known here: train a "
            "while, let `brim doctor RUN` tell it, and give --noise-scale RUN."
        )
    first = guide.points[0]
    timed = [(each.time, each.effective_batch) for each in guide.points if each.time is not None]
    text = _(
        "With a noise scale of {noise:,.0f} sequences a batch of {batch:,} takes {steps:.2f} times the fewest steps and {examples:.2f} "
        "times the fewest sequences (1 + B'/B and 1 + B/B'); of the batches here {fastest:,} is soonest at the same loss."
    )
    said = text.format(
        noise=guide.noise_scale, batch=first.effective_batch, steps=first.steps, examples=first.examples, fastest=min(timed)[1]
    )
    if guide.enough_batch is not None and guide.enough_batch > guide.noise_scale:
        more = _("The batch that these GPUs ask for is above the noise scale: they are bought with sequences that teach little.")
        return sentences(said, more)
    return said
