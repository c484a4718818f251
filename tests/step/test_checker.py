"""Promise and fact are held against each other: of one step, and of a whole ledger; whatever was broken is named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from brim.errors import RunError
from brim.records import LedgerEntry, LedgerSummary, Totals
from brim.step.checker import Checker, broken_in, check_ledger, check_step
from tests.step.ledgers import HEADER, LENGTHS, N, in_memory, promised, step_of


def test_a_step_that_keeps_its_promise_is_not_spoken_of() -> None:
    for number in range(1, 13):
        assert check_step(step_of(number), promised(number), expected_step=number, divisor=7) == []
        assert check_step(step_of(number), list(reversed(promised(number).tolist()))) == []


IDS = step_of(1).sequence_ids
FOREIGN = next(one for one in range(N) if one not in IDS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequence_ids": (*IDS[:3], FOREIGN)}, [f"Step 1 lacks sequences that were promised: {IDS[3]}.", f"Step 1 took sequences that were not promised: {FOREIGN}."]),
        ({"sequence_ids": (*IDS[:3], IDS[0])}, [f"Step 1 lacks sequences that were promised: {IDS[3]}.", f"Step 1 took sequences more than once: {IDS[0]}."]),
        ({"sequence_ids": IDS[:3], "sequences": 3}, [f"lacks sequences that were promised: {IDS[3]}.", "took 3 sequences, and 4 were promised.", "lists 3 sequences, and its micro-batches hold 4."]),
        ({"sequences": 5}, ["Step 1 lists 4 sequences and counts 5."]),
        ({"promised_sequences": 5}, ["Step 1 took 4 sequences, and 5 were promised."]),
        ({"step": 2}, ["Step 2 came where step 1 was due."]),
        ({"supervised_tokens": 8}, ["Step 1 counts 8 supervised tokens, and its gradient was divided by 7."]),
        ({"supervised_tokens": 0}, ["Step 1 counts 0 supervised tokens, and its gradient was divided by 7.", "has no supervised token and was not skipped"]),
        ({"slices": step_of(1).slices[:1], "padded_tokens": (step_of(1).slices[0].length or 0) * 2}, ["its micro-batches hold 2."]),
        ({"slices": step_of(1).slices[::-1]}, ["Step 1 does not list its micro-batches rank by rank."]),
        ({"padded_tokens": (step_of(1).padded_tokens or 0) + 1}, ["padded tokens, and its micro-batches make"]),
        ({"tokens": (step_of(1).padded_tokens or 0) + 1}, ["fewer than its"]),
    ],
    ids=["exchanged", "twice", "lost", "miscounted", "more-promised", "wrong-step", "divisor", "nothing-supervised", "slice-lost", "ranks-mixed", "padded", "tokens"],
)  # fmt: skip
def test_every_broken_promise_of_a_step_is_named(changes: dict[str, Any], says: list[str]) -> None:
    broken = check_step(step_of(1, **changes), promised(1), expected_step=1, divisor=7)
    assert len(broken) == len(says)
    assert all(expected in sentence for expected, sentence in zip(says, broken, strict=True) if "Step" in expected)
    assert all(any(expected in sentence for sentence in broken) for expected in says)


def test_a_step_without_a_supervised_token_may_be_skipped() -> None:
    assert check_step(step_of(1, supervised_tokens=0, skipped=True, loss=math.nan), promised(1), divisor=0) == []


def test_many_ids_are_not_all_listed() -> None:
    assert check_step(step_of(1), range(1000, 1010))[0].endswith(": 1000, 1001, 1002, 1003, 1004 and others, 10 in all.")


def test_training_stops_at_a_broken_promise_or_warns_if_told_so() -> None:
    checker = Checker()
    checker.check(step_of(1), promised(1), 7)
    with pytest.raises(RunError, match=r"training stops\. Step 1 came where step 2 was due\.") as caught:
        checker.check(step_of(1), promised(1), 7)
    assert caught.value.hint
    checker = Checker("warn", last_step=4)
    with pytest.warns(RuntimeWarning, match="Step 6 came where step 5 was due"):
        checker.check(step_of(6), promised(6), 7)
    checker.check(step_of(7), promised(7), 7)


def doubled(entry: LedgerEntry) -> LedgerEntry:
    return dataclasses.replace(entry, sequence_ids=step_of(1).sequence_ids)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([1, 2, 4], ["Step 4 came where step 3 was due."]),
        ([2, 3], ["Step 2 came where step 1 was due."]),
        ([1, 2, 2], ["Step 2 came where step 3 was due.", "Step 2 took sequences that an earlier step of its epoch had taken: "]),
        ([1, (2, doubled)], ["Step 2 took sequences that an earlier step of its epoch had taken: "]),
        ([1, 2, 3, 4, (5, doubled), 6], ["Step 5 took sequences that an earlier", "The epoch that ended with step 6 took 18 sequences of 22."]),
        ([1, 2, 3, 4, (5, doubled), 6, 7], ["Step 5 took sequences that an earlier", "The epoch that ended with step 6 took 18 sequences of 22."]),
        ([(1, lambda entry: dataclasses.replace(entry, sequence_ids=(99, *entry.sequence_ids[1:])))], ["that the data does not have: 99."]),
        ([1, 2, 3, 4, 5, (6, lambda _entry: step_of(1, step=6))], ["Step 6 promised 4 sequences, and 2 were due by the header.", "Step 6 took sequences that an earlier", "ended with step 6 took 20"]),
    ],
    ids=["gap", "late-start", "double-step", "repeated", "epoch-end", "next-epoch", "foreign", "last-too-large"],
)  # fmt: skip
def test_every_broken_promise_of_a_run_is_named(entries: list[Any], says: list[str]) -> None:
    steps = [step_of(one) if isinstance(one, int) else one[1](step_of(one[0])) for one in entries]
    broken = check_ledger(in_memory(*steps))
    assert [any(start in sentence for start in says) for sentence in broken] == [True] * len(says), broken


def test_complete_epochs_hold_every_sequence_once_also_without_the_last_batch() -> None:
    assert check_ledger(in_memory(*map(step_of, range(1, 19))), promised=promised) == []
    header = dataclasses.replace(HEADER, drop_last=True, steps_per_epoch=5)
    assert check_ledger(in_memory(*map(step_of, range(1, 6)), headers=(header,))) == []
    continued = dataclasses.replace(HEADER, resumed_from_step=3)
    assert check_ledger(in_memory(*map(step_of, range(4, 9)), headers=(continued,))) == []


def test_a_run_that_continues_with_another_promise_is_told() -> None:
    other = dataclasses.replace(HEADER, resumed_from_step=2, seed=4, data_fingerprint="cd34", world_size=2)
    assert check_ledger(in_memory(*map(step_of, range(1, 4)), headers=(HEADER, other))) == [
        "seed was 3, and is 4 since the run was continued after step 2.",
        "data_fingerprint was ab12, and is cd34 since the run was continued after step 2.",
    ]
    anew = dataclasses.replace(HEADER, seed=4)
    assert check_ledger(in_memory(step_of(1), headers=(HEADER, other, anew))) == []
    assert check_ledger(in_memory(step_of(1), headers=())) == ["The ledger has no header, so it does not say what was promised."]


def test_tokens_are_held_against_the_lengths_of_the_data() -> None:
    wrong = step_of(1, tokens=(step_of(1).tokens or 0) - 1)
    assert check_ledger(in_memory(wrong)) == []
    assert "Step 1 counts" in check_ledger(in_memory(wrong), lengths=LENGTHS)[0]
    pairs = np.stack([LENGTHS - 1, np.ones(N, int)], axis=1)
    assert check_ledger(in_memory(step_of(1)), lengths=pairs) == []


def totals(count: int) -> LedgerSummary:
    made = Totals()
    for number in range(1, count + 1):
        made.add(step_of(number, loss=math.nan))
    return made.summary(seconds=9.0, finished=True, reason="")


@pytest.mark.parametrize("name", ["last_step", "steps", "sequences", "tokens", "padded_tokens", "supervised_tokens", "splits", "skipped",
                                  "compute_seconds", "wait_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "last_loss"])  # fmt: skip
def test_a_summary_that_does_not_add_up_is_told(name: str) -> None:
    steps = [step_of(number, loss=math.nan) for number in range(1, 4)]
    summary = totals(3)
    assert check_ledger(in_memory(*steps, summary=summary)) == []
    value = getattr(summary, name)
    changed: dict[str, Any] = {name: 1 if value is None or math.isnan(value) else value + 1}
    wrong = dataclasses.replace(summary, **changed)
    (sentence,) = check_ledger(in_memory(*steps, summary=wrong))
    assert sentence.startswith(f"The summary says {name} = ")


OBSERVED = dataclasses.replace(HEADER, observed=True, sequences_in_data=None, steps_per_epoch=None, budget=None)


def watched(number: int, **changes: Any) -> LedgerEntry:
    """A step of a script that is not brim's: which sequences it took is not known."""
    return step_of(number, **{"sequence_ids": (), "supervised_tokens": 0, **changes})


