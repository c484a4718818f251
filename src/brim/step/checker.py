"""Promise and fact, compared: one step while training runs, or a whole ledger afterwards.

Everything that is not as promised becomes a sentence that names the step, so that the same text serves the error that stops a run, the
warning, and the audit of a finished one.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import asdict
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

from brim.errors import RunError
from brim.locale import _, sentences
from brim.records import Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from brim.records import Ledger, LedgerEntry, LedgerHeader, LedgerSummary

_IDS_IN_A_SENTENCE: Final = 5


def check_step(
    entry: LedgerEntry,
    promised_ids: Iterable[int] | None = None,
    *,
    expected_step: int | None = None,
    divisor: float | None = None,
) -> list[str]:
    """What in this step is not as promised, in sentences; none if the promise is kept.

    `promised_ids` are the sequences of the global batch, in any order; `divisor` is what the gradient was divided by. What is not given
    is not compared.
    """
    step, broken = entry.step, _order_broken(entry, expected_step)
    if divisor not in (None, entry.supervised_tokens):
        text = _("Step {step} counts {count} supervised tokens, and its gradient was divided by {divisor}.")
        broken.append(text.format(step=step, count=entry.supervised_tokens, divisor=divisor))
    return broken + _ids_broken(entry, promised_ids) + _counts_broken(entry)


def check_observed_step(entry: LedgerEntry, *, expected_step: int | None = None) -> list[str]:
    """The same of a step that was only watched: which sequences it took is not known, so their number is compared."""
    in_slices = sum(one.sequences for one in entry.slices)
    cases = (
        (
            entry.promised_sequences not in (None, entry.sequences),
            _("Step {step} took {taken} sequences, and {promised} were promised."),
        ),
        (
            entry.slices and in_slices != entry.sequences,
            _("Step {step} counts {taken} sequences, and its micro-batches hold {in_slices}."),
        ),
    )
    facts = {"step": entry.step, "taken": entry.sequences, "promised": entry.promised_sequences, "in_slices": in_slices}
    return _order_broken(entry, expected_step) + [text.format(**facts) for broken, text in cases if broken]


class Checker:
    """Compares each step with its promise while training runs, and stops the run or warns where they differ."""

    def __init__(self, on_broken: Literal["stop", "warn"] = "stop", *, last_step: int = 0) -> None:
        self._on_broken = on_broken
        self._last_step = last_step

    def check(self, entry: LedgerEntry, promised_ids: Iterable[int], divisor: float) -> None:
        """Compare one step. To be asked after its line is written, so that the ledger shows what the error speaks of."""
        broken = check_step(entry, promised_ids, expected_step=self._last_step + 1, divisor=divisor)
        self._last_step = entry.step
        if not broken:
            return
        if self._on_broken == "warn":
            warnings.warn(sentences(*broken), RuntimeWarning, stacklevel=2)
            return
        raise RunError(
            sentences(_("A step was not what was promised, so training stops."), *broken),
            hint=_(
                "Continue from the last checkpoint. If it happens again, please report it with the last lines of ledger.jsonl."
            ),
        )


def check_ledger(
    ledger: Ledger, *, promised: Callable[[int], Iterable[int]] | None = None, lengths: npt.ArrayLike | None = None
) -> list[str]:
    """What in a whole ledger is not as promised, in sentences; none if every promise is kept.

    `promised` gives the sequences of a step by its number, which counts from 1; `lengths` are the tokens of each sequence (`[n]`, or
    `[n, 2]` with targets). Without them the ledger is held against its header and against itself.
    """
    return [sentence for _step, sentence in broken_in(ledger, promised=promised, lengths=lengths)]


def broken_in(
    ledger: Ledger, *, promised: Callable[[int], Iterable[int]] | None = None, lengths: npt.ArrayLike | None = None
) -> Iterator[tuple[int | None, str]]:
    """The same one by one, each with the place in `ledger.steps` that it is about; None where it is about the whole."""
    headers = in_force(ledger.headers)
    if not headers:
        yield None, _("The ledger has no header, so it does not say what was promised.")
        return
    changes = _changes(headers)
    yield from ((None, sentence) for sentence in changes)
    observed = any(header.observed for header in headers)
    # Steps of different promises cannot be held against one of them.
    epochs = None if changes or observed else _Epochs(headers[-1])
    tokens = None if lengths is None else _as_array(lengths)
    totals = Totals(headers[-1].resumed_from_step)
    expected = headers[0].resumed_from_step + 1
    unrecorded = {step for header in headers for first, last in header.unrecorded_steps for step in range(first, last + 1)}
    for place, entry in enumerate(ledger.steps):
        if not place:
            # Where the first header was lost, its steps are still there.
            expected = min(expected, entry.step)
        while expected in unrecorded and expected < entry.step:
            expected += 1
        if observed:
            broken = check_observed_step(entry, expected_step=expected)
        else:
            broken = check_step(entry, promised and promised(entry.step), expected_step=expected)
        broken += epochs.add(entry) if epochs else []
        # Which sequences a watched script took is not known, so neither are their lengths.
        broken += [] if tokens is None or observed else _tokens_broken(entry, tokens)
        yield from ((place, sentence) for sentence in broken)
        expected = entry.step + 1
        if entry.step > headers[-1].resumed_from_step:
            totals.add(entry)
    whole = epochs.end() if epochs else []
    whole += [] if ledger.summary is None else _sums_broken(ledger.summary, totals)
    yield from ((None, sentence) for sentence in whole)


def _order_broken(entry: LedgerEntry, expected_step: int | None) -> list[str]:
    if expected_step in (None, entry.step):
        return []
    return [_("Step {step} came where step {expected} was due.").format(step=entry.step, expected=expected_step)]


def _ids_broken(entry: LedgerEntry, promised_ids: Iterable[int] | None) -> list[str]:
    times = Counter(entry.sequence_ids)
    promised = set(times) if promised_ids is None else {int(one) for one in promised_ids}
    cases = (
        (_("Step {step} lacks sequences that were promised: {ids}."), promised - set(times)),
        (_("Step {step} took sequences that were not promised: {ids}."), set(times) - promised),
        (_("Step {step} took sequences more than once: {ids}."), {one for one, count in times.items() if count > 1}),
    )
    return [text.format(step=entry.step, ids=_some(ids)) for text, ids in cases if ids]


def _counts_broken(entry: LedgerEntry) -> list[str]:
    """Numbers of one line that contradict each other."""
    in_slices = sum(one.sequences for one in entry.slices)
    computed = sum(one.sequences * ((one.length or 0) + one.target_length) for one in entry.slices)
    # Not counted is known only of runs that are watched; a run of brim's own that does not count contradicts its slices.
    padded, tokens = entry.padded_tokens or 0, entry.tokens or 0
    listed = len(entry.sequence_ids)
    ranks = [one.rank for one in entry.slices]
    cases = (
        (listed != entry.promised_sequences, _("Step {step} took {listed} sequences, and {promised} were promised.")),
        (listed != entry.sequences, _("Step {step} lists {listed} sequences and counts {counted}.")),
        (listed != in_slices, _("Step {step} lists {listed} sequences, and its micro-batches hold {in_slices}.")),
        (ranks != sorted(ranks), _("Step {step} does not list its micro-batches rank by rank.")),
        (padded != computed, _("Step {step} counts {padded} padded tokens, and its micro-batches make {computed}.")),
        (padded < tokens, _("Step {step} counts {padded} padded tokens, fewer than its {tokens} real ones.")),
        (not entry.supervised_tokens and not entry.skipped, _("Step {step} has no supervised token and was not skipped.")),
    )
    facts = {
        "step": entry.step, "listed": listed, "promised": entry.promised_sequences, "counted": entry.sequences, "in_slices": in_slices,
        "padded": padded, "computed": computed, "tokens": tokens,
    }  # fmt: skip
    return [text.format(**facts) for broken, text in cases if broken]


def _tokens_broken(entry: LedgerEntry, lengths: npt.NDArray[Any]) -> list[str]:
    known = [one for one in entry.sequence_ids if one < len(lengths)]
    tokens = int(lengths[known].sum())
    if tokens == entry.tokens or len(known) < len(entry.sequence_ids):
        return []
    text = _("Step {step} counts {counted} tokens, and its sequences have {tokens}.")
    return [text.format(step=entry.step, counted=entry.tokens, tokens=tokens)]


def _as_array(lengths: npt.ArrayLike) -> npt.NDArray[Any]:
    import numpy as np  # the base installation, which checks ledgers without lengths, has no numpy

    return np.asarray(lengths)


class _Epochs:
    """Each sequence at most once in an epoch, exactly once in one that is complete; as many in each step as was promised."""

    def __init__(self, header: LedgerHeader) -> None:
        assert header.effective_batch is not None
        assert header.sequences_in_data is not None
        assert header.steps_per_epoch is not None
        self._effective_batch, self._drop_last = header.effective_batch, header.drop_last
        self._sequences_in_data, self._steps_per_epoch = header.sequences_in_data, header.steps_per_epoch
        self._epoch = -1
        self._steps: set[int] = set()
        self._seen = bytearray()
        """One byte for each sequence, up to the last that was taken: a header may promise any number."""

    def add(self, entry: LedgerEntry) -> list[str]:
        """What the next step breaks, and its predecessors if an epoch ends with them."""
        epoch, place = divmod(entry.step - 1, self._steps_per_epoch)
        broken = [] if epoch == self._epoch else self.end()
        self._epoch = epoch
        self._steps.add(place)
        due = min(self._effective_batch, self._sequences_in_data - place * self._effective_batch)
        if entry.promised_sequences != due:
            text = _("Step {step} promised {promised} sequences, and {due} were due by the header.")
            broken.append(text.format(step=entry.step, promised=entry.promised_sequences, due=due))
        ids = set(entry.sequence_ids)
        foreign = {one for one in ids if one >= self._sequences_in_data}
        if foreign:
            broken.append(
                _("Step {step} took sequences that the data does not have: {ids}.").format(step=entry.step, ids=_some(foreign))
            )
        places = ids - foreign
        self._seen.extend(bytes(max(0, max(places, default=0) + 1 - len(self._seen))))
        again = list(compress(places, map(self._seen.__getitem__, places)))
        if again:
            text = _("Step {step} took sequences that an earlier step of its epoch had taken: {ids}.")
            broken.append(text.format(step=entry.step, ids=_some(again)))
        for one in places:
            self._seen[one] = 1
        return broken

    def end(self) -> list[str]:
        """What an epoch lacks, if all its steps are there; then the next begins."""
        taken = self._seen.count(1)
        due = self._sequences_in_data
        due -= due % self._effective_batch if self._drop_last else 0
        complete = len(self._steps) == self._steps_per_epoch
        self._seen.clear()
        self._steps.clear()
        if not complete or taken == due:
            return []
        text = _("The epoch that ended with step {step} took {taken} sequences of {due}.")
        return [text.format(step=(self._epoch + 1) * self._steps_per_epoch, taken=taken, due=due)]


def in_force(headers: Sequence[LedgerHeader]) -> list[LedgerHeader]:
    """The headers under which steps stand that were not superseded."""
    found: list[LedgerHeader] = []
    for header in headers:
        while found and found[-1].resumed_from_step >= header.resumed_from_step:
            found.pop()
        found.append(header)
    return found


def _changes(headers: Sequence[LedgerHeader]) -> list[str]:
    """What may not differ between the parts of a run, and does."""
    text = _("{name} was {before}, and is {after} since the run was continued after step {step}.")
    return [
        text.format(name=name, before=getattr(before, name), after=getattr(after, name), step=after.resumed_from_step)
        for before, after in pairwise(headers)
        for name in ("seed", "effective_batch", "sequences_in_data", "drop_last", "data_fingerprint")
        if getattr(before, name) != getattr(after, name)
    ]


def _sums_broken(summary: LedgerSummary, totals: Totals) -> list[str]:
    text = _("The summary says {name} = {said}, and its steps make {made}.")
    said = asdict(summary)
    made = asdict(totals.summary(seconds=summary.seconds, finished=summary.finished, reason=summary.reason))
    return [text.format(name=name, said=said[name], made=made[name]) for name in said if not _same(said[name], made[name])]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return one == other


def _some(ids: Iterable[int]) -> str:
    found = sorted(ids)
    listed = ", ".join(map(str, found[:_IDS_IN_A_SENTENCE]))
    if len(found) <= _IDS_IN_A_SENTENCE:
        return listed
    return _("{listed} and others, {count} in all").format(listed=listed, count=len(found))
