"""What the loss of a run says, by the rules of the planner, which also know what the learning rate should do about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from brim.locale import _, sentences
from brim.planner.loss_curve import ENDLESS, SURE, Verdict, judge
from brim.planner.schedule import format_setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.run.reading import Floats, Run

FEWEST_TO_CRAWL: Final = 50
"""Fewer steps need not have learned anything yet."""
_ENOUGH_TO_CRAWL: Final = 200
_MOST_SKIPPED: Final = 0.5
"""A scaler of gradients skips a few steps while it looks for its scale; a run that skips this share of them hardly trains."""
_FEWEST_ZEROS: Final = 20
_MOST: Final = 20_000
"""Longer series are averaged, neighbours with neighbours, to this many."""


def verdict_of(run: Run) -> Verdict | None:
    """What the planner says of the losses; None where there are none."""
    losses, _places = _losses(run)
    if not len(losses):
        return None
    rates = run.columns.learning_rate[~np.isnan(run.columns.learning_rate)]
    broken = np.flatnonzero(~(np.abs(losses) < ENDLESS))
    series = losses if len(broken) else _thinned(losses)
    # A schedule ends near zero: the highest rate is the one that was chosen. From zero itself no advice follows.
    return judge(series.tolist(), float(rates.max()) if rates.any() else None)


def check(run: Run, verdict: Verdict | None) -> Iterator[Found]:
    """At most one finding."""
    if _trains_nothing(run):
        text = _("The learning rate is 0 at all {steps} steps: nothing is trained.")
        yield run.found("loss-flat", text.format(steps=len(run.columns)), severity="high")
        return
    skipped = run.columns.skipped > 0
    if skipped.mean() > _MOST_SKIPPED:
        text = _(
            "{count} of {steps} steps were skipped, because a gradient was not finite or no token was supervised: they changed no weight, "
            "and the schedule may have gone on without them."
        )
        place = int(np.flatnonzero(skipped)[0])
        yield run.found("run-skipped", text.format(count=int(skipped.sum()), steps=len(skipped)), place=place)
        return
    zero = _zero_from(run)
    if zero is not None:
        text = _(
            "The loss is exactly 0 from step {step} on: no token is supervised there (all labels masked), or the loss is computed wrongly. "
            "No model learns to that."
        )
        yield run.found(
            "loss-flat", text.format(step=int(run.columns.step[zero])), place=zero, severity="high", confidence="medium"
        )
        return
    rule = None if verdict is None else _rule(verdict)
    is_slow = rule in {"loss-crawls", "loss-flat"}
    if verdict is None or rule is None or (is_slow and _begins_late(run)):
        return
    losses, places = _losses(run)
    broken = np.flatnonzero(~(np.abs(losses) < ENDLESS))
    place = int(places[broken[0]]) if len(broken) else int(places[-1])
    short = is_slow and len(losses) < _ENOUGH_TO_CRAWL
    reason = verdict.reason
    if len(broken):
        text = _("The loss is {loss} at step {step}: the run has diverged. Go back to a checkpoint before it.")
        reason = text.format(loss=float(losses[broken[0]]), step=int(run.columns.step[place]))
    advice = "" if is_slow and _has_decayed(run) else _advice(verdict)
    yield run.found(rule, sentences(reason, advice), place=place, confidence="low" if short else "medium")


def _trains_nothing(run: Run) -> bool:
    rates = run.columns.learning_rate
    return len(rates) > 0 and bool((rates == 0).all())


def _zero_from(run: Run) -> int | None:
    """The place from which on every loss is exactly 0, if that is for long. A policy's loss may be 0 while its gradient is not."""
    losses, places = _losses(run)
    others = np.flatnonzero(losses != 0)
    first = int(others[-1]) + 1 if len(others) else 0
    if len(losses) - first < _FEWEST_ZEROS:
        return None
    last = run.ledger.steps[int(places[-1])].grad_norm
    return None if last else int(places[first])


def _begins_late(run: Run) -> bool:
    """The first steps of the training stand in another ledger: what is learned fast was learned there."""
    return bool(run.headers) and run.headers[0].resumed_from_step > 0


def _has_decayed(run: Run) -> bool:
    """Whether the schedule is past its peak by half: then the loss is slow because the rate is meant to be low."""
    rates = run.columns.learning_rate[~np.isnan(run.columns.learning_rate)]
    return len(rates) > 0 and bool(rates[-1] < rates.max() / 2)


def _losses(run: Run) -> tuple[Floats, Floats]:
    """The losses of steps that were taken, and their places. A loss that was not written down is not one that diverged."""
    columns = run.columns
    known = (columns.has_loss > 0) & (columns.skipped == 0)
    return columns.loss[known], np.flatnonzero(known).astype(np.float64)


def _thinned(losses: Floats) -> Floats:
    if len(losses) <= _MOST:
        return losses
    edges = np.linspace(0, len(losses), _MOST + 1).astype(int)
    means: Floats = np.add.reduceat(losses, edges[:-1]) / np.diff(edges)
    return means


def _rule(verdict: Verdict) -> str | None:
    if verdict.word in {"diverges", "oscillates"}:
        return f"loss-{verdict.word}"
    if verdict.word != "crawls" or verdict.steps < FEWEST_TO_CRAWL:
        return None
    return "loss-flat" if _is_flat(verdict) else "loss-crawls"


def _is_flat(verdict: Verdict) -> bool:
    """No fall that could be told from the noise of its two ends, which are averages of so many steps."""
    assert verdict.fall is not None
    assert verdict.swing is not None
    first, last = max(5, verdict.steps // 50), max(5, verdict.steps // 10)
    return verdict.fall <= max(SURE / 2 * verdict.swing * math.sqrt(1 / first + 1 / last), 1e-9)


def _advice(verdict: Verdict) -> str:
    if verdict.advice is None:
        return ""
    now, then = format_setting(verdict.advice.now), format_setting(verdict.advice.then)
    return _("Try a learning rate of {then} instead of {now} ({source}).").format(
        then=then, now=now, source=verdict.advice.source
    )
