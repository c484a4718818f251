"""Promise and fact: what the checker of the step finds in a ledger, each kind of breach once."""

from __future__ import annotations

import re
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Final

from brim.locale import _, sentences
from brim.records.findings import InForce
from brim.step.checker import broken_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.run.reading import Run

_DETAILS: Final = re.compile(r"\w+ = |\d[\d,.e+ -]*")
"""What differs between two sentences about the same kind of breach: numbers, and the name of a sum."""
_SHORT_SHARE: Final = 1 / 3
"""A script that is watched may take a short last window in each epoch; where that is more than every third step, it is no last one."""


def check(run: Run) -> Iterator[Found]:
    """One finding for each kind of breach, at the first step that shows it."""
    if _has_only_short_windows(run):
        return
    first: dict[str, tuple[int | None, str]] = {}
    counts: Counter[str] = Counter()
    for place, sentence in broken_in(run.ledger):
        kind = _DETAILS.sub("#", sentence)
        counts[kind] += 1
        first.setdefault(kind, (place, sentence))
    for kind, (place, sentence) in first.items():
        more = _("More of this kind: {count}.").format(count=counts[kind] - 1) if counts[kind] > 1 else ""
        # What is about the whole is shown at the last step.
        yield run.found(
            "run-promise-broken", sentences(sentence, more), place=-1 if place is None else place, in_force=_rows(run, place)
        )


def _has_only_short_windows(run: Run) -> bool:
    """Of a watched script whose steps differ from the promise only now and then, and only by fewer sequences."""
    if not any(header.observed for header in run.headers):
        return False
    pairs = list(zip(run.numbers["promised"], run.numbers["sequences"], strict=True))
    short = [taken < promised for promised, taken in pairs]
    if any(taken > promised for promised, taken in pairs) or not any(short) or sum(short) / len(short) > _SHORT_SHARE:
        return False
    return all(place is not None and short[place] for place, _sentence in broken_in(run.ledger))


def _rows(run: Run, place: int | None) -> tuple[InForce, ...]:
    """The table of promise and fact, where the number of sequences is what differs."""
    promised, taken = run.numbers["promised"], run.numbers["sequences"]
    if place is None or not (promised[place] != taken[place] and promised[place] > 0):
        return ()
    usual = int(median(count for due, count in zip(promised, taken, strict=True) if due == promised[place]))
    # Where the usual step is as promised, the one that is not is what there is to show.
    in_force = int(taken[place]) if usual == promised[place] else usual
    return (InForce(setting="effective_batch", set=int(promised[place]), in_force=in_force),)
