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
    # A schedule ends near zero: the highest rate is the one that was chosen.
    return judge(series.tolist(), float(rates.max()) if len(rates) else None)


def check(run: Run, verdict: Verdict | None) -> Iterator[Found]:
    """At most one finding."""
    rule = None if verdict is None else _rule(verdict)
    if verdict is None or rule is None:
        return
    losses, places = _losses(run)
    broken = np.flatnonzero(~(np.abs(losses) < ENDLESS))
    place = int(places[broken[0]]) if len(broken) else int(places[-1])
    short = rule in {"loss-crawls", "loss-flat"} and len(losses) < _ENOUGH_TO_CRAWL
    reason = verdict.reason
    if len(broken):
        text = _("The loss is {loss} at step {step}: the run has diverged. Go back to a checkpoint before it.")
        reason = text.format(loss=float(losses[broken[0]]), step=int(run.columns.step[place]))
    yield run.found(rule, sentences(reason, _advice(verdict)), place=place, confidence="low" if short else "medium")


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
