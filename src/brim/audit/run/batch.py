"""The effective batch against the noise scale of the gradient: a guide, with its sureness, and never more than that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from brim.audit.run import noise
from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.run.noise import NoiseScale
    from brim.audit.run.reading import Run

FAR_ABOVE: Final = 4.0
FAR_BELOW: Final = 20.0
"""Times by which the batch must lie outside the interval. A small batch is no fault where it is as fast, so more is asked for below it."""
_WIDEST: Final = 4.0
"""An interval whose end is more than so many times its beginning decides nothing."""
_MOST_STEPS: Final = 50_000


def noise_of(run: Run) -> NoiseScale | None:
    """The noise scale of the later half of the run: it rises while a model learns, and the present is what counts."""
    columns = run.columns
    known = ~(np.isnan(columns.noise) | np.isnan(columns.signal))
    values = np.stack([columns.noise[known], columns.signal[known]], axis=1)
    later = values[-min(max(noise.FEWEST_FOR_INTERVAL, len(values) // 2), _MOST_STEPS) :]
    items, sequences = np.nansum(columns.supervised[known]), columns.sequences[known].sum()
    return noise.noise_scale(later, tokens_per_sequence=float(items / sequences) if items and sequences else 1.0)


def note_of(run: Run, scale: NoiseScale | None) -> str | None:
    """The estimate in words; None where the ledger holds nothing of it."""
    if scale is None:
        return None
    batch = _batch(run)
    if scale.tokens is None:
        begin = _("The gradient's noise scale cannot be told: its signal is not surely above zero in {steps} steps.")
        least = _("It is at least {tokens:,.0f} tokens ({sequences:,.0f} sequences).") if scale.at_least_tokens >= 1 else ""
        sequences = scale.at_least_tokens / scale.tokens_per_sequence
        return sentences(begin.format(steps=scale.steps), least.format(tokens=scale.at_least_tokens, sequences=sequences))
    if scale.tokens_interval is None:
        text = _(
            "The gradient's noise scale is roughly {tokens:,.0f} supervised tokens, or {sequences:,.0f} sequences, and how sure that is "
            "cannot be told from {steps} steps; a step holds {batch:,.0f} tokens."
        )
        return text.format(tokens=scale.tokens, sequences=scale.sequences, steps=scale.steps, batch=batch)
    text = _(
        "The gradient's noise scale is about {tokens:,.0f} supervised tokens ({low:,.0f} to {high:,.0f}, by about 90 %), or "
        "{sequences:,.0f} sequences; a step holds {batch:,.0f} tokens. This is a guide: a batch much larger than this hardly saves steps."
    )
    low, high = scale.tokens_interval
    return text.format(tokens=scale.tokens, low=low, high=high, sequences=scale.sequences, batch=batch)


def check(run: Run, scale: NoiseScale | None) -> Iterator[Found]:
    """Only where the whole interval is far away."""
    if scale is None or scale.tokens_interval is None:
        return
    low, high = scale.tokens_interval
    batch = _batch(run)
    if low <= 0 or high > _WIDEST * low or not batch:
        return
    facts = {"batch": batch, "low": low, "high": high, "times": batch / high if batch > high else low / batch}
    if batch > FAR_ABOVE * high:
        text = _(
            "A step holds {batch:,.0f} supervised tokens, {times:.0f} times the gradient's noise scale ({low:,.0f} to "
            "{high:,.0f}): a smaller effective batch would learn as much from each step, at less cost."
        )
    elif batch < low / FAR_BELOW:
        text = _(
            "A step holds {batch:,.0f} supervised tokens, and the gradient's noise scale is {times:.0f} times that ({low:,.0f} "
            "to {high:,.0f}): a larger effective batch would need fewer steps, if it is as fast for each token."
        )
    else:
        return
    yield run.found("batch-beyond-noise", text.format(**facts), confidence="low")


def _batch(run: Run) -> float:
    supervised = run.columns.supervised[~np.isnan(run.columns.supervised)]
    return float(np.median(supervised)) if len(supervised) else 0.0
