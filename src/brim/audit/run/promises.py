"""Promise and fact: what the checker of the step finds in a ledger, each kind of breach once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from brim.errors import BrimError
from brim.locale import _, sentences
from brim.records.findings import InForce
from brim.records.observations import OBSERVATION_FILE, Observation
from brim.step.checker import broken_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.run.reading import Run

_DETAILS: Final = re.compile(r"\w+ = |\d[\d,.e+ -]*")
"""What differs between two sentences about the same kind of breach: numbers, and the name of a sum."""
_MOST_BLAMED: Final = 2
_SHORT_SHARE: Final = 1 / 3
"""A script that is watched may take a short last window in each epoch; where that is more than every third step, it is no last one."""


def observation_of(ledger: Path) -> Observation | None:
    """What `brim observe` wrote beside its ledger; None where there is nothing, or it cannot be read, or it is of another ledger."""
    path = ledger.with_name(OBSERVATION_FILE)
    if not path.is_file():
        return None
    try:
        found = Observation.read(path)
    except BrimError:
        return None
    return found if found.ledger is not None and Path(found.ledger).name == ledger.name else None


def check(run: Run, observation: Observation | None = None) -> Iterator[Found]:
    """One finding for each kind of breach, at the first step that shows it."""
    differing = _observed(run, observation)
    if differing is not None:
        yield differing
    if _has_only_short_windows(run):
        return
    first: dict[str, tuple[int | None, str]] = {}
    counts: Counter[str] = Counter()
    for place, sentence in broken_in(run.ledger):
        kind = _DETAILS.sub("#", sentence)
        counts[kind] += 1
        first.setdefault(kind, (place, sentence))
    for kind, (place, sentence) in first.items():
        rows = _rows(run, place)
        if differing is not None and rows:
            continue  # the observation says the same of the whole run
        more = _("More of this kind: {count}.").format(count=counts[kind] - 1) if counts[kind] > 1 else ""
        # What is about the whole is shown at the last step.
        yield run.found("run-promise-broken", sentences(sentence, more), place=-1 if place is None else place, in_force=rows)


def _observed(run: Run, observation: Observation | None) -> Found | None:
    """The batch that was configured and the one that was used, where `brim observe` saw them differ."""
    if observation is None or not observation.differs or observation.configured is None or observation.in_force is None:
        return None
    asked, used = observation.configured, observation.in_force
    text = _("The run used {used} sequences per optimizer step; {asked} were configured ({source}).")
    source = ", ".join(filter(None, (asked.source, asked.where)))
    message = text.format(used=used.sequences, asked=asked.effective_batch, source=source)
    if used.is_product and used.sequences > used.micro_batch:
        parts = _("Each step was {micro} (micro-batch) x {accumulation} (accumulation) x {ranks} (ranks).")
        message = sentences(message, parts.format(micro=used.micro_batch, accumulation=used.accumulation, ranks=used.ranks))
    for blamed in observation.blamed[:_MOST_BLAMED]:
        message = sentences(message, f"{blamed.file}:{blamed.line}: {blamed.message}")
    row = InForce(setting="effective_batch", set=asked.effective_batch, in_force=used.sequences)
    return run.found("run-promise-broken", message, place=0, severity="high", in_force=(row,))


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