def test_a_watched_run_is_judged_by_how_many_sequences_it_took() -> None:
    steps = [watched(1), watched(2, sequences=2, slices=()), watched(3, promised_sequences=None, sequences=9, slices=())]
    assert check_ledger(in_memory(*steps, headers=(OBSERVED,))) == ["Step 2 took 2 sequences, and 4 were promised."]


def test_a_watched_run_may_not_contradict_itself() -> None:
    steps = [watched(1, sequences=3, promised_sequences=None), watched(3)]
    assert check_ledger(in_memory(*steps, headers=(OBSERVED,))) == [
        "Step 1 counts 3 sequences, and its micro-batches hold 4.",
        "Step 3 came where step 2 was due.",
    ]


def test_what_is_broken_is_told_with_its_place() -> None:
    ledger = in_memory(step_of(1), step_of(2, sequences=5), step_of(3), headers=(HEADER, dataclasses.replace(HEADER, seed=4)))
    assert [place for place, _sentence in broken_in(ledger)] == [1]
    torn = in_memory(step_of(1), headers=(HEADER, dataclasses.replace(HEADER, seed=4, resumed_from_step=1)))
    assert [place for place, _sentence in broken_in(torn)] == [None]


@pytest.mark.parametrize("name", ["effective_batch", "sequences_in_data", "steps_per_epoch", "budget"])
def test_only_a_watched_run_may_leave_out_what_was_planned(name: str) -> None:
    without: dict[str, Any] = {name: None}
    with pytest.raises(ValueError, match=f"{name} may be left out only where a run is observed"):
        dataclasses.replace(HEADER, **without)
    assert getattr(dataclasses.replace(HEADER, observed=True, **without), name) is None
